"""Run untrusted Python code, isolated by the operating system; see docs/sandbox.md."""

from __future__ import annotations

import contextlib
import functools
import logging
import marshal
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gspo_env.children import PrivateFolder
from gspo_env.errors import ConfigError, SandboxUnavailableError

logger = logging.getLogger(__name__)

_FOLDER = str(Path(__file__).parent)
_INNER_ID = 1000  # as in jail.py, which only the launcher imports because it needs Linux
_START = f"import sys; sys.path.insert(0, {_FOLDER!r}); import jail; del sys.path[0]; jail.main()"
_SETUP_SECONDS = 30.0
_GRACE_SECONDS = 5.0
_MIB = 1 << 20


class Stop(StrEnum):
    """Which limit ended a run."""

    TIME = "time"
    """Wall-clock time."""
    CPU = "cpu"
    """CPU time."""
    OUTPUT = "output"
    """The size of one output stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxResult:
    """The result of a run."""

    stdout: str
    stderr: str
    exit_code: int | None
    """As in `subprocess`: negative for a signal. None if a limit ended the run."""
    stopped: Stop | None
    seconds: float
    """Wall-clock time of the code, without the set-up."""
    isolated: bool
    """False if the code ran without isolation, which `allow_unsafe` permits."""

    @property
    def ok(self) -> bool:
        """Whether the code ended without an error and within its limits."""
        return self.exit_code == 0 and self.stopped is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    r"""Runs code with these limits, each run in a new process, new namespaces and an empty folder.

    Example:
        >>> Sandbox().run("print(6 * 7)").stdout
        '42\n'
    """

    seconds: float = 5.0
    """Wall-clock limit."""
    cpu_seconds: int = 5
    """CPU seconds of each process."""
    memory_mib: int = 256
    """Address space of each process."""
    processes: int = 1
    """Simultaneous processes and threads. They use at most this times `memory_mib` of memory."""
    file_mib: int = 16
    """Size of the largest file."""
    disk_mib: int = 32
    """Size of all files in the private folder, which is kept in memory."""
    output_kib: int = 64
    """Size of standard output and of standard error. A run that exceeds one ends, and the result
    omits the other, because its length at that moment is random."""
    readable: tuple[str, ...] = ()
    """Additional folders that the code may read and import from."""
    allow_unsafe: bool = False
    """Run without isolation if this machine has none: with limits, but without protection."""

    def __post_init__(self) -> None:
        """Validates the limits.

        Raises:
            ConfigError: A limit is not positive, or a folder does not exist.
        """
        for name in self.__slots__:
            value = getattr(self, name)
            low = 64 if name == "memory_mib" else 1 if isinstance(value, int) else 0.01
            if name not in ("readable", "allow_unsafe") and not low <= value < 1 << 24:
                raise ConfigError(f"Sandbox: {name} is {value}, expected at least {low}.")
        for folder in self.readable:
            if not os.path.isdir(folder):
                raise ConfigError(f"Sandbox: readable folder {folder!r} does not exist.")

    def check(self) -> bool:
        """Tests once per process whether this machine can isolate code.

        Raises:
            SandboxUnavailableError: It cannot, and `allow_unsafe` is not set.
        """
        missing = find_missing()
        if missing is not None and not self.allow_unsafe:
            raise SandboxUnavailableError(_refusal(missing))
        return missing is None

    def run(self, code: str, *, stdin: str = "", echo: bool = False) -> SandboxResult:
        """Runs Python code in a new process.

        Args:
            code: The source.
            stdin: Its standard input.
            echo: Print the value of the last line if it is an expression, as a console does.

        Raises:
            SandboxUnavailableError: It cannot be isolated, and `allow_unsafe` is not set.
        """
        return _run(self, code, stdin, echo, self.check())


@functools.cache
def find_missing() -> str | None:
    """Names what this machine lacks to isolate code; None if a trial run was isolated."""
    if sys.platform != "linux":
        return f"Linux namespaces (this is {sys.platform})"
    probe = Sandbox(seconds=20.0, cpu_seconds=20)
    try:
        result = _run(probe, Path(_FOLDER, "probe.py").read_text(), "", False, True)
    except SandboxUnavailableError as error:
        return str(error)
    if result.stdout == "isolated\n":
        return None
    output = (result.stdout or result.stderr).strip()
    return f"a trial run was not isolated: {output or f'it ended with {result.exit_code}'}"


@functools.cache
def _folders() -> PrivateFolder:
    """Holds the folders of runs without isolation, which a kill of this process would leave."""
    return PrivateFolder("gspo-env-sandbox-")


def _refusal(missing: str) -> str:
    return (
        f"code cannot be isolated on this machine, which lacks: {missing}. Allow unprivileged user "
        "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
        "kernel.apparmor_restrict_unprivileged_userns; in Docker --security-opt "
        "seccomp=unconfined --security-opt apparmor=unconfined), or pass allow_unsafe=True to "
        "run code that you trust without isolation."
    )


def _run(box: Sandbox, code: str, stdin: str, echo: bool, isolated: bool) -> SandboxResult:
    request: dict[str, Any] = {
        "code": code.encode("utf-8", "replace").decode(),
        "stdin": stdin.encode("utf-8", "replace"),
        "echo": echo,
        "readable": [os.path.realpath(folder) for folder in box.readable],
        "parent": os.getpid(),
        "disk": box.disk_mib * _MIB,
        "folder": None,
    }
    with contextlib.ExitStack() as stack:
        if not isolated:
            logger.warning("running code without isolation, because allow_unsafe is set")
            folder = tempfile.TemporaryDirectory(dir=_folders().path)
            request["folder"] = stack.enter_context(folder)
        process, status = _launch(stack, isolated, request["folder"])
        _expect(status, "unshared")
        request["groups"] = isolated and _map_ids(process.pid)
        request["limits"] = _limits(box, isolated, unused_id=bool(request["groups"]))
        with contextlib.suppress(BrokenPipeError):  # the status pipe carries the cause
            process.stdin.write(marshal.dumps(request))
            process.stdin.close()
        _expect(status, "running")
        return _collect(box, process, status, isolated)


def _launch(stack: contextlib.ExitStack, isolated: bool, folder: str | None) -> tuple[Any, int]:
    """Starts the process that isolates itself; returns it and the status pipe."""
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
            pass_fds=(child_end,),
            start_new_session=True,
        )
    finally:
        os.close(child_end)
    stack.enter_context(process)
    stack.callback(_stop, process, isolated)
    return process, status


def _stop(process: Any, isolated: bool) -> None:
    """Stops the run; the launcher of an isolated run ends after all processes inside."""
    if isolated:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
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
    known = Path("/proc/self/uid_map").read_text().splitlines()
    last = max(int(first) + int(count) - 1 for first, _, count in map(str.split, known))
    unused = user == 0 and last >= 65534
    if unused:
        nobody = 65534 if last < 1 << 31 else (1 << 30) + secrets.randbelow(1 << 20)
        maps = dict.fromkeys(("uid_map", "gid_map"), f"0 0 1\n{_INNER_ID} {nobody} 1\n")
    else:
        maps = {"setgroups": "deny"}
        maps |= {"uid_map": f"{_INNER_ID} {user} 1\n", "gid_map": f"{_INNER_ID} {group} 1\n"}
    for name, text in maps.items():
        try:
            Path(f"/proc/{pid}/{name}").write_text(text)
        except OSError as error:
            raise SandboxUnavailableError(f"{name} cannot be written: {error}") from error
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


def _collect(box: Sandbox, process: Any, status: int, isolated: bool) -> SandboxResult:
    """Reads the output until the code has ended or exceeds a limit."""
    started, limit = time.monotonic(), box.output_kib << 10
    received = {process.stdout: bytearray(), process.stderr: bytearray(), status: bytearray()}
    stopped: Stop | None = None
    with selectors.DefaultSelector() as selector:
        for source in received:
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map() and stopped is None:
            left = started + box.seconds - time.monotonic()
            ready = selector.select(max(0.0, min(left, 0.1)))
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                received[key.fileobj] += data
                if not data:
                    selector.unregister(key.fileobj)
            if any(len(received[s]) > limit for s in (process.stdout, process.stderr)):
                stopped = Stop.OUTPUT
            elif left <= 0.0:
                stopped = Stop.TIME
            elif not ready and process.poll() is not None:
                break  # without isolation a process outside the group may hold the pipe open
    seconds = time.monotonic() - started
    code = None if stopped else _exit_code(bytes(received[status]), process, isolated)
    if code == -signal.SIGXCPU:
        stopped, code = Stop.CPU, None
    texts = [bytes(received[s]) for s in (process.stdout, process.stderr)]
    if stopped is Stop.OUTPUT:
        first = len(texts[0]) > limit
        texts = [texts[0][:limit] if first else b"", b"" if first else texts[1][:limit]]
    return SandboxResult(
        stdout=texts[0].decode("utf-8", "replace"),
        stderr=texts[1].decode("utf-8", "replace"),
        exit_code=code,
        stopped=stopped,
        seconds=seconds,
        isolated=isolated,
    )


def _exit_code(status: bytes, process: Any, isolated: bool) -> int:
    if not isolated:
        return int(process.wait(_GRACE_SECONDS))
    word, _, number = status.decode("ascii", "replace").partition(" ")
    # If process 1 reports nothing, the kernel has killed it because memory ran out.
    return int(number) if word == "exit" else -signal.SIGKILL
