"""Train language models on text environments with many turns, by GSPO.

Importing this package registers its environments with Gymnasium and loads no heavy library.
"""

import lazy_loader

from gspo_env.env.registration import register_builtin

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register_builtin()
