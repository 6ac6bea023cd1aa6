"""Commands in the sandbox, which may speak TCP with one socket of the caller."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspo_env.errors import SandboxUnavailableError
from gspo_env.runtime.processes import read_streams
from gspo_env.sandbox.launcher import begin, exit_code, launch, make_request

if TYPE_CHECKING:
    from gspo_env.sandbox import Sandbox

PORT = 8000
"""Port of the socket inside; nothing else listens there."""
_PROGRAMS = ("/usr/bin", "/bin")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_MAX_KEPT = 1 << 16
"""Bytes that are kept of the end of each output stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnd:
    """The end of a command."""

    code: int
    """The exit code; negative for a signal."""
    stdout: str
    """The end of its standard output."""
    stderr: str


def wait_for_end(process: Any, status: int, seconds: float = float("inf")) -> CommandEnd | None:
    """Waits until a command has ended; None if it takes longer.

    Args:
        process: Has the command's output streams.
        status: A pipe that gets `exit N`.
        seconds: Maximum time.
    """
    streams = [process.stdout.fileno(), process.stderr.fileno(), status]
    outputs = {stream: bytearray() for stream in streams}
    try:
        for stream, data in read_streams(process, status, seconds):
            outputs[stream] += data
            del outputs[stream][:-_MAX_KEPT]
    except TimeoutError:
        return None
    stdout, stderr = (outputs[stream].decode("utf-8", "replace") for stream in streams[:2])
    return CommandEnd(code=exit_code(bytes(outputs[status])), stdout=stdout, stderr=stderr)


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
        return wait_for_end(self._process, self._status, seconds)


@contextlib.contextmanager
def jailed(
    box: Sandbox, command: Sequence[str], stdin: str, variables: Mapping[str, str], port: int
) -> Iterator[JailedCommand]:
    """Starts a command without a test of the machine; see `Sandbox.start`."""
    request = make_request(box, stdin)
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
