"""A judge for the batches of any trainer: a neutral form, what is checked, and converters."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
