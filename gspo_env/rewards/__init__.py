"""Rewards that compare the finished episodes of a group, such as those of a model as a judge."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
