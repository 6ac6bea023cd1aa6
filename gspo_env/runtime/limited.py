"""Child processes that run what anyone may have written, within limits of time and memory.

A child is this file as a program, with the standard library only: `python -I -S`. It loads the file
that has `answer(*parts: bytes) -> bytes`, answers one request at a time, and ends with its parent.
The CPU limit kills it, because an operation in C calls no handler of a signal.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

_WALL_SECONDS = 300.0
"""Wall-clock time of one request, including the start of the child, which a busy machine delays."""
_KILL_SECONDS = 20.0
"""Time that the system has to end a child that was killed."""
_LIBRARIES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""The only environment variables of a child."""
_WORK = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
"""Exit codes of a child that a request has ended."""


class LimitedPool:
    """Children that load the same file; each request takes an idle one or starts another.

    Args:
        program: The file.
        memory: Bytes by which the address space of a child may grow after its imports, on Linux.
        longest: Bytes of an answer.
        path: Folders of the packages that the file imports.
    """

    def __init__(
        self, program: str, *, memory: int, longest: int, path: Sequence[str] = ()
    ) -> None:
        self._command = [
            *(sys.executable, "-I", "-S", __file__, str(memory), os.pathsep.join(path))
        ]
        self._command.append(program)
        self._longest = longest
        self._idle: list[_Child] = []
        _pools.add(self)

    def ask(self, seconds: float, *parts: bytes) -> bytes | None:
        """Returns the answer; None if the request used up its CPU time, or crashed its child.

        Raises:
            OSError: No process can be started, or two were ended by something else.
        """
        child = self._take() or _Child(self._command)
        try:
            answer = child.ask(seconds, parts, self._longest)
        except ChildProcessError:  # something else ended it, perhaps while it was idle
            child = _Child(self._command)
            answer = child.ask(seconds, parts, self._longest)
        if answer is not None:
            self._idle.append(child)
        return answer

    def start(self) -> None:
        """Starts an idle child, so that the first request need not wait for it."""
        self._idle.append(_Child(self._command))

    def end_idle(self) -> None:
        """Ends the children that answer no request."""
        while child := self._take():
            child.end()

    def forget(self) -> None:
        """Leaves the children to the process that this one was forked from."""
        while child := self._take():
            child.connection.close()

    def _take(self) -> _Child | None:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None


_pools: weakref.WeakSet[LimitedPool] = weakref.WeakSet()


def _forget() -> None:
    for pool in _pools:
        pool.forget()


os.register_at_fork(after_in_child=_forget)


class _Child:
    """A process that answers one request at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _LIBRARIES if name in os.environ},
            )

    def ask(self, seconds: float, parts: Sequence[bytes], longest: int) -> bytes | None:
        """See `LimitedPool.ask`; a `ChildProcessError` says that something else ended it."""
        with contextlib.suppress(EOFError, OSError):  # the exit code tells more
            self.connection.send_bytes(b"%r %d" % (seconds, len(parts)))
            for part in parts:
                self.connection.send_bytes(part)
            if not self.connection.poll(_WALL_SECONDS):
                self.end()
                return None
            return self.connection.recv_bytes(longest)
        if (code := self.end()) in _WORK:
            return None
        raise ChildProcessError(f"a child process ended with {code}")

    def end(self) -> int:
        """Ends the process and returns its exit code."""
        self.connection.close()
        try:
            return int(self._process.wait(0.2))  # it exits when the socket is closed
        except subprocess.TimeoutExpired:
            self._process.kill()
            return int(self._process.wait(_KILL_SECONDS))


def main() -> NoReturn:
    """Answers requests until the parent closes its end of the socket or dies."""
    memory, path, program, parent = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    connection, sources = Connection(0), list[Any]()
    with contextlib.suppress(AttributeError, OSError):  # before Linux 5.3 the socket's end must do
        sources.append(os.pidfd_open(parent))  # type: ignore[attr-defined,unused-ignore]
    sys.path += filter(None, path.split(os.pathsep))
    names: dict[str, Any] = {"__name__": "child"}
    with open(program) as file:
        exec(compile(file.read(), program, "exec"), names)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    while os.getppid() == parent and wait([connection, *sources]) == [connection]:
        try:
            seconds, count = connection.recv_bytes().split()
            parts = [connection.recv_bytes() for _ in range(int(count))]
        except (EOFError, OSError):
            break
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        answer = names["answer"](*parts)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.send_bytes(answer)
    os._exit(0)


if __name__ == "__main__":
    main()
