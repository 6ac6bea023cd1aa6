"""Starts the processes of a run from outside, code or a command; see docs/tools.md."""

from __future__ import annotations

import contextlib
import marshal
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.errors import SandboxUnavailableError, raised_as
from gspo_env.runtime.processes import Guard, read_streams

if TYPE_CHECKING:
    from gspo_env.sandbox import Sandbox

_FOLDER = str(Path(__file__).parent)
_INNER_ID = 1000  # as in jail.py, which only the launcher imports because it needs Linux
_START = f"import sys; sys.path.insert(0, {_FOLDER!r}); import jail; del sys.path[0]; jail.main()"
_SETUP_SECONDS = 30.0
GRACE_SECONDS = 5.0
_MOST_LINKS = 40
_COMMAND_FILES = 256
"""Open files of each process of a command; agents keep connections and start tools."""
_MIB = 1 << 20


def make_request(box: Sandbox, stdin: str) -> dict[str, Any]:
    """Returns the part of a request to the jail that code and commands have in common."""
    links: dict[str, str] = {}
    return {
        "code": "",
        "command": None,
        "stdin": stdin.encode("utf-8", "replace"),
        "readable": [_resolve(path, links) for path in box.readable],
        "links": links,
        "parent": os.getpid(),
        "disk": box.disk_mib * _MIB,
        "folder": None,
    }


def _resolve(path: str, links: dict[str, str]) -> str:
    """Returns the real path, and notes the links that lead from the path to it."""
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(os.path.abspath(path))
        place = os.path.join(os.path.realpath(folder), name)
        if not os.path.islink(place):
            break
        links[place] = os.readlink(place)
        path = os.path.join(os.path.dirname(place), links[place])
    return os.path.realpath(path)


def begin(box: Sandbox, process: Any, status: int, request: dict[str, Any]) -> None:
    """Lets a launched process set its run up, and waits until the code begins.

    Raises:
        SandboxUnavailableError: A step of the set-up failed.
    """
    _expect(status, "unshared")
    isolated = request["folder"] is None
    request["groups"] = isolated and _map_ids(process.pid)
    request["limits"] = _limits(box, isolated, unused_id=bool(request["groups"]))
    if request["command"] is not None:
        request["limits"]["NOFILE"] = _COMMAND_FILES
    with contextlib.suppress(BrokenPipeError):  # the status pipe carries the cause
        process.stdin.write(marshal.dumps(request))
        process.stdin.close()
    _expect(status, "running")


