"""Event loops in background threads, for synchronous code that calls asynchronous code.

`step` may be called on the rollout's event loop or in one of its threads. A connection that
outlives one call therefore needs a loop of its own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from gspo_env.errors import EnvironmentContractError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()
_ENVIRONMENTS = "environments"
"""The loop of the `async def` methods and tools of environments."""


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


def make_synchronous(cls: type, names: Iterable[str]) -> None:
    """Replaces the `async def` methods of a class by synchronous ones, which run on one loop.

    Wrappers of Gymnasium unpack what `step` returns, so it cannot be a coroutine. Where the method
    is called on that loop itself, such as by `await super().step(action)`, it stays a coroutine.
    """
    for name in names:
        function = getattr(cls, name, None)
        if inspect.iscoroutinefunction(function):
            setattr(cls, name, _synchronous(function))


def settle(result: Any, what: str) -> Any:
    """Returns a result, or what a coroutine gives once it has run on the loop of environments.

    Raises:
        EnvironmentContractError: It is called on that loop, which cannot wait for itself.
    """
    if not inspect.isawaitable(result):
        return result
    if _on_loop():
        if inspect.iscoroutine(result):
            result.close()
        raise EnvironmentContractError(
            f"{what} is asynchronous and was called by an asynchronous step; expected one of the "
            "two as a plain `def`."
        )

    async def wait() -> Any:
        return await result

    return run(wait(), _ENVIRONMENTS)


def _synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        coroutine = function(*args, **kwargs)
        return coroutine if _on_loop() else run(coroutine, _ENVIRONMENTS)

    return call


def _on_loop() -> bool:
    """Returns whether the caller runs on the loop of environments."""
    try:
        return asyncio.get_running_loop() is _loops.get((os.getpid(), _ENVIRONMENTS))
    except RuntimeError:
        return False


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
