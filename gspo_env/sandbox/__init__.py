"""Run untrusted code and commands, isolated by the operating system; see docs/tools.md."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from gspo_env.errors import ConfigError, SandboxUnavailableError
from gspo_env.runtime.processes import PrivateFolder, read_streams
from gspo_env.sandbox.launcher import (
    GRACE_SECONDS,
    PORT,
    CommandEnd,
    StartedCommand,
    begin,
    exit_code,
    jailed,
    launch,
    make_request,
    started,
)
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.sandbox.session import SandboxSession

__all__ = [
    "PORT",
    "CommandEnd",
    "Sandbox",
    "SandboxResult",
    "StartedCommand",
    "Stop",
    "find_missing",
    "find_missing_for_commands",
    "started",
]
logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_TRIAL_SECONDS = 20.0
_FAILURE_SECONDS = 60.0
"""Time after which a trial that failed is repeated."""


class Stop(StrEnum):
    """Which limit ended a run."""

    TIME = "time"
    """Wall-clock time."""
    CPU = "cpu"
    """CPU time."""
    OUTPUT = "output"
    """The size of one output stream."""
    MEMORY = "memory"
    """The memory of a container."""


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


Size = Annotated[int, Interval(ge=1, lt=1 << 24)]
"""A limit that is a whole number."""


@settings
class Sandbox:
    r"""Runs code with these limits, each run in a new process, new namespaces and an empty folder.

    Example:
        >>> Sandbox().run("print(6 * 7)").stdout
        '42\n'
    """

    seconds: Annotated[float, Interval(ge=0.01, lt=1 << 24)] = 5.0
    """Wall-clock limit."""
    cpu_seconds: Size = 5
    """CPU seconds of each process."""
    memory_mib: Annotated[int, Interval(ge=64, lt=1 << 24)] = 256
    """Address space of each process."""
    processes: Size = 1
    """Simultaneous processes and threads. They use at most this times `memory_mib` of memory."""
    file_mib: Size = 16
    """Size of the largest file."""
    disk_mib: Size = 32
    """Size of all files in the private folder, which is kept in memory."""
    output_kib: Size = 64
    """Size of standard output and of standard error. A run that exceeds one ends, and the result
    omits the other, because its length at that moment is random."""
    readable: tuple[str, ...] = ()
    """Additional folders and files that the code may read and import from."""
    allow_unsafe: bool = False
    """Run without isolation if this machine has none: with limits, but without protection."""

    def __post_init__(self) -> None:
        """Looks for the folders.

        Raises:
            ConfigError: One does not exist.
        """
        for path in self.readable:
            if not os.path.exists(path):
                raise ConfigError(f"Sandbox: readable path {path!r} does not exist.")

    def check(self) -> bool:
        """Tests whether this machine can isolate code, until it can.

        Raises:
            SandboxUnavailableError: It cannot, and `allow_unsafe` is not set.
        """
        missing = find_missing()
        if missing is not None and not self.allow_unsafe:
            unsafe = ", or pass allow_unsafe=True to run code that you trust without isolation."
            raise SandboxUnavailableError(refusal(missing) + unsafe)
        return missing is None

    def check_commands(self) -> None:
        """Tests whether this machine can isolate commands, until it can.

        Raises:
            SandboxUnavailableError: It cannot; `allow_unsafe` does not help.
        """
        if (missing := find_missing_for_commands()) is not None:
            raise SandboxUnavailableError(refusal(missing))

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

    @contextlib.contextmanager
    def start(
        self,
        command: Sequence[str],
        *,
        stdin: str = "",
        variables: Mapping[str, str] | None = None,
        links: Mapping[str, str] | None = None,
    ) -> Iterator[StartedCommand]:
        """Starts a command, which ends with the block; `seconds` and `output_kib` do not count.

        It may start the programs in `/usr/bin`, `/bin` and `readable`, and it has a loopback
        interface of its own, on which nothing is reached but what listens there. The caller gets a
        socket that listens on it. The thread of the caller has to live as long as the command.

        Args:
            command: The program and its arguments.
            stdin: Its standard input.
            variables: Its environment variables, beside `HOME`, `TMPDIR`, `LANG` and `PATH`.
            links: Symbolic links inside, with what they lead to.

        Raises:
            SandboxUnavailableError: It cannot be isolated; `allow_unsafe` does not help.
        """
        self.check_commands()
        with jailed(self, command, stdin, variables or {}, links or {}) as running:
            yield running

    def open(self, writable: Sequence[str] = ()) -> SandboxSession:
        """Starts a sandbox that lives for several commands, which may start programs.

        Args:
            writable: Folders that commands can write to, beside the private one, of which they are
                parts; commands begin in the first.

        Raises:
            SandboxUnavailableError: It cannot be isolated.
        """
        from gspo_env.sandbox.jail_session import JailSession

        self.check_commands()
        return JailSession(self, writable)


def _remember(find: Callable[[], str | None]) -> Callable[[], str | None]:
    """Keeps a success, and a failure, which may pass, for a minute."""
    last: list[tuple[float, str | None]] = []

    @functools.wraps(find)
    def remembered() -> str | None:
        if not last or (last[0][1] is not None and time.monotonic() > last[0][0]):
            missing = find()
            last[:] = [(time.monotonic() + _FAILURE_SECONDS, missing)]
        return last[0][1]

    return remembered


@_remember
def find_missing() -> str | None:
    """Names what this machine lacks to isolate code; None if a trial run was isolated."""
    if sys.platform != "linux":
        return f"Linux namespaces (this is {sys.platform})"
    box = Sandbox(seconds=_TRIAL_SECONDS, cpu_seconds=20)
    return _try_out(lambda code: _run(box, code, "", False, True))


@_remember
def find_missing_for_commands() -> str | None:
    """Names what this machine lacks to isolate commands; None if a trial was isolated."""
    if (missing := find_missing()) is not None:
        return missing
    command = [os.path.realpath(getattr(sys, "_base_executable", sys.executable)), "-I", "-S", "-"]
    box = Sandbox(cpu_seconds=20, memory_mib=512, processes=4, readable=(command[0],))

    def trial(code: str) -> CommandEnd:
        with jailed(box, command, code, {}, {}) as running:
            if (end := running.wait(_TRIAL_SECONDS)) is None:
                raise SandboxUnavailableError("a trial command did not end")
            return end

    return _try_out(trial)


def _try_out(trial: Callable[[str], SandboxResult | CommandEnd]) -> str | None:
    """Runs the probe; returns why it was not isolated."""
    try:
        result = trial(Path(_FOLDER, "probe.py").read_text())
    except SandboxUnavailableError as error:
        return str(error)
    if result.stdout == "isolated\n":
        return None
    output = (result.stdout or result.stderr).strip()
    return f"a trial was not isolated: {output or 'it printed nothing'}"


@functools.cache
def _folders() -> PrivateFolder:
    """Holds the folders of runs without isolation, which a kill of this process would leave."""
    return PrivateFolder("gspo-env-sandbox-")


def refusal(missing: str) -> str:
    """Returns why nothing can be isolated, and what to do."""
    return (
        f"code cannot be isolated on this machine, which lacks: {missing}. Allow unprivileged user "
        "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
        "kernel.apparmor_restrict_unprivileged_userns; in Docker --security-opt "
        "seccomp=unconfined --security-opt apparmor=unconfined)"
    )


def _run(box: Sandbox, code: str, stdin: str, echo: bool, isolated: bool) -> SandboxResult:
    with contextlib.ExitStack() as stack:
        folder = None
        if not isolated:
            logger.warning("running code without isolation, because allow_unsafe is set")
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=_folders().path))
        source = code.encode("utf-8", "replace").decode()
        request = {**make_request(box, stdin), "code": source, "echo": echo, "folder": folder}
        process, status = launch(stack, isolated, folder)
        begin(box, process, status, request)
        return collect(process, status, box.seconds, box.output_kib, isolated)


def collect(
    process: Any, status: int, time_limit: float, output_kib: int, isolated: bool
) -> SandboxResult:
    """Reads the output until the code has ended or exceeds a limit."""
    started, limit = time.monotonic(), output_kib << 10
    streams = process.stdout.fileno(), process.stderr.fileno()
    received = {source: bytearray() for source in (*streams, status)}
    stopped: Stop | None = None
    try:
        for source, data in read_streams(process, status, time_limit):
            received[source] += data
            if source != status and len(received[source]) > limit:
                stopped = Stop.OUTPUT
                received = {s: received[s][:limit] if s == source else bytearray() for s in streams}
                break
    except TimeoutError:
        stopped = Stop.TIME
    seconds = time.monotonic() - started
    code = None
    if stopped is None:
        code = exit_code(bytes(received[status])) if isolated else process.wait(GRACE_SECONDS)
    if code == -signal.SIGXCPU:
        stopped, code = Stop.CPU, None
    return SandboxResult(
        stdout=received[streams[0]].decode("utf-8", "replace"),
        stderr=received[streams[1]].decode("utf-8", "replace"),
        exit_code=code,
        stopped=stopped,
        seconds=seconds,
        isolated=isolated,
    )
