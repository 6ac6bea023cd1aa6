from .collector import Collector as Collector
from .pool import EnvPool as EnvPool
from .settings import RolloutConfig as RolloutConfig
from .transcript import ChatTokenizer as ChatTokenizer
