"""A time limit that a suspended process does not use up."""

from __future__ import annotations

import asyncio
from typing import Any

_PARTS = 8


class Clock:
    """An `asyncio.timeout` that counts in eight parts.

    A part that ends late counts as two at most. So while the event loop does not turn, such as in
    a process that is suspended with Ctrl-Z, at most one more part passes.

    Args:
        seconds: The limit.
    """

    def __init__(self, seconds: float) -> None:
        """Starts nothing yet."""
        self._left, self._part = seconds, seconds / _PARTS
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Clock:
        """Starts the clock."""
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._wait()
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Stops the clock.

        Raises:
            TimeoutError: The time was over.
        """
        self._next.cancel()
        await self._timeout.__aexit__(*error)

    def expired(self) -> bool:
        """Returns whether the time was over."""
        return self._timeout.expired()

    def _wait(self) -> None:
        self._due = self._loop.time() + min(self._part, self._left)
        self._next = self._loop.call_at(self._due, self._count, min(self._part, self._left))

    def _count(self, seconds: float) -> None:
        now = self._loop.time()
        self._left -= seconds + min(now - self._due, self._part)
        if self._left > 0:
            self._wait()
        else:
            self._timeout.reschedule(now)
