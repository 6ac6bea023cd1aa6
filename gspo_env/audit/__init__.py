"""Attacks rewards before anything is trained on them; `gspo-env audit` prints the result."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
