"""What a run does now, for the panel: a part of a step, and since when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A part of a step that runs."""

    name: str
    """Such as `rollout`."""
    began: float = field(default_factory=time.monotonic)
    """Its start, in seconds of the monotonic clock."""


@contextmanager
def part(name: str) -> Iterator[None]:
    """Returns a context that runs a part of a step; a part within it is shown in its place.

    Example:
        >>> with part("update"), part("scoring"):
        ...     running().name
        'scoring'
    """
    mine = Part(name=name)
    _running.append(mine)
    try:
        yield
    finally:
        _running.remove(mine)


def running() -> Part | None:
    """Returns the part that began last and has not ended."""
    running = _running[-1:]  # one operation: other threads append and remove
    return running[0] if running else None


_running: list[Part] = []
"""The parts that have begun and not ended."""
