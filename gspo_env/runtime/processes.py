"""Processes and temporary folders that end with this process, even if it is killed.

Between this process and a command runs a guard: this file as a program, with the standard library
only. It ends the command with all of its descendants when this process has ended or asks for it,
and when the command has ended. It may report the command's exit code before that. A guard without a
command holds a temporary folder and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PATIENCE = 60.0
"""Seconds until a guard that does not end is left alone."""
_LOOK_SECONDS = 5.0
"""Time between two looks at the shared memory of descendants."""
_POLL_SECONDS = 0.5
"""Time between two looks at whether a process whose streams are read still runs."""
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


def read_streams(
    process: subprocess.Popen[bytes], status: int, seconds: float
) -> Iterator[tuple[int, bytes]]:
    """Yields what a process writes, with the descriptor that it comes from.

    Ends when `status` or the process has ended, after what has been written until then: other
    processes may still hold the streams open.

    Raises:
        TimeoutError: It takes longer.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + seconds
    streams = {process.stdout.fileno(), process.stderr.fileno()}
    with selectors.DefaultSelector() as selector:
        for source in (*streams, status):
            selector.register(source, selectors.EVENT_READ)
        while status in selector.get_map():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ready = selector.select(min(remaining, _POLL_SECONDS))
            if not ready and process.poll() is not None:
                break
            for key, _ in ready:
                if not (data := os.read(key.fd, 1 << 16)):
                    selector.unregister(key.fd)
                    streams.discard(key.fd)
                yield key.fd, data
    for stream in streams:
        os.set_blocking(stream, False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(1 << 10):  # a descendant that escaped must not write for ever
                if not (data := os.read(stream, 1 << 16)):
                    break
                yield stream, data


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


def usable_cores() -> int:
    """Returns the number of cores that this process may use, which a scheduler may have limited."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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


def kill_descendants(seconds: float = 5.0) -> None:
    """Kills all descendants of the calling process, which has adopted them.

    Args:
        seconds: Time to wait for their end.
    """
    deadline = time.monotonic() + seconds
    while _has_children() and time.monotonic() < deadline:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


class Guard:
    """A guard process; see the module."""

    def __init__(
        self,
        task: Sequence[str],
        *,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts it with a task; see `main`."""
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *task],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
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
    """Runs a guard.

    Its arguments: `PARENT hold PREFIX`, `PARENT run GRACE COMMAND...`, or
    `PARENT report GRACE STATUS STDIN COMMAND...` with two descriptors, of which the first gets
    `exit N` as soon as the command has ended; N is negative for a signal.
    """
    parent, task, rest = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the parent decides; a command gets the default
    if task == "hold":
        _hold(parent, rest[0])
    if task == "report":
        _run(parent, float(rest[0]), rest[3:], stdin=int(rest[2]), status=int(rest[1]))
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


def _run(
    parent: int,
    grace: float,
    command: Sequence[str],
    *,
    stdin: int = subprocess.DEVNULL,
    status: int | None = None,
) -> NoReturn:
    guard = os.getpid()
    adopt_descendants()
    try:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            process_group=0,
            preexec_fn=(lambda: die_with_parent(guard)) if sys.platform == "linux" else None,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode("utf-8", "replace"))
        if status is not None:
            os.write(status, b"exit 127")
        os._exit(127)
    events: list[int] = []
    with contextlib.suppress(AttributeError, OSError):  # before Linux 5.3, and elsewhere
        events.append(os.pidfd_open(process.pid))
    shared: set[str] = set()
    looked = 0.0
    while process.poll() is None and not _is_over(parent, events):
        if status is None and time.monotonic() - looked > _LOOK_SECONDS:
            shared |= _shared_memory()
            looked = time.monotonic()
    code = process.returncode or 0
    if status is None:
        shared |= _shared_memory()
    else:
        if process.returncode is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(status, b"exit %d" % process.returncode)
        os.close(status)
    if not end_descendants(process.pid, grace):
        os._exit(1)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(code if code >= 0 else 128 - code)


def _is_over(parent: int, events: Sequence[int] = ()) -> bool:
    """Waits a moment or for an event; returns whether the parent has ended or asks to end."""
    return 0 in select.select([0, *events], [], [], 0.1)[0] or os.getppid() != parent


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
    descendants: list[int] = []
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        descendants += level
    return descendants


def _shared_memory() -> set[str]:
    """Returns the paths of the shared memory that descendants use, which outlives their end."""
    paths: set[str] = set()
    for pid in _descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            lines = (line.rstrip().rpartition(b" ")[2] for line in file if b" /dev/shm/" in line)
            paths |= {os.fsdecode(path) for path in lines}
    return paths


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
