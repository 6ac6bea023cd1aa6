from .loop import Loop as Loop
from .loop import evaluate as evaluate
from .split import Split as Split
from .split import hold_out as hold_out
from .split import read_resets as read_resets
from .tasks import draw_tasks as draw_tasks
from .watch import Problem as Problem
from .watch import Watch as Watch
