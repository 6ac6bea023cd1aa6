from .loop import Loop as Loop
from .loop import evaluate as evaluate
from .loop import held_out_tasks as held_out_tasks
