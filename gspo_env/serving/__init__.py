"""An address of a chat model: requests of programs in, answers of a policy out."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