def launch(
    stack: contextlib.ExitStack, isolated: bool, folder: str | None = None, *channel: int
) -> tuple[Any, int]:
    """Starts the process that isolates itself; returns it and the status pipe.

    Args:
        stack: Ends the process and closes the pipe.
        isolated: Whether it isolates itself.
        folder: The private folder of a run without isolation.
        channel: A descriptor that it gets.
    """
    home = folder or "/sandbox"
    # With a fixed hash seed a program prints its sets in the same order each time.
    environment = {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    # A thread counts as a process, and libraries start one per core.
    environment |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    status, child_end = os.pipe()
    stack.callback(os.close, status)
    # The process id is not read; it shows in a process list which process started this one.
    arguments = (str(child_end), "isolated" if isolated else "unsafe", str(os.getpid()))
    try:
        process = subprocess.Popen(
            [python, "-P", "-s", "-S", "-X", "utf8", "-c", _START, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment,
            pass_fds=(child_end, *channel),
            start_new_session=True,
        )
    finally:
        os.close(child_end)
    stack.enter_context(process)
    stack.callback(stop, process, isolated)
    return process, status


def stop(process: Any, isolated: bool) -> None:
    """Stops the run; the launcher of an isolated run ends after all processes inside."""
    if isolated:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _expect(status: int, expected: str) -> None:
    """Waits for a line on the status pipe."""
    line, deadline = b"", time.monotonic() + _SETUP_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(status, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(deadline - time.monotonic()):
                raise SandboxUnavailableError(
                    f"the set-up did not finish within {_SETUP_SECONDS:.0f} seconds"
                )
            if not (byte := os.read(status, 1)):
                break
            line += byte
    text = line.decode("utf-8", "replace").strip()
    if text != expected:
        raise SandboxUnavailableError(text.removeprefix("error ") or "the set-up process died")


def _map_ids(pid: int) -> bool:
    """Maps the user and group inside to ids outside; True if those belong to no other user.

    Root is mapped to an unused id, because the kernel does not limit the processes of root.
    """
    user, group = os.geteuid(), os.getegid()
    ranges = Path("/proc/self/uid_map").read_text().splitlines()
    last = max(int(first) + int(count) - 1 for first, _, count in map(str.split, ranges))
    unused = user == 0 and last >= 65534
    if unused:
        nobody = 65534 if last < 1 << 31 else (1 << 30) + secrets.randbelow(1 << 20)
        maps = dict.fromkeys(("uid_map", "gid_map"), f"0 0 1\n{_INNER_ID} {nobody} 1\n")
    else:
        maps = {"setgroups": "deny"}
        maps |= {"uid_map": f"{_INNER_ID} {user} 1\n", "gid_map": f"{_INNER_ID} {group} 1\n"}
    for name, text in maps.items():
        with raised_as(SandboxUnavailableError, f"{name} cannot be written", OSError):
            Path(f"/proc/{pid}/{name}").write_text(text)
    return unused


def _limits(box: Sandbox, isolated: bool, *, unused_id: bool) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "CPU": (box.cpu_seconds, box.cpu_seconds + 1),
        "FSIZE": box.file_mib * _MIB,
        "NOFILE": 64,
        "CORE": 0,
    }
    if sys.platform == "linux":
        limits |= {"AS": box.memory_mib * _MIB, "MEMLOCK": 0, "MSGQUEUE": 0, "SIGPENDING": 64}
    if isolated:  # the launcher and process 1 count if they run as the same user
        limits["NPROC"] = box.processes + (0 if unused_id else 2)
    return limits


def exit_code(status: bytes) -> int:
    """Reads the exit code from the status pipe; that of a killed process if it has none."""
    word, _, number = status.decode("ascii", "replace").partition(" ")
    # If process 1 reports nothing, the kernel has killed it because memory ran out.
    return int(number) if word == "exit" else -signal.SIGKILL


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedCommand:
    """A command that runs, in a jail, in a container or outside."""

    process: Any
    """Has its output streams."""
    status: int
    """A pipe that gets `exit N`."""
    end: Callable[[], None]
    """Kills the command and all of its processes, without waiting; from any thread."""
    listener: socket.socket | None = None
    """In a sandbox, listens on 127.0.0.1 in the network of the command. The caller accepts its
    connections, and closes it."""

    def wait(self, seconds: float = float("inf")) -> CommandEnd | None:
        """Waits until the command has ended with all of its processes; None if it takes longer."""
        streams = [self.process.stdout.fileno(), self.process.stderr.fileno(), self.status]
        outputs = {stream: bytearray() for stream in streams}
        try:
            for stream, data in read_streams(self.process, self.status, seconds):
                outputs[stream] += data
                del outputs[stream][:-_MAX_KEPT]
        except TimeoutError:
            return None
        stdout, stderr = (outputs[stream].decode("utf-8", "replace") for stream in streams[:2])
        code = exit_code(bytes(outputs[self.status]))
        return CommandEnd(code=code, stdout=stdout, stderr=stderr)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    stdin: str,
    variables: Mapping[str, str],
    *,
    grace: float = 2.0,
    cwd: str | None = None,
) -> Iterator[StartedCommand]:
    """Starts a command outside of a jail, in a process group of its own; it ends with the block.

    Args:
        command: The program and its arguments.
        stdin: Its standard input.
        variables: Its environment variables.
        grace: Seconds between SIGTERM and SIGKILL.
        cwd: The folder in which it runs; by default that of this process.
    """
    status, far_end = os.pipe()
    with tempfile.TemporaryFile() as source, contextlib.ExitStack() as stack:
        stack.callback(os.close, status)
        source.write(stdin.encode())
        source.seek(0)
        descriptors = far_end, source.fileno()
        try:
            guard = Guard(
                ["report", str(grace), *map(str, descriptors), *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=variables,
                cwd=cwd,
                pass_fds=descriptors,
            )
        finally:
            os.close(far_end)
        stack.callback(guard.end)
        yield StartedCommand(process=guard.process, status=status, end=guard.ask_to_end)


@contextlib.contextmanager
def jailed(
    box: Sandbox,
    command: Sequence[str],
    stdin: str,
    variables: Mapping[str, str],
    links: Mapping[str, str],
) -> Iterator[StartedCommand]:
    """Starts a command without a test of the machine; see `Sandbox.start`."""
    request = make_request(box, stdin)
    request["readable"] += [os.path.realpath(folder) for folder in _PROGRAMS]
    request["command"] = [os.fsencode(part) for part in command]
    home = {"HOME": "/sandbox", "TMPDIR": "/sandbox", "LANG": "C.UTF-8", "PATH": _PATH}
    request["variables"] = home | dict(variables)
    request["port"] = PORT
    request["links"] |= links
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
            yield StartedCommand(
                process=process, status=status, end=process.terminate, listener=listener
            )
