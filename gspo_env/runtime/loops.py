"""Event loops for synchronous code that calls asynchronous code, and time limits on them.

The `async def` methods and tools of an environment run on a loop of the thread that calls them,
which is the environment's thread, so a connection that one method opens serves all of them. Our own
connections, which outlive a call and are used from several threads, have a loop in a background
thread.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import inspect
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from gspo_env.errors import EnvironmentContractError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}
"""The background loops, by process id and name: a fork inherits a loop, but not its thread."""
_lock = threading.Lock()
_ENVIRONMENTS = "environments"
"""The background loop of environments that are called on an event loop."""
_MARK = "__gspo_async__"
_CANCEL_SECONDS = 10.0
"""Seconds that an interrupted coroutine has to finish."""
_WAKE_SECONDS = 0.5
"""Seconds after which the main thread looks for signals: the system may give one to another thread,
which does not wake it."""
_LOOKS = 8
"""Most looks at the calls that run after a limit is over."""
_NEW_OBJECTS = 50_000
"""New objects that trigger a garbage collection; Python's default is 700. The episodes of a rollout
stay alive, so most collections would free nothing."""


class _ThreadLoop(threading.local):
    """The runner of a thread's loop, and the process that started it."""

    runner: asyncio.Runner | None = None
    process = 0
    waiting: asyncio.AbstractEventLoop | None = None
    """The loop of another thread that waits for the call of this one."""


_thread_loop = _ThreadLoop()


class ActiveTimeout:
    """An `asyncio.timeout` that tells a call that hangs from one that has just begun.

    A call that runs when the time is over may go on for a quarter of the limit; if another one runs
    then, that one may too. A limit that runs out while the process is suspended, as by Ctrl-Z,
    starts again once.

    Args:
        seconds: The limit; None is no limit, and needs no event loop.
        call: Returns the call that runs now, if one does.

    Attributes:
        hanging: The call that did not return.
    """

    def __init__(self, seconds: float | None, call: Callable[[], object] = str) -> None:
        self.hanging: object = None
        self._seconds, self._call = seconds or 0.0, call
        self._timeout = None if seconds is None else asyncio.timeout(None)

    async def __aenter__(self) -> ActiveTimeout:
        """Starts the time limit."""
        if self._timeout is not None:
            await self._timeout.__aenter__()
            self._loop = asyncio.get_running_loop()
            self._schedule(self._timeout, self._seconds, None, _LOOKS)
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Stops the time limit.

        Raises:
            TimeoutError: The time was over.
        """
        if self._timeout is not None:
            self._timer.cancel()
            await self._timeout.__aexit__(*error)

    def expired(self) -> bool:
        """Returns whether the time was over."""
        return self._timeout is not None and self._timeout.expired()

    def _schedule(self, timeout: asyncio.Timeout, seconds: float, call: object, looks: int) -> None:
        due = self._loop.time() + seconds
        self._timer = self._loop.call_at(due, self._look, timeout, due, call, looks)

    def _look(self, timeout: asyncio.Timeout, due: float, before: object, looks: int) -> None:
        now, call = self._loop.time(), self._call() or None
        if looks == _LOOKS and now - due > self._seconds / 8:
            self._schedule(timeout, self._seconds, None, looks - 1)
        elif call and call is not before and looks:
            self._schedule(timeout, self._seconds / 4, call, looks - 1)
        else:
            self.hanging = call if call is before else None
            timeout.reschedule(now)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Lets Python's garbage collector run rarely, and only on objects that are created inside.

    By default it walks over the objects of all libraries again and again, which takes a tenth of
    the time of a rollout.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(_NEW_OBJECTS, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def run(coroutine: Coroutine[Any, Any, T], loop: str, timeout: float | None = None) -> T:
    """Runs a coroutine on a background loop and waits for its result.

    Args:
        coroutine: The coroutine.
        loop: Name of the loop, which starts at its first use.
        timeout: Seconds after which the coroutine is cancelled.

    Raises:
        TimeoutError: It took longer.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _background_loop(loop))
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise


