"""Limits the episodes in flight and measures how many there are."""

from __future__ import annotations

import asyncio
from typing import Literal


class Gate(asyncio.Semaphore):
    """A semaphore that knows how long its places were taken.

    Args:
        places: Maximum number of episodes in flight.
    """

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.places, self.running = places, 0
        self.changed: float | None = None
        """Time of the event loop at which an episode last began or ended; None before the first."""
        self._sum = 0.0

    async def acquire(self) -> Literal[True]:
        """Waits for a place and takes it."""
        await super().acquire()
        self._count(1)
        return True

    def release(self) -> None:
        """Gives a place back."""
        super().release()
        self._count(-1)

    def episode_seconds(self) -> float:
        """Returns the seconds that episodes were in flight, added up, since the last call."""
        self._count(0)
        seconds, self._sum = self._sum, 0.0
        return seconds

    def part(self) -> Gate:
        """Returns a gate for some of the episodes, which share these places."""
        return _Part(self)

    def add(self, seconds: float) -> None:
        """Adds the time of episodes that another process has played."""
        self._sum += seconds
        self.changed = asyncio.get_running_loop().time()

    def _count(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        if self.changed is not None:
            self._sum += self.running * (now - self.changed)
        if change or self.changed is not None:
            self.changed = now
        self.running += change


class _Part(Gate):
    def __init__(self, whole: Gate) -> None:
        super().__init__(whole.places)
        self._whole = whole

    async def acquire(self) -> Literal[True]:
        await self._whole.acquire()
        self._count(1)
        return True

    def release(self) -> None:
        self._whole.release()
        self._count(-1)
