"""Event loops in background threads, for synchronous code that calls asynchronous code.

`step` may be called on the rollout's event loop or in one of its threads. A connection that
outlives one call therefore needs a loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()


def run(coroutine: Coroutine[Any, Any, T], loop: str, timeout: float | None = None) -> T:
    """Runs a coroutine on a background loop and waits for its result.

    Args:
        coroutine: The coroutine.
        loop: Name of the loop, which starts at its first use.
        timeout: Seconds after which the coroutine is cancelled.

    Raises:
        TimeoutError: It took longer.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop(loop))
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


def post(coroutine: Coroutine[Any, Any, Any], loop: str) -> None:
    """Runs a coroutine on a background loop without waiting; a failure is logged."""
    asyncio.run_coroutine_threadsafe(coroutine, _loop(loop)).add_done_callback(_log_failure)


def _log_failure(future: Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("in the background: %s: %s", type(error).__name__, error)


def _loop(name: str) -> asyncio.AbstractEventLoop:
    key = os.getpid(), name  # a fork has the loop but not its thread
    with _lock:
        if key not in _loops:
            _loops[key] = asyncio.new_event_loop()
            run_forever = _loops[key].run_forever
            threading.Thread(target=run_forever, name=f"loop-{name}", daemon=True).start()
        return _loops[key]
