from .packing import microbatches as microbatches
from .packing import pack as pack
from .padded import from_padded as from_padded
from .sample import PackedBatch as PackedBatch
from .sample import Sample as Sample
from .sample import to_samples as to_samples
