from .collector import Collector as Collector
from .collector import RolloutConfig as RolloutConfig
from .pool import EnvPool as EnvPool
from .transcript import ChatTokenizer as ChatTokenizer
