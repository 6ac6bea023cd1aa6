from .adapters import add_adapter as add_adapter
from .adapters import save_adapter as save_adapter
from .check import ModelCheck as ModelCheck
from .check import RunMode as RunMode
from .check import check_model as check_model
from .load import load_model as load_model
from .save import save_model as save_model
from .scorer import Scorer as Scorer
