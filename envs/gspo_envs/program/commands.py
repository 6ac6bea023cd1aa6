"""Programs that are commands, in the sandbox or outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.errors import ConfigError, raised_as
from gspo_env.redaction import clean
from gspo_env.sandbox import PORT, Sandbox, StartedCommand, started
from gspo_envs.data.rows import as_json
from gspo_envs.program.runs import Inbox, ProgramEnd

if TYPE_CHECKING:
    from gspo_env.sandbox.containers import Containers
    from gspo_env.serving import Session

LIMITS = Sandbox(cpu_seconds=3600, memory_mib=2048, processes=64)
"""The limits of `sandbox=True`."""
_SANDBOX_FIELDS = [
    f.name for f in fields(Sandbox) if f.name not in ("seconds", "output_kib", "allow_unsafe")
]
"""The others do not apply: a program has `timeout` and `silence`, and its output may be long."""
_MAX_ARGUMENT = 100_000
"""Bytes of an argument of a command; Linux allows 131,072."""
_MAX_INPUT = 1 << 26
"""Bytes of the task that a command reads."""


def start_command(
    command: Sequence[str],
    box: Sandbox | Containers | None,
    task: Mapping[str, Any],
    *,
    session: Session,
    inbox: Inbox,
    variables: Mapping[str, str],
) -> Callable[[], None]:
    """Starts a command that plays one episode.

    In the sandbox it reaches the address of its session and nothing else. Outside it has a process
    group of its own.

    Args:
        command: The program and its arguments.
        box: The sandbox; None runs the command outside.
        task: Fills the arguments, and is the command's standard input.
        session: Has the address of the model.
        inbox: Gets the end of the command.
        variables: Additional environment variables.

    Returns:
        Ends all of its processes.

    Raises:
        ConfigError: The task has what JSON does not.
    """
    start: Any
    if box is None:
        start = partial(started, variables=_host_environment(session, variables))
    else:
        inner = session.environment(f"http://127.0.0.1:{PORT}")
        start = partial(box.start, variables={**variables, **inner})
    start = partial(start, fill(command, task), stdin=clean(_as_json(task)))
    run = _CommandRun(session, inbox)
    threading.Thread(target=run.work, args=(start,), name="program", daemon=True).start()
    return run.end


class _CommandRun:
    """A command and its end."""

    def __init__(self, session: Session, inbox: Inbox) -> None:
        self._session, self._inbox = session, inbox
        self._lock, self._over = threading.Lock(), False
        self._command: StartedCommand | None = None

    def end(self) -> None:
        """Ends all of its processes."""
        with self._lock:
            self._over = True
            if self._command is not None:
                self._command.end()

    def work(self, start: Any) -> None:
        """Runs the command."""
        try:
            with start() as command:
                with self._lock:
                    self._command = command
                    if self._over:
                        command.end()
                if command.listener is not None:
                    self._session.listen(command.listener.dup())
                end = command.wait()
                assert end is not None
                with self._lock:
                    self._command = None
                self._inbox.end(
                    ProgramEnd(code=end.code, result=read_output(end.stdout), stderr=end.stderr)
                )
        except Exception as error:  # the environment would wait for the end
            self._inbox.end(ProgramEnd(error=error))


def read_sandbox(value: Any, command: Sequence[str]) -> tuple[Sandbox | Containers, list[str]]:
    """Returns the limits of a command, and the command with the paths that it has inside.

    The command's executable, and the files that its arguments name, are readable inside. What the
    task puts into an argument is not a path.

    Args:
        value: True, or fields of `Sandbox` that differ from `LIMITS`; or `podman:IMAGE` or
            `docker:IMAGE`, or fields of `Containers`, and the image has the command.
        command: The command.

    Raises:
        ConfigError: A field is unknown or invalid, or the executable does not exist.
        SandboxUnavailableError: This machine cannot isolate commands.
    """
    if (isinstance(value, str) and ":" in value) or (
        isinstance(value, Mapping) and "image" in value
    ):
        from gspo_env.sandbox.containers import read_containers

        containers = read_containers(value, "Program: sandbox", memory_mib=2048)
        containers.check()
        return containers, list(command)
    limits = {} if value is True else value
    if not isinstance(limits, Mapping) or not set(limits) <= set(_SANDBOX_FIELDS):
        raise ConfigError(
            f"Program: sandbox is {value!r}, expected true, false or limits: "
            f"{', '.join(_SANDBOX_FIELDS)}; or podman:IMAGE or docker:IMAGE."
        )
    if (path := shutil.which(command[0])) is None:
        raise ConfigError(
            f"Program: command is {list(command)!r}, and {command[0]!r} is not found."
        )
    executable = str(Path(path).parent.resolve() / Path(path).name)
    inside, readable = [executable], [executable]
    if (venv := Path(executable).parents[1]).joinpath("pyvenv.cfg").is_file():
        readable.append(str(venv))
    for part in command[1:]:
        is_file = "\0" not in part and os.path.isfile(part)
        inside.append(os.path.realpath(part) if is_file else part)
        readable += [inside[-1]] if is_file else []
    more = limits.get("readable", ())
    readable += [os.path.realpath(clean(p)) for p in ([more] if isinstance(more, str) else more)]
    box = replace(LIMITS, **{**limits, "readable": tuple(readable)})
    box.check_commands()
    return box, inside


def read_output(stdout: str) -> Any:
    """Returns the result of a command: the last line of its output, as JSON or else as text."""
    lines = [line for line in stdout.splitlines() if line.strip()]
    line = lines[-1].strip() if lines else "null"
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
        content = task.get(match[1], match[0])
        return content if isinstance(content, str) else _as_json(content)

    filled = [clean(re.sub(r"\{(\w+)\}", value, part)) for part in command]
    for part in filled:
        if len(part.encode()) > _MAX_ARGUMENT or "\0" in part:
            raise ConfigError(
                f"Program: an argument of the command has {len(part.encode()):,} bytes; expected "
                f"at most {_MAX_ARGUMENT:,} without null characters: the program can read the "
                "task from its standard input"
            )
    return filled


def _as_json(value: Any) -> str:
    what = "Program: a task cannot be written as JSON for the command"
    with raised_as(ConfigError, what, TypeError, ValueError, RecursionError):
        text = as_json(value)
    if len(text) > _MAX_INPUT:
        raise ConfigError(
            f"Program: a task has {len(text):,} characters of JSON, expected at most "
            f"{_MAX_INPUT:,}."
        )
    return text


def _host_environment(session: Session, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns our environment variables with the address of the episode."""
    environment = {**os.environ, **variables, **session.environment()}
    environment.pop("ANTHROPIC_AUTH_TOKEN", None)  # the SDK would send it in place of the key
    hosts = [environment.get("NO_PROXY") or environment.get("no_proxy"), "127.0.0.1,localhost"]
    environment["NO_PROXY"] = environment["no_proxy"] = ",".join(filter(None, hosts))
    return environment
