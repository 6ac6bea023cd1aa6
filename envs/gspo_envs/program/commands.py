"""Programs that are commands, each in a process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gspo_env.runtime.processes
from gspo_env.env.base import clean
from gspo_env.errors import ConfigError
from gspo_envs.data.rows import as_json
from gspo_envs.program.runs import Ended, Inbox, Run

if TYPE_CHECKING:
    from gspo_env.serving import Session

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for the processes of a program."""
_LONGEST_ARGUMENT = 100_000
"""Bytes of an argument of a command; Linux allows 131,072."""
_MOST_INPUT = 1 << 26
"""Bytes of the task that a command reads."""


class CommandRun(Run):
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
        text = write_task(task).encode()
        launcher = str(Path(__file__).with_name("launcher.py"))
        folder = str(Path(gspo_env.runtime.processes.__file__).parent)
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
        threading.Thread(target=self._work, args=(text,), name="program", daemon=True).start()

    def end(self) -> None:
        """Lets the launcher end the process group."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):  # it has ended
            self._process.stdin.close()

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
    return Ended(code=code, result=read_output(stdout), stderr=stderr)


def read_output(stdout: str) -> Any:
    """Returns the result of a command: the last line of its output, as JSON or else as text."""
    lines = [line for line in stdout.splitlines() if line.strip()]
    line = lines[-1].strip() if lines else "null"
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


def write_task(task: Mapping[str, Any]) -> str:
    """Returns what a command reads from its standard input.

    Raises:
        ConfigError: The task has what JSON does not.
    """
    return clean(_as_json(task))


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
    found = {**os.environ, **variables, **session.environment()}
    found.pop("ANTHROPIC_AUTH_TOKEN", None)  # the SDK would send it in place of the key
    hosts = [found.get("NO_PROXY") or found.get("no_proxy") or "", "127.0.0.1,localhost"]
    found["NO_PROXY"] = found["no_proxy"] = ",".join(filter(None, hosts))
    return found
