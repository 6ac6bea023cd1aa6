"""Fewer searches for cyclic garbage while episodes are played."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 50_000
"""New objects after which the collector looks among them; Python's default is 700. The episodes of
a rollout are kept, so most looks would find nothing."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Lets the garbage collector run seldom, and look only at objects that are made inside.

    Without this, it looks among the objects of all libraries again and again, which takes a tenth
    of the time of a rollout.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(_OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
