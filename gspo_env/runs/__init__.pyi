from .effects import Effect as Effect
from .page import write_page as write_page
from .plots import learning_curve as learning_curve
from .run import Run as Run
from .run import Series as Series
