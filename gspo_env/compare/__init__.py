"""Controlled comparison: arms over problems and paired seeds, in parallel, resumable.

A problem is a config; an arm is a set of changes to it. For each seed, every arm of a problem
starts from the same warmed-up model and plays the same tasks, with the same number of episodes and
updates. Each run writes its own file when it ends, so a comparison that was stopped can be resumed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
