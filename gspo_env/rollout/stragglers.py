"""Lets a group go on without its slowest episode."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gspo_env.types import Episode

_LAST, _FEW = 1024, 64
"""Episodes whose times tell how long an episode takes, and the least number of them."""
_LEAST = 2
"""Episodes that a group keeps at least."""


@dataclass(slots=True)
class EpisodeDurations:
    """How long the last episodes took."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    """Times of the last episodes, as far as they were played."""

    async def leave_slowest(
        self, played: Sequence[asyncio.Task[Episode]], started: Mapping[int, float], quantile: float
    ) -> None:
        """Cancels the last episode of a group once it takes longer than most others did.

        Args:
            played: The episodes of the group.
            started: Time of the event loop at which each began, by its index.
            quantile: The share of the last episodes that took less time than the limit.
        """
        if len(played) <= _LEAST:
            return
        left = set(played)
        while len(left) > 1:
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for last in left:
            await asyncio.wait(
                [last], timeout=self._rest(started.get(played.index(last)), quantile)
            )
            last.cancel()

    def _rest(self, began: float | None, quantile: float) -> float | None:
        """Returns the seconds that an episode has left; None if there is no limit."""
        if len(self.seconds) < _FEW:
            return None
        now = asyncio.get_running_loop().time()
        limit = (now if began is None else began) + float(np.quantile(self.seconds, quantile))
        return max(0.0, limit - now)
