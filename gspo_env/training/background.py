"""Runs the learner in a thread of its own, while the event loop plays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds that the end of a run waits for an update that still runs."""


class Background:
    """Runs one function at a time in a thread that does not keep the process from ending."""

    def __init__(self) -> None:
        self._running: Future[Any] | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function and waits for it; other tasks of the event loop go on."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._running = future

        def work() -> None:
            try:
                result = function()
            except BaseException as error:  # the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        # a daemon, which a second Ctrl-C need not wait for
        threading.Thread(target=work, name="learner", daemon=True).start()
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Waits a while for a function whose caller was cancelled."""
        if self._running is not None and not self._running.done():
            await asyncio.wait([asyncio.wrap_future(self._running)], timeout=_PATIENCE)
