from .controller import Controller as Controller
from .pool import WorkerCollector as WorkerCollector
from .pool import WorkerPool as WorkerPool
from .ranks import Ranks as Ranks
