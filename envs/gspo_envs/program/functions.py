"""Programs that are functions: plain ones in threads, asynchronous ones on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from gspo_env.errors import ForeignError
from gspo_env.runtime.loops import run_in_daemon, wait_for
from gspo_env.runtime.threads import call_env, foreign
from gspo_envs.program.runs import Inbox, ProgramEnd

if TYPE_CHECKING:
    from gspo_env.serving import Session


def start_function(
    function: Callable[..., Any], task: Mapping[str, Any], *, session: Session, inbox: Inbox
) -> Callable[[], None]:
    """Calls a function as `function(task, base_url=..., api_key=...)` without waiting for it.

    A plain function runs in a daemon thread, which cannot be ended: after its episode it stays
    until it makes its next request, which is refused, or returns.

    Returns:
        Ends it where that is possible.
    """

    def call() -> Any:
        return function(copy.deepcopy(dict(task)), base_url=session.url, api_key=session.key)

    called = getattr(function, "__call__", None)  # noqa: B004 - an object with an `async` method
    if any(inspect.iscoroutinefunction(f) for f in (function, called)):
        return _LoopRun(call, inbox).end
    threading.Thread(target=_work, args=(call, inbox), name="program", daemon=True).start()
    return lambda: None


def _work(call: Callable[[], Any], inbox: Inbox) -> None:
    try:
        end = ProgramEnd(result=call_env(lambda: _finish(call())))
    except Exception as error:
        end = _end_by(error)
    inbox.end(end)


def _finish(result: Any) -> Any:
    return asyncio.run(wait_for(result)) if inspect.isawaitable(result) else result


class _LoopRun:
    """An asynchronous function on the event loop that all such programs share.

    They share it because SDKs keep one asynchronous HTTP client a process, which works on one loop
    only. A function that blocks the loop holds up all others.
    """

    def __init__(self, call: Callable[[], Any], inbox: Inbox) -> None:
        self._call, self._inbox = call, inbox
        self.tasks: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
        with _LOCK:
            self._loop = _shared_loop(os.getpid())
        self._over = False
        self._loop.call_soon_threadsafe(self._begin)

    def end(self) -> None:
        """Cancels the tasks that the function has made."""
        self._over = True
        self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        if not self._over:
            _OWNER.set(self)
            asyncio.create_task(self._work())  # noqa: RUF006 - `tasks` and the loop keep it

    def _cancel(self) -> None:
        for task in list(self.tasks):
            task.cancel()

    async def _work(self) -> None:
        try:
            end = ProgramEnd(result=await self._call())
        except BaseException as error:  # such as SystemExit, which would end the loop
            end = _end_by(error)
        self._inbox.end(end)
        self._cancel()


_OWNER: ContextVar[_LoopRun | None] = ContextVar("_OWNER", default=None)
"""The program whose code runs; the tasks that it makes inherit it."""
_LOCK = threading.Lock()


@functools.cache
def _shared_loop(process: int) -> asyncio.AbstractEventLoop:
    """Starts the event loop of a process, in a daemon thread; no exception of a task ends it."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(_make_task)
    loop.set_default_executor(_DaemonThreads())

    def work() -> None:
        asyncio.set_event_loop(loop)
        while True:
            with contextlib.suppress(BaseException):  # a task's SystemExit or KeyboardInterrupt
                loop.run_forever()

    threading.Thread(target=work, name="programs", daemon=True).start()
    return loop


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> Any:
    """Makes a task that belongs to the program that made it."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **kwargs)
    if (owner := _OWNER.get()) is not None:
        owner.tasks.add(task)
    return task


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call in a daemon thread, so that one that hangs does not hold up our exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a thread."""
        return run_in_daemon(functools.partial(fn, *args, **kwargs), "program")


def _end_by(error: BaseException) -> ProgramEnd:
    """Returns the end by an exception; `SystemExit` is an exit code, as of a command."""
    cause = error.__cause__ if isinstance(error, ForeignError) else error
    if isinstance(cause, SystemExit):
        code = cause.code
        text = code if isinstance(code, str) else ""
        return ProgramEnd(
            code=code if isinstance(code, int) else int(code is not None), stderr=text
        )
    return ProgramEnd(error=error if isinstance(error, Exception) else foreign(error))
