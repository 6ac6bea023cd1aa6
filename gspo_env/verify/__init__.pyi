from .batch import Batch as Batch
from .batch import Row as Row
from .batch import read_batch as read_batch
from .batch import write_batch as write_batch
from .checks import verify as verify
