from .base import Recipe as Recipe
from .tiny import Tiny as Tiny
