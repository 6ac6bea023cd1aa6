from .base import GroupReward as GroupReward
from .base import Rating as Rating
from .base import score_group as score_group
from .client import ChatClient as ChatClient
from .judge import Judge as Judge
