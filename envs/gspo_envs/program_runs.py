"""Running programs: functions in threads, commands in process groups, and what they ask for."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import gspo_env.children
from gspo_env.env.base import clean
from gspo_env.env.threads import attempt
from gspo_env.errors import ConfigError, ForeignError
from gspo_envs.program_rewards import TurnRewards
from gspo_envs.rows import as_json

if TYPE_CHECKING:
    from gspo_env.serving import Reply, Request, Session

logger = logging.getLogger(__name__)

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for the processes of a program."""
_LONGEST_ARGUMENT = 100_000
"""Bytes of an argument of a command; Linux allows 131,072."""
_MOST_INPUT = 1 << 26
"""Bytes of the task that a command reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request of the program and the future of its answer."""

    request: Request
    reply: Future[Reply]

    def answer(self, reply: Reply) -> None:
        """Answers the request, unless the program has hung up."""
        with contextlib.suppress(InvalidStateError):
            self.reply.set_result(reply)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a program ended."""

    result: Any = None
    """What a function returned, or the last line of a command's output: the value of its JSON, else
    its text."""
    error: Exception | None = None
    """What a function raised."""
    code: int | None = 0
    """The exit code; negative for a signal."""
    stderr: str = ""
    """The end of a command's standard error."""


class Started:
    """A program that plays one episode, with its session of the address."""

    def __init__(self, start: Callable[..., Run], owner: object) -> None:
        """Opens the session and starts the program.

        Args:
            start: Starts the program, given the session and the inbox.
            owner: The program is ended when it is garbage-collected.
        """
        from gspo_env.serving import address

        self.inbox, self.rewards = Inbox(), TurnRewards()
        self.session = address().open(self.inbox.ask, self.rewards.post)
        try:
            self.run = start(session=self.session, inbox=self.inbox)
        except BaseException:
            self.session.close()
            raise
        self._forgotten = weakref.finalize(
            owner, _end_all, self.inbox.close, self.session.close, self.run.end
        )

    def end(self) -> None:
        """Ends its requests and its processes, without waiting; may be called again."""
        self._forgotten()


def _end_all(*ends: Callable[[], None]) -> None:
    for end in ends:
        end()


class Inbox:
    """What a program sends, in the order of its arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[Asked] = deque()
        self._ended: Ended | None = None
        self._closed = False

    def ask(self, request: Request) -> Future[Reply]:
        """Takes a request; returns the future of its answer, which may be cancelled."""
        reply: Future[Reply] = Future()
        with self._changed:
            if self._closed:
                reply.cancel()
            else:
                self._asked.append(Asked(request=request, reply=reply))
                self._changed.notify()
        return reply

    def end(self, ended: Ended) -> None:
        """Takes the end of the program."""
        with self._changed:
            self._ended = ended
            self._changed.notify()

    def next(self, seconds: float) -> Asked | Ended | None:
        """Waits for the end of the program or its next request; None if neither comes in time.

        Requests that the program has given up, and those that others left behind at its end, are
        dropped.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                if self._ended is not None:
                    return self._ended
                while self._asked:
                    asked = self._asked.popleft()
                    if not asked.reply.cancelled():
                        return asked
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and (
                    time.monotonic() >= deadline
                ):
                    return None

    def close(self) -> None:
        """Cancels the requests that wait; later ones are cancelled at once."""
        with self._changed:
            self._closed = True
            waiting, self._asked = self._asked, deque()
        for asked in waiting:
            asked.reply.cancel()


class Run(Protocol):
    """A program that was started for one episode."""

    def end(self) -> None:
        """Asks it to end, without waiting."""

    def join(self, seconds: float) -> bool:
        """Waits for its end; returns whether it has ended."""


