"""Runs environment code so that nothing that it does ends or holds up the caller.

An environment that may block has one daemon thread for its life: what `reset` opened in that thread
(such as an SQLite connection) is used and closed in it, and a call that never returns keeps neither
the caller nor the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import reprlib
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from gspo_env.errors import EnvironmentHangError, ForeignError
from gspo_env.runtime import loops
from gspo_env.runtime.loops import fulfil

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MOST_TEXT = 2000
"""Maximum characters of an exception's message that are kept."""
_MOST_TRACE = 20_000
"""Maximum characters of a traceback that are kept, from its end."""
_MOST_CAUSES = 1000
_LOOK_SECONDS = 0.2
"""Seconds between two looks at a call that has not returned."""
_LONG = 10.0
"""Seconds after which a call that has not returned is mentioned once."""
_calls: dict[int, _Call] = {}
"""The innermost call of environment code in each thread, by its ident."""
_running: dict[int, Future[Any]] = {}
"""The job that each `EnvThread` is in, by its ident."""
_abandoned: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
"""The jobs that nothing waits for any more."""
_causes: set[tuple[str, str, str]] = set()
"""What raised, with the exception and the line; see `log_once`."""
_quiet = ContextVar("_quiet", default=False)
"""Whether a scripted player slips; see `wrong_actions`."""


@dataclass(slots=True)
class _Call:
    """A call of environment code that has not returned."""

    function: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    since: float
    is_limited: bool = True

    def __str__(self) -> str:
        arguments = [reprlib.repr(value) for value in self.args]
        arguments += [f"{name}={reprlib.repr(value)}" for name, value in self.kwargs.items()]
        name = getattr(self.function, "__name__", self.function)
        return f"{name if isinstance(name, str) else 'a call'}({', '.join(arguments)})"


class _Abandoned(BaseException):
    """Ends code that nothing waits for any more."""


def _enter(call: _Call | None) -> _Call | None:
    """Sets the call that the thread is in, or that it is in none; returns the previous one."""
    thread = threading.get_ident()
    previous = _calls.get(thread)
    if call is None:
        del _calls[thread]
    elif previous is None and _running.get(thread) in _abandoned:
        raise _Abandoned
    else:
        _calls[thread] = call
    return previous


@contextlib.contextmanager
def constructing() -> Iterator[None]:
    """Marks that the thread is in the constructor of an environment."""
    previous = _enter(_Call("__init__", (), {}, time.monotonic()))
    try:
        yield
    finally:
        _enter(previous)


@contextlib.contextmanager
def without_limit() -> Iterator[None]:
    """Lets the environment code that the thread is in take its time, such as to build an image."""
    call = _calls.get(threading.get_ident()) or _Call("", (), {}, 0.0)
    call.is_limited = False
    try:
        yield
    finally:
        call.is_limited, call.since = True, time.monotonic()


