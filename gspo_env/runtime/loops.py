"""Event loops for synchronous code that calls asynchronous code.

The `async def` methods and tools of an environment run on a loop of the thread that calls them,
which is the thread of the environment, so that a handle of one thread serves all of its methods. A
connection of ours that outlives one call, and is used from several threads, has a loop in a
background thread.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from gspo_env.errors import EnvironmentContractError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}
_lock = threading.Lock()
_ENVIRONMENTS = "environments"
"""The background loop of environments that are called on an event loop."""
_MARK = "__gspo_async__"
_LAST_SECONDS = 10.0
"""Time in which a coroutine that is interrupted can end."""


class _Own(threading.local):
    """The runner of a thread's loop, and the process that made it."""

    runner: asyncio.Runner | None = None
    process = 0


_own = _Own()


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


def run_alone(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a loop of its own and waits for its result, as `asyncio.run` does.

    If the caller is on an event loop, as in a notebook, the loop runs in a thread of its own.
    """
    if _running() is None:
        given: list[T] = []
        asyncio.run(_give(coroutine, given))
        return given[0]
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    future: Future[T] = Future()

    async def result() -> T:
        return await task

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                done = runner.run(result())
        except BaseException as error:  # the caller's to handle
            future.set_exception(error)
        else:
            future.set_result(done)

    thread = threading.Thread(target=work, name="loop", daemon=True)
    thread.start()
    try:
        return future.result()
    except BaseException:  # also Ctrl-C, which does not reach the thread
        with suppress(RuntimeError):  # the loop is closed, because the coroutine is over
            loop.call_soon_threadsafe(task.cancel)
        thread.join(_LAST_SECONDS)
        raise


def make_synchronous(cls: type, names: Iterable[str]) -> None:
    """Replaces the `async def` methods of a class by synchronous ones; see `finish`.

    Wrappers of Gymnasium unpack what `step` returns, so it cannot be a coroutine. Where the method
    is called by one that runs, such as by `await super().step(action)`, it stays a coroutine.
    """
    for name in names:
        function = getattr(cls, name, None)
        if inspect.iscoroutinefunction(function):
            setattr(cls, name, _synchronous(function))
            setattr(cls, _MARK, True)


def has_async(cls: type, tools: Iterable[Any] = ()) -> bool:
    """Returns whether a class had `async def` methods, or a tool is one."""
    functions = (getattr(tool, "function", None) for tool in tools)
    return bool(getattr(cls, _MARK, False)) or any(map(inspect.iscoroutinefunction, functions))


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine of an environment on the loop of the caller's thread.

    If the caller is on an event loop, which cannot wait for itself, it runs on the background loop
    of environments.
    """
    if _running() is not None:
        return run(coroutine, _ENVIRONMENTS)
    if _own.runner is None or _own.process != os.getpid():
        # with a factory it does not become the current loop of the caller's own code
        _own.runner, _own.process = asyncio.Runner(loop_factory=asyncio.new_event_loop), os.getpid()
    given: list[T] = []
    _own.runner.run(_give(coroutine, given))
    return given[0]


async def _give(coroutine: Coroutine[Any, Any, T], given: list[T]) -> None:
    """Adds what a coroutine returns to a list.

    In Python 3.11 and 3.12, a runner writes out what its task returned, such as all episodes, as a
    text that nobody reads.
    """
    given.append(await coroutine)


def own_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the loop of the caller's thread, or None if `finish` has not used one there."""
    ours = _own.runner is not None and _own.process == os.getpid()
    return _own.runner.get_loop() if _own.runner is not None and ours else None


def idle(wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Runs the loop of the caller's thread, with the tasks that environments started there.

    Args:
        wait: Ends when there is something else to do.
    """
    try:
        if own_loop() is not None:
            finish(wait())
    except BaseException as error:  # of a task, which has ended by it; the next call goes on
        logger.warning("a task of an environment raised %s: %s", type(error).__name__, error)


def close_own_loop() -> None:
    """Cancels the tasks on the loop of the caller's thread and closes it."""
    runner, _own.runner = _own.runner, None
    if runner is not None and _own.process == os.getpid():
        runner.close()


atexit.register(close_own_loop)


def settle(result: Any, what: str) -> Any:
    """Returns a result, or what an awaitable gives once it has run; see `finish`.

    Raises:
        EnvironmentContractError: It is called on a loop of environments, which cannot wait for
            itself.
    """
    # the test of an abstract class takes longer than most tools
    if type(result) is str or not inspect.isawaitable(result):
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

    return finish(wait())


def _synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        coroutine = function(*args, **kwargs)
        return coroutine if _on_loop() else finish(coroutine)

    return call


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _on_loop() -> bool:
    """Returns whether the caller runs on a loop of environments."""
    loop = _running()
    return loop is not None and loop in (own_loop(), _loops.get((os.getpid(), _ENVIRONMENTS)))


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
