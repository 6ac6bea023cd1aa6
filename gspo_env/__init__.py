"""Train language models on text environments with many turns, by GSPO.

Importing this package registers its environments with Gymnasium and loads no heavy library.
"""

import os

import lazy_loader

from gspo_env.env.registration import register_builtin

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_builtin()

# Read when torch is loaded. Threads that spin for long while they wait for each other make a run
# many times slower as soon as another process needs a core; those that never spin wake up late.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # some 60 microseconds
