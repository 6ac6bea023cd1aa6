"""Processes and temporary folders that end with this process, even if it is killed.

Between this process and a command runs a guard: this file as a program, with the standard library
only. It ends the command with all of its descendants when this process has ended or asks for it,
and when the command has ended. A guard without a command holds a temporary folder and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATIENCE = 60.0
"""Seconds until a guard that does not end is left alone."""
_LOOK_SECONDS = 5.0
"""Time between two looks at the shared memory of descendants."""
_LONGEST = 40
"""Characters of the folder of temporary folders; the path of a Unix socket has at most 104."""


def spawn(
    command: Sequence[str],
    *,
    log: int | IO[bytes],
    env: Mapping[str, str] | None = None,
    grace: float = 10.0,
) -> Guard:
    """Starts a command in a session of its own, which ends with this process.

    Args:
        command: The program and its arguments.
        log: Receives standard output and standard error.
        env: The environment variables; this process's by default.
        grace: Seconds between the request to end and the kill.
    """
    return Guard(["run", str(grace), *command], stdout=log, stderr=log, env=env)


def die_with_parent(parent: int) -> None:
    """Makes the calling process end with its parent, however that ends.

    On Linux it ends with the thread that started it.

    Args:
        parent: Process id of the parent, which may have ended already.
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def adopt_descendants() -> None:
    """Makes descendants whose parents have ended children of the calling process, on Linux."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(group: int, grace: float) -> bool:
    """Ends a process group and all descendants of the calling process; takes their exit codes.

    Args:
        group: The process group.
        grace: Seconds between SIGTERM and SIGKILL, and seconds to wait after SIGKILL.

    Returns:
        Whether all have ended.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        sent = False
        while not sent or time.monotonic() < deadline:
            if not _has_children() and not _exists(group):
                return True
            if not sent or number == signal.SIGKILL:
                _signal(group, number)
            sent = True
            time.sleep(0.02)
    return False


class Guard:
    """A guard process; see the module."""

    def __init__(
        self,
        task: Sequence[str],
        *,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it; `spawn` and `PrivateFolder` are its uses."""
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *task],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=True,
        )

    def ask_to_end(self) -> None:
        """Lets the guard end what it guards, without waiting; does nothing when called again."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was asked before
            self.process.stdin.write(b"\n")  # a forked process may hold the pipe open
            self.process.stdin.close()

    def end(self) -> int | None:
        """Waits for the end; returns the exit code of a command that had ended, else 0.

        None means that the guard has not ended.
        """
        self.ask_to_end()
        try:
            return self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return None


class PrivateFolder:
    """A temporary folder that only this user can enter; it is removed when this process ends.

    Args:
        prefix: The beginning of its name.

    Raises:
        OutputError: It cannot be made.
    """

    def __init__(self, prefix: str) -> None:
        self._guard = Guard(["hold", prefix], stdout=subprocess.PIPE)
        assert self._guard.process.stdout is not None
        with self._guard.process.stdout as answer:
            name = os.fsdecode(answer.readline().removesuffix(b"\n"))
        if not name:
            from gspo_env.errors import OutputError

            self._guard.end()
            raise OutputError(f"no temporary folder can be made in {tempfile.gettempdir()!r}")
        self.path = Path(name)

    def close(self) -> None:
        """Removes the folder."""
        self._guard.end()


def main() -> NoReturn:
    """Runs a guard: `PARENT hold PREFIX`, or `PARENT run GRACE COMMAND...`."""
    parent, task, rest = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the parent decides; a command gets the default
    if task == "hold":
        _hold(parent, rest[0])
    _run(parent, float(rest[0]), rest[1:])


def _hold(parent: int, prefix: str) -> NoReturn:
    place = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix=prefix, dir=place if len(place) <= _LONGEST else "/tmp")
    os.write(1, os.fsencode(folder) + b"\n")
    os.close(1)
    while not _is_over(parent):
        pass
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:  # others may still write there until they end
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            os._exit(0)
        time.sleep(0.1)
    os._exit(1)


def _run(parent: int, grace: float, command: Sequence[str]) -> NoReturn:
    own = os.getpid()
    adopt_descendants()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=(lambda: die_with_parent(own)) if sys.platform == "linux" else None,
    )
    shared: set[str] = set()
    looked = 0.0
    while process.poll() is None and not _is_over(parent):
        if time.monotonic() - looked > _LOOK_SECONDS:
            shared |= _shared_memory()
            looked = time.monotonic()
    code = process.returncode or 0
    shared |= _shared_memory()
    if not end_descendants(process.pid, grace):
        os._exit(1)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(code if code >= 0 else 128 - code)


def _is_over(parent: int) -> bool:
    """Waits a moment; returns whether the parent has ended or asks to end."""
    return bool(select.select([0], [], [], 0.1)[0]) or os.getppid() != parent


def _has_children() -> bool:
    """Takes the exit codes of children that have ended; returns whether others run."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _exists(group: int) -> bool:
    """Returns whether a process group exists."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _signal(group: int, number: int) -> None:
    """Sends a signal to a group and to all descendants."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants() -> list[int]:
    """Returns the process ids of all descendants, as far as the system tells."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found: list[int] = []
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found += level
    return found


def _shared_memory() -> set[str]:
    """Returns the paths of the shared memory that descendants use, which outlives their end."""
    found: set[str] = set()
    for pid in _descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            lines = (line.rstrip().rpartition(b" ")[2] for line in file if b" /dev/shm/" in line)
            found |= {os.fsdecode(path) for path in lines}
    return found


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
