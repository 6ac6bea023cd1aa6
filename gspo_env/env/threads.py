"""Runs environment code so that nothing that it does ends or holds up the caller.

An environment that may block has one daemon thread for its life: what `reset` opened in that thread
(such as an SQLite connection) is used and closed in it, and a call that never returns keeps neither
the caller nor the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sysconfig
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from gspo_env.env import background
from gspo_env.errors import ForeignError

_MOST_TEXT = 2000
"""Maximum characters of an exception's message that are kept."""
_MOST_TRACE = 20_000
"""Maximum characters of a traceback that are kept, from its end."""
_LIBRARIES = tuple(
    path + os.sep
    for path in (
        str(Path(__file__).parents[1]),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    )
)


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls environment code.

    Raises:
        Exception: What it raised. An exception that would end the caller, such as `SystemExit`, is
            a `ForeignError`, but for the person's own `KeyboardInterrupt`.
    """
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # a future does not accept it
        raise foreign(error) from error
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _is_main():
            raise
        raise foreign(error) from error


def foreign(error: BaseException) -> ForeignError:
    """Returns an exception as text, with the line of the environment's own code that raised."""
    if isinstance(error, ForeignError):
        return error
    try:
        text = str(error)[:_MOST_TEXT]
    except Exception:  # a `__str__` that raises is one more fault of the environment
        text = "(its message cannot be read)"
    trace = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
    return ForeignError(type(error).__name__, text, _place(error), trace)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    if not own:
        return "unknown place"
    path = Path(own[-1].filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{own[-1].lineno} in {own[-1].name}"


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class EnvThread:
    """A daemon thread that runs calls one after another.

    Between two calls it runs the event loop of its asynchronous environment, so that a task of the
    environment, such as one that keeps a connection open, goes on while the policy thinks.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that runs between two calls, once there is one."""
        self._arrived = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="env", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Queues a call; see `attempt`."""
        future: Future[Any] = Future()
        self._put((future, lambda: attempt(function, *args, **kwargs)))
        return future

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a call and waits for it on the event loop."""
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def stop(self) -> None:
        """Ends the thread after the calls that are queued."""
        self._put(None)

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _put(self, job: tuple[Future[Any], Callable[[], Any]] | None) -> None:
        self._jobs.put(job)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                self._loop.call_soon_threadsafe(self._arrived.set)

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                future, call = job
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    result = call()
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                del job, future, call  # an idle thread keeps no result
        finally:
            background.close_own_loop()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        self._loop = background.own_loop()
        while self._loop is not None and self._jobs.empty():
            background.idle(self._arrival)
        return self._jobs.get()

    async def _arrival(self) -> None:
        while self._jobs.empty():  # a job that was put before `_loop` was set has set no event
            await self._arrived.wait()
            self._arrived.clear()
