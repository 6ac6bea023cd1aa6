"""Commands in the sandbox, which may speak TCP with one socket of the caller."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_env.errors import SandboxUnavailableError
from gspo_env.sandbox.launcher import ask, begin, exit_code, launch

if TYPE_CHECKING:
    from gspo_env.sandbox import Sandbox

PORT = 8000
"""Port of the socket inside; nothing else listens there."""
_PROGRAMS = ("/usr/bin", "/bin")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_KEPT = 1 << 16
"""Bytes that are kept of the end of each output stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnd:
    """The end of a command."""

    code: int
    """The exit code; negative for a signal."""
    stdout: str
    """The end of its standard output."""
    stderr: str


class JailedCommand:
    """A command that runs in the sandbox.

    Attributes:
        listener: Listens on 127.0.0.1 in the network of the command. The caller accepts its
            connections, and closes it.
    """

    def __init__(self, process: Any, status: int, listener: socket.socket) -> None:
        """See `Sandbox.start`."""
        self.listener = listener
        self._process, self._status = process, status

    def end(self) -> None:
        """Kills the command and all of its processes, without waiting; from any thread."""
        self._process.terminate()

    def wait(self, seconds: float = float("inf")) -> CommandEnd | None:
        """Waits until the command has ended with all of its processes; None if it takes longer."""
        deadline = time.monotonic() + seconds
        sources = (self._process.stdout, self._process.stderr, self._status)
        kept = {source: bytearray() for source in sources}
        with selectors.DefaultSelector() as selector:
            for source in sources:
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                for key, _ in selector.select(min(left, 3600.0)):
                    if not (data := os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fileobj)
                    kept[key.fileobj] += data
                    del kept[key.fileobj][:-_KEPT]
        stdout, stderr = (kept[source].decode("utf-8", "replace") for source in sources[:2])
        code = exit_code(bytes(kept[self._status]), self._process, True)
        return CommandEnd(code=code, stdout=stdout, stderr=stderr)


@contextlib.contextmanager
def jailed(
    box: Sandbox, command: Sequence[str], stdin: str, variables: Mapping[str, str], port: int
) -> Iterator[JailedCommand]:
    """Starts a command without a test of the machine; see `Sandbox.start`."""
    request = ask(box, stdin)
    request["readable"] += [os.path.realpath(folder) for folder in _PROGRAMS]
    request["command"] = [os.fsencode(part) for part in command]
    home = {"HOME": "/sandbox", "TMPDIR": "/sandbox", "LANG": "C.UTF-8", "PATH": _PATH}
    request["variables"] = home | dict(variables)
    request["port"] = port
    with contextlib.ExitStack() as stack:
        near, far = socket.socketpair()
        stack.enter_context(near)
        with far:
            request["channel"] = far.fileno()
            process, status = launch(stack, True, None, far.fileno())
        begin(box, process, status, request)
        near.settimeout(1.0)  # it was sent before the command began
        descriptors = socket.recv_fds(near, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]
        if len(descriptors) != 1:
            raise SandboxUnavailableError("the set-up gave no socket")
        with socket.socket(fileno=descriptors[0]) as listener:
            yield JailedCommand(process, status, listener)
