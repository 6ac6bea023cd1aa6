from .collector import Collector as Collector
<<<<<<< HEAD
=======
from .metrics import EpisodeStats as EpisodeStats
>>>>>>> contract
from .metrics import Evaluation as Evaluation
from .metrics import RolloutStats as RolloutStats
from .play import Move as Move
from .play import Policy as Policy
from .play import Situation as Situation
from .play import conclude as conclude
from .play import demonstrator as demonstrator
from .play import play_now as play_now
from .pool import EnvPool as EnvPool
from .settings import RolloutConfig as RolloutConfig
from .transcript import ChatTokenizer as ChatTokenizer
from .transcript import Transcript as Transcript
from .transcript import tokenize as tokenize
