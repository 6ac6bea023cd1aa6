from .limits import left_out as left_out
from .limits import look as look
from .package import write_package as write_package
from .stepper import Stepper as Stepper
from .stepper import seeds as seeds