def run_alone(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a new loop and waits for its result, as `asyncio.run` does.

    If the caller is on an event loop already, as in a notebook, the new loop runs in a thread.
    """
    results: list[T] = []
    if running_loop() is None:
        asyncio.run(_append(coroutine, results))
        return results[0]
    loop = asyncio.new_event_loop()
    task = loop.create_task(_append(coroutine, results))

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(wait_for(task))

    future = run_in_daemon(work, "loop")
    try:
        while not wait([future], _WAKE_SECONDS).done:
            pass
        future.result()
    except BaseException:  # also Ctrl-C, which does not reach the thread
        with suppress(RuntimeError):  # the coroutine is over and its loop closed
            loop.call_soon_threadsafe(task.cancel)
        wait([future], _CANCEL_SECONDS)
        raise
    return results[0]


def make_synchronous(cls: type, names: Iterable[str]) -> None:
    """Replaces the `async def` methods of a class by synchronous ones; see `finish`.

    Gymnasium's wrappers unpack what `step` returns, so it cannot be a coroutine. A method that is
    called by another one on the same loop, as in `await super().step(action)`, stays a coroutine.
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
    """Runs an environment's coroutine on the loop of the caller's thread.

    If the caller is on an event loop, which cannot wait for itself, it runs on the background loop
    of environments.
    """
    if running_loop() is not None:
        return run(coroutine, _ENVIRONMENTS)
    if _thread_loop.runner is None or _thread_loop.process != os.getpid():
        # with a factory it does not become the current loop of the caller's own code
        _thread_loop.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        _thread_loop.process = os.getpid()
    results: list[T] = []
    _thread_loop.runner.run(_append(coroutine, results))
    return results[0]


async def _append(coroutine: Coroutine[Any, Any, T], results: list[T]) -> None:
    """Appends a coroutine's result to a list.

    In Python 3.11 and 3.12, a runner formats what its task returned, such as all episodes, as a
    text that nobody reads.
    """
    results.append(await coroutine)


def thread_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the loop of the caller's thread, or None if `finish` has not used one there."""
    runner = _thread_loop.runner if _thread_loop.process == os.getpid() else None
    return None if runner is None else runner.get_loop()


def idle(wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Runs the loop of the caller's thread, with the tasks that environments started there.

    Args:
        wait: Returns once there is something else to do.
    """
    try:
        if thread_loop() is not None:
            finish(wait())
    except BaseException as error:  # of a task, which has ended by it; the next call goes on
        logger.warning("a task of an environment raised %s: %s", type(error).__name__, error)


def close_thread_loop() -> None:
    """Cancels the tasks on the loop of the caller's thread and closes it."""
    runner, _thread_loop.runner = _thread_loop.runner, None
    if runner is not None and _thread_loop.process == os.getpid():
        runner.close()


atexit.register(close_thread_loop)


def settle(result: Any, name: str) -> Any:
    """Returns a result, or what an awaitable returns once it has run; see `finish`.

    Raises:
        EnvironmentContractError: It is called on a loop of environments, which cannot wait for
            itself.
    """
    # the test of an abstract class takes longer than most tools
    if type(result) is str or not inspect.isawaitable(result):
        return result
    if _on_environment_loop():
        if inspect.iscoroutine(result):
            result.close()
        raise EnvironmentContractError(
            f"{name} is asynchronous and was called by an asynchronous step; expected one of the "
            "two as a plain `def`."
        )
    return finish(wait_for(result))


async def wait_for(result: Awaitable[T]) -> T:
    """Makes a coroutine of any awaitable."""
    return await result


def _synchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        coroutine = function(*args, **kwargs)
        return coroutine if _on_environment_loop() else finish(coroutine)

    return call


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the event loop that the caller is on or that waits for it, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return _thread_loop.waiting


def call_for(
    loop: asyncio.AbstractEventLoop, function: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Calls a function in a thread for which an event loop waits; see `running_loop`."""
    _thread_loop.waiting = loop
    try:
        return function(*args, **kwargs)
    finally:
        _thread_loop.waiting = None


def _on_environment_loop() -> bool:
    loop = running_loop()
    return loop is not None and loop in (thread_loop(), _loops.get((os.getpid(), _ENVIRONMENTS)))


def post(coroutine: Coroutine[Any, Any, Any], loop: str) -> None:
    """Runs a coroutine on a background loop without waiting; a failure is logged."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _background_loop(loop))
    future.add_done_callback(_log_failure)


def _log_failure(future: Future[Any]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("in the background: %s: %s", type(error).__name__, error)


def _background_loop(name: str) -> asyncio.AbstractEventLoop:
    key = os.getpid(), name
    with _lock:
        if key not in _loops:
            _loops[key] = asyncio.new_event_loop()
            run_forever = _loops[key].run_forever
            threading.Thread(target=run_forever, name=f"loop-{name}", daemon=True).start()
        return _loops[key]


def fulfil(future: Future[T], call: Callable[[], T]) -> None:
    """Gives a future the result of a call, or what it raises; a cancelled one needs no call."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # for whoever waits
        future.set_exception(error)
        del future  # this frame, which the error keeps, would keep the error
    else:
        future.set_result(result)


def run_in_daemon(call: Callable[[], T], name: str) -> Future[T]:
    """Runs a call in a daemon thread, whose end the process does not wait for."""
    future: Future[T] = Future()
    threading.Thread(target=fulfil, args=(future, call), name=name, daemon=True).start()
    return future
