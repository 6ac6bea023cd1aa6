"""Controlled comparison: arms over problems and paired seeds, in parallel, resumable.

A problem is a config; an arm is a set of changes to it. For each seed, every arm of a problem
starts from the same warmed-up model and has the same tasks of evaluation; an arm that changes the
model or the recipe gets a start of its own. Curves are over training episodes, so arms may differ
in their steps, tasks and groups. Each run is a training in a process of its own. Only a finished
run is a result, so the same comparison, started again, plays those that stopped, failed or died.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
