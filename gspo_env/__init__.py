"""Train language models on text environments with many turns, by GSPO.

Importing this package registers its environments with Gymnasium and loads no heavy library.
"""

import os

import lazy_loader

from gspo_env.env.registration import register_builtin

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_builtin()

# Read when torch is loaded. Threads that spin while they wait for each other make a run many times
# slower as soon as another process needs a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
