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
        seconds: The limit; None is none, and needs no event loop.
    """

    def __init__(self, seconds: float | None) -> None:
        """Starts nothing yet."""
        self._left, self._part = seconds or 0.0, (seconds or 0.0) / _PARTS
        self._timeout = None if seconds is None else asyncio.timeout(None)

    async def __aenter__(self) -> Clock:
        """Starts the clock."""
        if self._timeout is not None:
            await self._timeout.__aenter__()
            self._loop = asyncio.get_running_loop()
            self._wait(self._timeout)
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Stops the clock.

        Raises:
            TimeoutError: The time was over.
        """
        if self._timeout is not None:
            self._next.cancel()
            await self._timeout.__aexit__(*error)

    def expired(self) -> bool:
        """Returns whether the time was over."""
        return self._timeout is not None and self._timeout.expired()

    def _wait(self, timeout: asyncio.Timeout) -> None:
        part = min(self._part, self._left)
        self._due = self._loop.time() + part
        self._next = self._loop.call_at(self._due, self._count, part, timeout)

    def _count(self, part: float, timeout: asyncio.Timeout) -> None:
        now = self._loop.time()
        self._left -= part + min(now - self._due, self._part)
        if self._left > 0:
            self._wait(timeout)
        else:
            timeout.reschedule(now)
