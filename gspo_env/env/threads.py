"""Runs environment code so that nothing that it does ends or holds up the caller.

An environment that may block has one daemon thread for its life: what `reset` opened in that thread
(such as an SQLite connection) is used and closed in it, and a call that never returns keeps neither
the caller nor the process.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sysconfig
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

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
    """A daemon thread that runs calls one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="env", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Queues a call; see `attempt`."""
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: attempt(function, *args, **kwargs)))
        return future

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a call and waits for it on the event loop."""
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def stop(self) -> None:
        """Ends the thread after the calls that are queued."""
        self._jobs.put(None)

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
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