class FunctionRun:
    """A function in a daemon thread; an asynchronous one has an event loop of its own there.

    A thread cannot be ended: a function that neither returns nor makes a request stays.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        task: Mapping[str, Any],
        *,
        session: Session,
        inbox: Inbox,
    ) -> None:
        """Starts it."""
        self._call = lambda: function(
            copy.deepcopy(dict(task)), base_url=session.url, api_key=session.key
        )
        self._inbox = inbox
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._over = False
        self._thread = threading.Thread(target=self._work, name="program", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Cancels an asynchronous function."""
        with self._lock:
            self._over = True
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    def join(self, seconds: float) -> bool:
        """See `Run`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            ended = Ended(result=attempt(self._result))
        except Exception as error:
            ended = _ended_by(error)
        self._inbox.end(ended)

    def _result(self) -> Any:
        result = self._call()
        if not inspect.isawaitable(result):
            return result
        with asyncio.Runner() as runner:
            return runner.run(self._waited(result))

    async def _waited(self, result: Any) -> Any:
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if self._over and self._task is not None:
                self._task.cancel()
        try:
            return await result
        finally:
            with self._lock:
                self._loop = None


def _ended_by(error: Exception) -> Ended:
    """Returns the end by an exception; `SystemExit` is an exit code, as in a command."""
    cause = error.__cause__ if isinstance(error, ForeignError) else None
    if isinstance(cause, SystemExit):
        code = cause.code
        text = code if isinstance(code, str) else ""
        return Ended(code=code if isinstance(code, int) else int(code is not None), stderr=text)
    return Ended(error=error)


class CommandRun:
    """A command in a process group of its own, which `program_launcher.py` watches over."""

    def __init__(
        self,
        command: Sequence[str],
        task: Mapping[str, Any],
        *,
        session: Session,
        inbox: Inbox,
        variables: Mapping[str, str],
    ) -> None:
        """Starts it.

        Raises:
            ConfigError: The task has what JSON does not.
        """
        self._inbox = inbox
        text = clean(_as_json(task)).encode()
        launcher = str(Path(__file__).with_name("program_launcher.py"))
        folder = str(Path(gspo_env.children.__file__).parent)
        head = [sys.executable, "-I", "-S", launcher, folder, str(os.getpid()), str(GRACE)]
        self._process = subprocess.Popen(
            [*head, *fill(command, task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(session, variables),
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._work, args=(text,), name="program", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Lets the launcher end the process group."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):  # it has ended
            self._process.stdin.close()

    def join(self, seconds: float) -> bool:
        """See `Run`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self, text: bytes) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(OSError, ValueError):  # the launcher or the episode has ended
            stdin.write(b"%d\n" % len(text) + text)
            stdin.flush()
        with stdout:
            report = stdout.read()
        self._inbox.end(_read_report(report))
        self.end()
        self._process.wait()


def _read_report(report: bytes) -> Ended:
    """Reads what the launcher says of the end of the command."""
    try:
        told = json.loads(report)
        code, stdout, stderr = told["code"], str(told["stdout"]), str(told["stderr"])
    except (ValueError, TypeError, KeyError):
        return Ended(code=None, stderr="its launcher was killed")
    lines = [line for line in stdout.splitlines() if line.strip()]
    return Ended(code=code, result=_value(lines[-1].strip()) if lines else None, stderr=stderr)


def _value(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


def fill(command: Sequence[str], task: Mapping[str, Any]) -> list[str]:
    """Returns a command with `{column}` replaced by the task's value of that column.

    Braces with anything else stay, and a value is never read again.

    Raises:
        ConfigError: An argument is too long, or has a null character.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in task:
            return match[0]
        found = task[match[1]]
        return found if isinstance(found, str) else _as_json(found)

    filled = [clean(re.sub(r"\{(\w+)\}", value, part)) for part in command]
    for part in filled:
        if len(part.encode()) > _LONGEST_ARGUMENT or "\0" in part:
            raise ConfigError(
                f"Program: an argument of the command has {len(part.encode()):,} bytes; expected "
                f"at most {_LONGEST_ARGUMENT:,} without null characters: the program can read the "
                "task from its standard input"
            )
    return filled


def _as_json(value: Any) -> str:
    try:
        text = as_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"Program: a task cannot be written as JSON for the command: {error}"
        ) from error
    if len(text) > _MOST_INPUT:
        raise ConfigError(
            f"Program: a task has {len(text):,} characters of JSON, expected at most "
            f"{_MOST_INPUT:,}."
        )
    return text


def _environment(session: Session, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns our environment variables with the address of the episode."""
    found = {**os.environ, **variables, **session.environment, "OPENAI_API_BASE": session.url}
    found.pop("ANTHROPIC_AUTH_TOKEN", None)  # the SDK would send it in place of the key
    hosts = [found.get("NO_PROXY") or found.get("no_proxy") or "", "127.0.0.1,localhost"]
    found["NO_PROXY"] = found["no_proxy"] = ",".join(filter(None, hosts))
    return found
