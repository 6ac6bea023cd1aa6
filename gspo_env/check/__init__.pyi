from .actions import random_policy as random_policy
from .environment import Checked as Checked
from .environment import check_env as check_env
