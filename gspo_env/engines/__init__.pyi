from .base import Completion as Completion
from .base import CopiesWeights as CopiesWeights
from .base import Engine as Engine
from .base import NamedTensors as NamedTensors
from .base import Sampling as Sampling
from .base import Transformers as Transformers
from .transformers import TransformersEngine as TransformersEngine
from .unbatched import UnbatchedEngine as UnbatchedEngine
