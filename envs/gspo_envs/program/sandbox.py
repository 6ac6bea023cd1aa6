"""Programs that are commands in the sandbox."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.env.base import clean
from gspo_env.errors import ConfigError, GspoEnvError
from gspo_env.sandbox import PORT, JailedCommand, Sandbox
from gspo_envs.program.commands import fill, read_output, write_task
from gspo_envs.program.runs import Ended, Inbox, Run

if TYPE_CHECKING:
    from gspo_env.serving import Session

LIMITS = Sandbox(cpu_seconds=3600, memory_mib=2048, processes=64)
"""The limits of `sandbox=True`."""
_WITHOUT = ("seconds", "output_kib", "allow_unsafe")
"""Limits that a program does not have: it has `timeout` and `silence`, and output may be long."""


class SandboxRun(Run):
    """A command in the sandbox, which reaches the address of its session and nothing else."""

    def __init__(
        self,
        box: Sandbox,
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
        self._inbox, self._session = inbox, session
        root = f"http://127.0.0.1:{PORT}"
        work = {
            "command": fill(command, task),
            "stdin": write_task(task),
            "variables": {**variables, **session.environment(root)},
        }
        self._lock = threading.Lock()
        self._over = False
        self._started: JailedCommand | None = None
        threading.Thread(target=self._work, args=(box, work), name="program", daemon=True).start()

    def end(self) -> None:
        """Kills all of its processes."""
        with self._lock:
            self._over = True
            if self._started is not None:
                self._started.end()

    def _work(self, box: Sandbox, work: dict[str, Any]) -> None:
        try:
            with box.start(**work) as started:
                with self._lock:
                    self._started = started
                    if self._over:
                        started.end()
                self._session.listen(started.listener.dup())
                end = started.wait()
                with self._lock:
                    self._started = None
            assert end is not None
            ended = Ended(code=end.code, result=read_output(end.stdout), stderr=end.stderr)
        except (GspoEnvError, OSError, TimeoutError) as error:
            ended = Ended(error=error)
        self._inbox.end(ended)


def read_sandbox(value: Any, command: Sequence[str]) -> tuple[Sandbox, list[str]]:
    """Returns the limits of a command, and the command with the paths that it has inside.

    The command's executable, and the files that its arguments name, are readable inside. What the
    task puts into an argument is no path.

    Args:
        value: True, or fields of `Sandbox` that differ from `LIMITS`.
        command: The command.

    Raises:
        ConfigError: A field is unknown or invalid, or the executable does not exist.
        SandboxUnavailableError: This machine cannot isolate commands.
    """
    given = {} if value is True else value
    known = [f.name for f in fields(Sandbox) if f.name not in _WITHOUT]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise ConfigError(
            f"Program: sandbox is {value!r}, expected true, false or limits: {', '.join(known)}."
        )
    found = shutil.which(command[0])
    if found is None:
        raise ConfigError(
            f"Program: command is {list(command)!r}, and {command[0]!r} is not found."
        )
    executable = str(Path(found).parent.resolve() / Path(found).name)
    inside, readable = [executable], [executable]
    if (venv := Path(executable).parents[1]).joinpath("pyvenv.cfg").is_file():
        readable.append(str(venv))
    for part in command[1:]:
        is_file = "\0" not in part and os.path.isfile(part)
        inside.append(os.path.realpath(part) if is_file else part)
        readable += [inside[-1]] if is_file else []
    more = given.get("readable", ())
    folders = [
        os.path.realpath(clean(path)) for path in ([more] if isinstance(more, str) else more)
    ]
    box = replace(LIMITS, **{**given, "readable": (*readable, *folders)})
    box.check_commands()
    return box, inside