def call_env(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls environment code.

    Raises:
        Exception: What it raised. An exception that would end the caller, such as `SystemExit`, is
            a `ForeignError`, but for the person's own `KeyboardInterrupt`.
    """
    previous = _enter(_Call(function, args, kwargs, time.monotonic()))
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # a future does not accept it
        raise foreign(error) from error
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, _Abandoned) or (isinstance(error, KeyboardInterrupt) and _is_main()):
            raise
        raise foreign(error) from error
    finally:
        _enter(previous)


def foreign(error: BaseException) -> ForeignError:
    """Returns an exception as text, with the line of the environment's code that raised it."""
    if isinstance(error, ForeignError):
        return error
    try:
        text = str(error)[:_MOST_TEXT]
    except Exception:  # a `__str__` that raises is one more fault of the environment
        text = "(its message cannot be read)"
    from gspo_env.runtime.where import line_of

    trace = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
    return ForeignError(type(error).__name__, text, line_of(error), trace)


@contextlib.contextmanager
def wrong_actions() -> Iterator[None]:
    """Logs nothing in this thread that raises at the wrong actions of a scripted player."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def log_once(what: str, error: BaseException, then: str = "", *, trace: bool = False) -> None:
    """Logs an exception of an environment with its line, but only the first of each line.

    Args:
        what: What raised it.
        error: The exception.
        then: The consequence, in front of "further ones are not shown".
        trace: Whether to log the traceback too.
    """
    if _quiet.get():
        return
    raised = foreign(error)
    cause = what, raised.name, raised.where
    if cause in _causes or len(_causes) >= _MOST_CAUSES:
        return
    _causes.add(cause)
    logger.warning(
        "%s raised %s: %s (%s); %sfurther ones are not shown",
        *(what, raised.name, raised.text, raised.where, then),
        exc_info=error if trace else None,
    )


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Watch:
    """Looks at the calls of environment code in a thread; mentions the first that takes long."""

    def __init__(self, name: str, thread: int, seconds: float | None = None) -> None:
        self._name, self._thread, self._seconds = name, thread, seconds
        self._logged = False

    def look(self) -> None:
        """Looks once.

        Raises:
            EnvironmentHangError: A call has taken longer than the limit.
        """
        if (call := _calls.get(self._thread)) is None:
            return
        lasted = time.monotonic() - call.since
        if self._seconds is not None and lasted > self._seconds and call.is_limited:
            raise EnvironmentHangError(
                f"{self._name}: {call} has not returned within {self._seconds:g} s{self._where()}; "
                "with rollout.isolation = 'process', a hang costs only its episode"
            )
        if lasted > _LONG and not self._logged:
            self._logged = True
            logger.warning(
                "%s: %s has not returned for %.0f s%s", self._name, call, lasted, self._where()
            )

    def _where(self) -> str:
        """Returns the line of the environment that runs in the thread, in brackets."""
        from gspo_env.runtime.where import held_line

        line = held_line(self._thread, __file__)  # what calls environments is not their code
        return f" ({line})" if line else ""


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Mentions a call of an environment in the caller's thread that takes long.

    Args:
        name: Names the environment.
    """
    done, watch = threading.Event(), _Watch(name, threading.get_ident())

    def work() -> None:
        while not done.wait(_LOOK_SECONDS):
            watch.look()

    threading.Thread(target=work, name="watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()


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
        """Queues a call; see `call_env`."""
        future: Future[Any] = Future()
        self._put((future, lambda: call_env(function, *args, **kwargs)))
        return future

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a call and waits for it on the event loop."""
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def guard(
        self,
        name: str,
        seconds: float | None,
        function: Callable[..., T],
        *args: Any,
        **kwargs: Any,
    ) -> T:
        """Runs a function that calls an environment, and waits; bounds each call of `call_env`.

        A call that takes long is mentioned once, with the line where it is.

        Args:
            name: Names the environment in messages.
            seconds: Time that one call of the environment may take.
            function: The function.
            args: Its arguments.
            kwargs: Its named arguments.

        Raises:
            EnvironmentHangError: A call took longer. The thread is left behind: once the call
                returns, the next one ends the function.
        """
        future: Future[T] = Future()
        self._put((future, lambda: function(*args, **kwargs)))
        watch = _Watch(name, self._thread.ident or 0, seconds)
        try:
            while not wait([future], timeout=_LOOK_SECONDS).done:
                watch.look()
        except BaseException:
            _abandoned.add(future)
            raise
        return future.result()

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
                _running[threading.get_ident()] = future
                fulfil(future, call)
                del _running[threading.get_ident()]
                del job, future, call  # an idle thread keeps no result
        finally:
            loops.close_thread_loop()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        self._loop = loops.thread_loop()
        while self._loop is not None and self._jobs.empty():
            loops.idle(self._arrival)
        return self._jobs.get()

    async def _arrival(self) -> None:
        while self._jobs.empty():  # a job that was put before `_loop` was set has set no event
            await self._arrived.wait()
            self._arrived.clear()


def in_thread(owner: object) -> EnvThread:
    """Returns a thread that ends when its owner is collected."""
    thread = EnvThread()
    weakref.finalize(owner, thread.stop)
    return thread
