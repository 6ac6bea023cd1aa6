from .environment import check_env as check_env
from .environment import random_policy as random_policy
