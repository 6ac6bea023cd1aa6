"""Containers as sandboxes, by the command line of `podman` or `docker`; see docs/tools.md."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from gspo_env.errors import (
    ConfigError,
    EnvironmentCrashError,
    SandboxUnavailableError,
)
from gspo_env.runtime.processes import read_streams, spawn
from gspo_env.sandbox import PORT, SandboxResult, Size, StartedCommand, Stop, started
from gspo_env.sandbox.session import SandboxSession
from gspo_env.settings import settings

logger = logging.getLogger(__name__)

PROGRAMS = ("podman", "docker")
_LABEL = "gspo-env"
_SYSTEM_SECONDS, _BUILD_SECONDS, _GRACE_SECONDS = 120.0, 1800.0, 10.0
_PASSED = {"HOME", "LANG", "PATH", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"}
_PASSED |= {"CONTAINER_HOST", "DOCKER_HOST", "DOCKER_CONFIG", "DBUS_SESSION_BUS_ADDRESS"}
"""Variables that the command line gets. The container gets none of them, nor those of a proxy."""
_IDLE = '[ $# = 0 ] || chmod 1777 "$@"; trap "exit 0" TERM; while :; do sleep 3600 & wait; done'
"""Process 1: collects the exit codes of processes whose parents have ended."""
_SHELL = """while read -r mark size; do
text=
while IFS= read -r line && [ "$line" != "$mark" ]; do text="$text$line
"; done
if [ "$size" = 0 ]; then (eval "$text") </dev/null
else head -c "$size" | { (eval "$text"); code=$?; cat >/dev/null; exit $code; }; fi
echo "$mark $?"; echo "$mark 0" >&2
done"""
"""Runs commands one after another, each in a new process, and marks the ends of their output."""
_SWEEP = """trap 'ids=$("$1" ps --all --quiet --filter label=gspo-env="$2")
[ -z "$ids" ] || "$1" rm --force --volumes $ids; exit' TERM
while :; do sleep 3600 & wait $!; done"""
_RUNNER = """import ast, sys
tree, scope, last = ast.parse(sys.argv[1], "<code>"), {"__name__": "__main__"}, []
if sys.argv[2:] and tree.body and isinstance(tree.body[-1], ast.Expr):
    last = [tree.body.pop()]
exec(compile(tree, "<code>", "exec"), scope)
exec(compile(ast.Interactive(last), "<code>", "single"), scope)"""
"""Runs code, and prints the value of a last expression as `Sandbox.run` does."""
_TRIAL = """for name; do command -v "$name" >/dev/null || echo "lacks $name"; done
for file in memory.max memory/memory.limit_in_bytes pids.max pids/pids.max \
cpu.max cpu/cpu.cfs_quota_us; do
[ -r /sys/fs/cgroup/$file ] && read -r value rest </sys/fs/cgroup/$file && echo "$file $value"
done"""
"""Shows which programs an image lacks, and the limits of a control group of version 2 or 1."""
_KILLS = "cat /sys/fs/cgroup/memory/memory.oom_control || cat /sys/fs/cgroup/memory.events"
_LISTEN = """import ctypes, os, socket, sys
if ctypes.CDLL(None).setns(os.open("/proc/%s/ns/net" % sys.argv[1], os.O_RDONLY), 0x40000000):
    sys.exit("setns")
with socket.socket() as listener, socket.socket(fileno=int(sys.argv[3])) as way_out:
    listener.bind(("127.0.0.1", int(sys.argv[2])))
    listener.listen(128)
    socket.send_fds(way_out, [b"x"], [listener.fileno()])"""


@settings
class Containers:
    """Runs commands in containers of an image with these limits, without a network.

    The root is read-only, nothing has capabilities, and commands run as a user that nobody else
    is. The image is never pulled: it must be on this machine before.

    Example:
        >>> Containers(image="debian:bookworm").program
        'podman'
    """

    image: str
    """Name of the image."""
    program: Literal["podman", "docker"] = "podman"
    """The command line."""
    seconds: Annotated[float, Interval(gt=0, lt=1 << 24)] = 10.0
    """Wall-clock limit of `run`."""
    memory_mib: Size = 512
    """Memory of a container, with the files in its writable folders; it doesn't swap."""
    cpus: Annotated[float, Interval(gt=0, lt=1 << 24)] = 1.0
    """Processors of a container."""
    processes: Size = 64
    """Simultaneous processes and threads."""
    disk_mib: Size = 64
    """Size of all files in a writable folder, which is kept in memory. The first folder has at most
    3/8 of the memory, `/tmp` half of that, and all others together as much as `/tmp`."""
    open_files: Size = 1024
    """Open files of each process."""
    output_kib: Size = 64
    """Size of standard output and of standard error of one command."""
    read_only: bool = True
    """False makes the whole root writable, without a limit on the disk that it takes."""
    at_once: Size = 32
    """Containers that the episodes of one process have at once; others wait."""
    user: str = ""
    """User of the commands; by default an unused id for each container."""

    def check(self, *programs: str) -> bool:
        """Tests whether the image is here, with these programs; removes what was left.

        These are containers of processes that were killed. A warning names limits that are not set.

        Raises:
            SandboxUnavailableError: Something is missing, or no container can be started.
        """
        remove_leftovers(self.program)
        if not has_image(self.program, self.image):
            raise SandboxUnavailableError(
                f"{self.program} has no image {self.image!r}, and none is pulled during a run; "
                f"pull or build it before: {self.program} pull {self.image}"
            )
        _try_out(self, ("timeout", *programs))
        return True

    check_commands = check

    def open(self, writable: Sequence[str] = ()) -> ContainerSession:
        """Starts a container that lives for several commands.

        Args:
            writable: Folders that commands can write to, beside `/tmp`; they hide those of the
                image, and commands begin in the first.

        Raises:
            EnvironmentCrashError: It can't be started.
        """
        name = f"{_LABEL}-{secrets.token_hex(12)}"
        keep = ["--detach", "--name", name, "--workdir", [*writable, "/tmp"][0]]
        flags = self._flags(writable)
        _sweeper(self.program, os.getpid())
        line = ["run", *keep, *flags, "--entrypoint", "sh", self.image, "-c", _IDLE, "sh"]
        # A folder that the image has gets the mode of the image's.
        line += (*writable, "/tmp") if self.read_only else ()
        done = call(self.program, *line)
        if done.returncode:
            raise EnvironmentCrashError(
                f"sandbox: {self.program} starts no container of {self.image!r}: {_last(done)}"
            )
        session = ContainerSession(self, name)
        for folder in (*writable, "/tmp") if self.read_only else ():  # until process 1 is so far
            wait = ["sh", "-c", 'until [ -w "$1" ]; do sleep 0.01; done', "sh", folder]
            if not session.exec(wait).ok:
                session.stop()
                raise EnvironmentCrashError(f"sandbox: {folder} can't be written in {self.image!r}")
        return session

    def run(self, code: str, *, stdin: str = "", echo: bool = False) -> SandboxResult:
        """Runs Python code in a container of its own; see `Sandbox.run`.

        Raises:
            EnvironmentCrashError: The container can't be started, or was ended from outside.
        """
        with contextlib.closing(self.open()) as session:
            command = ["python3", "-I", "-c", _RUNNER, code, *["echo"] * echo]
            return session.exec(command, stdin=stdin.encode(), seconds=self.seconds)

    @contextlib.contextmanager
    def start(
        self,
        command: Sequence[str],
        *,
        stdin: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> Iterator[StartedCommand]:
        """Starts a command that reaches one address; see `Sandbox.start`.

        Raises:
            EnvironmentCrashError: It can't be started.
        """
        with (
            contextlib.closing(self.open()) as session,
            session.listen() as listener,
            started(
                session.line(command, variables or {}),
                stdin,
                {**_variables(), **(variables or {})},
                cwd=tempfile.gettempdir(),  # conmon writes a file `oom` there
            ) as running,
        ):
            yield replace(running, listener=listener)

    def wrap(self, command: Sequence[str], variables: Collection[str] = ()) -> list[str]:
        """Returns the command line that runs a command in a container, such as a tool server.

        Args:
            command: The program and its arguments.
            variables: Names of the variables of the caller that it gets.
        """
        names = [word for name in variables for word in ("--env", name)]
        flags = ["--interactive", "--workdir", "/tmp", *names, *self._flags()]
        _sweeper(self.program, os.getpid())
        return [self.program, "run", *flags, "--entrypoint", command[0], self.image, *command[1:]]

    def _flags(self, writable: Sequence[str] = ()) -> list[str]:
        memory, folders = f"{self.memory_mib}m", list(dict.fromkeys((*writable, "/tmp")))
        folders += ["/run", "/var/tmp"]  # podman would mount them without a limit
        # Full folders leave memory for the commands that empty them.
        disk, share = 1024 * self.disk_mib, 1024 * self.memory_mib * 3 // 16
        sizes = {folder: min(disk, share // len(folders)) for folder in [*folders, "/dev/shm"]}
        sizes |= {"/tmp": min(disk, share)}
        sizes |= {folders[0]: min(disk, 2 * share)}
        options = "rw,exec,nosuid,nodev,mode=1777"
        podman_only = ["--image-volume=ignore"] if self.program == "podman" else []
        options += ",notmpcopyup" if podman_only else ""
        shared = sizes.pop("/dev/shm")
        return [
            *("--rm", "--pull=never", "--stop-timeout=0", "--network=none", "--cap-drop=ALL"),
            *(f"--label={_LABEL}={_owner()}", "--security-opt=no-new-privileges"),
            *(f"--memory={memory}", f"--memory-swap={memory}", f"--cpus={self.cpus}"),
            *(f"--pids-limit={self.processes + 16}", f"--shm-size={shared}k"),
            f"--ulimit=nproc={self.processes}:{self.processes}",
            f"--ulimit=nofile={self.open_files}:{self.open_files}",
            *("--ulimit=core=0:0", "--user=0:0", *podman_only, *["--read-only"] * self.read_only),
            *(f"--tmpfs={at}:{options},size={kib}k" for at, kib in sizes.items() if self.read_only),
        ]


class ContainerSession(SandboxSession):
    """A running container."""

    def __init__(self, settings: Containers, name: str) -> None:
        """See `Containers.open`."""
        self._settings, self._name = settings, name
        identity = 1000 + secrets.randbelow(60_000)
        # Limits on processes count those of the user in all containers.
        self._user = settings.user or f"{identity}:{identity}"
        self._kills = 0
        self._lock = threading.Lock()
        self._shell: _Shell | None = None
        removal = ("rm", "--force", "--volumes", name)
        self._end = weakref.finalize(self, call, settings.program, *removal)
        self._end.atexit = False  # the sweeper does it

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float = 60.0,
        variables: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """See `SandboxSession.exec`."""
        lines = [f"export {shlex.quote(f'{k}={v}')}" for k, v in (variables or {}).items()]
        lines += [f"exec timeout -s KILL {seconds:g} {shlex.join(command)}"]
        request = os.fsencode("\n".join(lines))
        with self._lock:
            if self._shell is None or self._shell.has_ended():
                self._shell = _Shell(self, _SHELL)
            limits = seconds + _GRACE_SECONDS, self._settings.output_kib << 10
            result = self._shell.run(request, stdin, *limits)
        code = result.exit_code
        if code is not None and (code >= 125 or result.stderr.startswith("Error")):
            self._check(result.stderr)  # docker's client ends with 1 where there is no container
            if code == 137 and result.seconds >= seconds:
                return replace(result, exit_code=None, stopped=Stop.TIME)
            if code == 137 and self._is_out_of_memory():
                return replace(result, exit_code=None, stopped=Stop.MEMORY)
        return result

    def kill(self) -> None:
        """See `SandboxSession.kill`."""
        with self._lock:  # what commands have left may have changed the old shell
            if self._shell is not None:
                self._shell.close()
            self._shell = _Shell(self, f"kill -9 -1\n{_SHELL}")
        self.exec(["true"])

    def line(self, command: Sequence[str], variables: Collection[str] = ()) -> list[str]:
        """Returns the command line that runs a command.

        Args:
            command: The program and its arguments.
            variables: The names of its variables, whose values would be in the list of processes.
        """
        names = [word for name in variables for word in ("--env", name)]
        home = ("--env", "HOME=/tmp", "--env", "LANG=C.UTF-8")
        flags = ["--interactive", "--user", self._user, *home, *names]
        return [self._settings.program, "exec", *flags, self._name, *command]

    def listen(self) -> socket.socket:
        """Returns a socket that listens on the loopback address of the container.

        Raises:
            EnvironmentCrashError: It can't be had, such as without the right to enter a namespace.
        """
        program = self._settings.program
        pid = call(program, "inspect", "--format", "{{.State.Pid}}", self._name).stdout.strip()
        near, far = socket.socketpair()
        with near, far:
            arguments = [sys.executable, "-I", "-c", _LISTEN, pid, str(PORT), str(far.fileno())]
            if os.geteuid() and program == "podman":
                arguments = ["podman", "unshare", *arguments]
            done = subprocess.run(
                arguments, pass_fds=(far.fileno(),), capture_output=True, text=True, timeout=60
            )
            near.settimeout(1.0)
            descriptors = socket.recv_fds(near, 1, 1)[1] if not done.returncode else []
        if not descriptors:
            raise EnvironmentCrashError(
                f"sandbox: no address can be made in a container of {program}: {_last(done)}"
            )
        return socket.socket(fileno=descriptors[0])

    def stop(self) -> None:
        """Removes the container."""
        self._end()
        if self._lock.acquire(blocking=False):  # a command that runs notices by itself
            if self._shell is not None:
                self._shell.close()
            self._lock.release()

    close = stop

    def _is_out_of_memory(self) -> bool:
        """Returns whether the kernel has killed a process for memory since the last call."""
        shown = call(self._settings.program, "exec", self._name, "sh", "-c", _KILLS).stdout
        match, last = re.search(r"oom_kill (\d+)", shown), self._kills
        self._kills = int(match[1]) if match else last
        return self._kills > last

    def _check(self, reason: str) -> None:
        """Raises an error if the container has ended, or the program could not use it."""
        program, form = self._settings.program, "{{.State.Running}}"
        state = call(program, "inspect", "--format", form, self._name)
        if state.stdout.strip() != "true":
            self.stop()
            raise EnvironmentCrashError(
                "sandbox: the container was ended from outside, or has used up its memory "
                f"({self._settings.memory_mib} MiB)"
            )
        if re.match(r"(Error: )?(OCI runtime|runc:|crun:|.*exec session)", reason):
            self.stop()
            text = " ".join(reason.split())[-200:]
            raise EnvironmentCrashError(f"sandbox: {program} can't run a command: {text}")


class _Shell:
    """A shell in a container that runs one command after another."""

    def __init__(self, session: ContainerSession, script: str) -> None:
        self._status, far_end = os.pipe()
        self._process = subprocess.Popen(
            session.line(["sh", "-c", script]),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_variables(),
            pass_fds=(far_end,),  # closes at its end
            cwd=tempfile.gettempdir(),
            start_new_session=True,
        )
        os.close(far_end)
        self._exit = contextlib.ExitStack()
        self._exit.callback(os.close, self._status)
        self._exit.enter_context(self._process)
        self._exit.callback(self._process.kill)

    def run(self, text: bytes, stdin: bytes, seconds: float, limit: int) -> SandboxResult:
        """Runs a command; ends with it if that exceeds a limit or ends the shell."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        mark, began = secrets.token_hex(12).encode(), time.monotonic()
        request = b"%b %d\n%b\n%b\n%b" % (mark, len(stdin), text, mark, stdin)
        writer = threading.Thread(target=self._write, args=(request,), daemon=True)
        writer.start()
        streams = self._process.stdout.fileno(), self._process.stderr.fileno()
        received = {source: bytearray() for source in streams}
        codes: dict[int, int] = {}
        stopped: Stop | None = None
        try:
            for source, data in read_streams(self._process, self._status, seconds):
                if source == self._status or source in codes:
                    continue  # what other processes write after the end
                output = received[source]
                output += data
                begin = output.find(mark, max(0, len(output) - len(data) - len(mark)))
                line = bytes(output[begin:]).partition(b"\n") if begin >= 0 else (b"", b"", b"")
                if line[1]:
                    digits = line[0].partition(b" ")[2][:3]
                    codes[source] = int(digits) if digits.isdigit() else 1
                    del output[begin:]
                if len(output) > limit + (0 if line[1] else 2 * len(mark)):
                    stopped = Stop.OUTPUT
                    received = {s: output[:limit] if s == source else bytearray() for s in streams}
                    break
                if len(codes) == len(streams):
                    break
        except TimeoutError:
            stopped = Stop.TIME
        finally:
            if len(codes) < len(streams) or stopped is not None:
                self._process.kill()
                writer.join(_GRACE_SECONDS)
                self.close()
        code = codes.get(streams[0], self._process.returncode)
        return SandboxResult(
            stdout=received[streams[0]].decode("utf-8", "replace"),
            stderr=received[streams[1]].decode("utf-8", "replace"),
            exit_code=None if stopped else code,
            stopped=stopped,
            seconds=time.monotonic() - began,
            isolated=True,
        )

    def _write(self, request: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the shell has ended
            while request:
                request = request[self._process.stdin.write(request) :]

    def has_ended(self) -> bool:
        """Returns whether it runs no further command."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends the shell."""
        self._exit.close()


def read_containers(value: Any, where: str, **limits: Any) -> Containers:
    """Reads `podman:IMAGE`, `docker:IMAGE`, or a mapping with the fields of `Containers`.

    Args:
        value: What a user named.
        where: Names it in an error.
        limits: Limits that differ from the defaults.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(value, Mapping) and "image" in value:
        names = {field.name for field in fields(Containers)}
        if unknown := sorted(set(value) - names):
            raise ConfigError(f"{where} has {unknown[0]!r}, expected {', '.join(sorted(names))}.")
        return Containers(**{**limits, **value})
    program, _, image = value.partition(":") if isinstance(value, str) else ("", "", "")
    if program not in PROGRAMS or not image:
        raise ConfigError(f"{where} is {value!r}, expected podman:IMAGE or docker:IMAGE.")
    return Containers(**{**limits, "program": program, "image": image})


def build(program: str, folder: Path, name: str, seconds: float = _BUILD_SECONDS) -> str:
    """Builds the image of a folder with a Dockerfile, unless it exists; returns its name.

    The name ends with a digest of the folder. Nothing is pulled, and no step has a network.

    Raises:
        SandboxUnavailableError: It can't be built.
    """
    from gspo_env.seeding import fingerprint

    file = folder / "Dockerfile"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    parts = [f"{p.relative_to(folder)}:{p.read_bytes().hex()}" for p in files]
    base = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    image = f"localhost/gspo-env/{base}:{fingerprint(*parts)}"
    if has_image(program, image):
        return image
    text = file.read_text(encoding="utf-8")
    line = f"{program} build --tag {image} {folder}"
    if fetched := re.search(r"(?im)^ADD\s.*(https?://|git@|\.git\b).*", text):
        raise SandboxUnavailableError(
            f"{name}: its Dockerfile fetches what is elsewhere ({fetched[0].strip()}), and nothing "
            f"is fetched here; build it before: {line}"
        )
    for argument, value in re.findall(r"(?im)^ARG\s+(\w+)=[\"']?([^\s\"']+)", text):
        text = re.sub(rf"\$({argument}\b|{{{argument}}})", lambda _: value, text)  # noqa: B023
    stages = re.findall(r"(?im)^FROM\s+(?:--\S+\s+)*\S+\s+AS\s+(\S+)", text)
    for needed in re.findall(r"(?im)^(?:FROM\s+(?:--\S+\s+)*|COPY\s.*--from=)(\S+)", text):
        if needed.isdigit() or needed in (*stages, "scratch"):
            continue
        if not has_image(program, needed):
            raise SandboxUnavailableError(
                f"{name}: its base image {needed!r} is not here, and none is pulled during a run; "
                f"get it before: {program} pull {needed}"
            )
    logger.info("building the image %s of %s", image, folder)
    flags = ["--network=none", "--force-rm", f"--label={_LABEL}=image", "--tag", image]
    flags += ["--pull=never"] if program == "podman" else []
    done = call(program, "build", *flags, str(folder.resolve()), seconds=seconds)
    if done.returncode:
        raise SandboxUnavailableError(
            f"{name}: its Dockerfile can't be built without a network ({_last(done)}); if it "
            f"needs one, build it before: {line}"
        )
    listed = call(program, "images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    if old := [i for i in listed if i.rpartition(":")[0] == image.rpartition(":")[0] != i != image]:
        logger.info("older images of this task: %s rmi %s", program, " ".join(old))
    return image


def has_image(program: str, image: str) -> bool:
    """Returns whether an image is on this machine.

    Raises:
        SandboxUnavailableError: The program is not installed or does not work.
    """
    done = call(program, "image", "inspect", "--format", "{{.Id}}", image)
    if done.returncode and not re.search(
        "(?i)no such image|not known|unable to find|invalid", done.stderr
    ):
        raise SandboxUnavailableError(f"{program} does not work here: {_last(done)}")
    return not done.returncode


def image_folder(program: str, image: str) -> str:
    """Returns the working folder of an image."""
    done = call(program, "image", "inspect", "--format", "{{json .Config}}", image)
    return str(json.loads(done.stdout).get("WorkingDir") or "/") if not done.returncode else "/"


def image_files(program: str, image: str, folder: str) -> bytes:
    """Returns the files of a folder of an image as a tar archive.

    Raises:
        SandboxUnavailableError: The image is gone.
    """
    label = f"--label={_LABEL}={_owner()}"
    created = call(program, "create", label, "--pull=never", image, "sh")
    name = created.stdout.strip()
    try:
        done = subprocess.run(
            [program, "cp", f"{name}:{folder}/.", "-"],
            capture_output=True,
            env=_variables(),
            timeout=_SYSTEM_SECONDS,
        )
    finally:
        call(program, "rm", "--force", "--volumes", name)
    if created.returncode or done.returncode:
        raise SandboxUnavailableError(
            f"{program} can't read {folder} of {image!r}: "
            + (_last(created) if created.returncode else str(done.stderr[-300:]))
        )
    buffer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(done.stdout)) as source,
        tarfile.open(fileobj=buffer, mode="w") as archive,
    ):
        for entry in source:  # docker lists the folder itself, which is not the user's to change
            if os.path.normpath(entry.name) != ".":
                archive.addfile(entry, source.extractfile(entry) if entry.isreg() else None)
    return buffer.getvalue()


@functools.cache
def remove_leftovers(program: str) -> None:
    """Removes the containers of processes that were killed; once a process.

    Raises:
        SandboxUnavailableError: The program is not installed or does not work.
    """
    form = ("ps", "--all", "--filter", f"label={_LABEL}", "--format", "{{.ID}} {{.Labels}}")
    listed = call(program, *form)
    if listed.returncode:
        raise SandboxUnavailableError(f"{program} does not work here: {_last(listed)}")
    orphans = [line.split()[0] for line in listed.stdout.splitlines() if _is_orphan(line)]
    if orphans:
        logger.warning("removing %d containers that a killed process has left", len(orphans))
        call(program, "rm", "--force", "--volumes", *orphans)


@functools.cache
def _try_out(box: Containers, programs: tuple[str, ...]) -> None:
    """Starts a container, once for each kind, and looks for programs and limits."""
    line = ["run", *box._flags(), "--entrypoint", "sh", box.image, "-c", _TRIAL, "sh", *programs]
    done = call(box.program, *line)
    if done.returncode:
        raise SandboxUnavailableError(
            f"{box.program} starts no container of {box.image!r}: {_last(done)}"
        )
    if lacking := re.findall(r"(?m)^lacks (\S+)$", done.stdout):
        raise SandboxUnavailableError(f"the image {box.image!r} has no {', '.join(lacking)}")
    limits = re.findall(r"(?m)^(memory|pids|cpu)\S+ (\d{1,15})$", done.stdout)
    if missing := sorted({"memory", "pids", "cpu"} - {name for name, _ in limits}):
        _warn(box.program, ", ".join(missing))


@functools.cache
def _warn(program: str, missing: str) -> None:
    logger.warning(
        "containers of %s have no limit on %s here: no control group sets it", program, missing
    )


def call(
    program: str, *arguments: str, seconds: float = _SYSTEM_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs the command line; a signal of the terminal does not reach it.

    Raises:
        SandboxUnavailableError: It is not installed.
    """
    if shutil.which(program) is None:
        raise SandboxUnavailableError(
            f"{program} is not installed; on Debian: apt-get install {program}"
            + (" runc" if program == "podman" else ".io")
        )
    try:
        return subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=_variables(),
            cwd=tempfile.gettempdir(),
            timeout=seconds,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentCrashError(
            f"sandbox: {program} {arguments[0]} took longer than {seconds:g} s"
        ) from error


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED if name in os.environ}


def _last(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the end of an error message."""
    return " ".join(str(done.stderr).split())[-300:] or f"exit code {done.returncode}"


def _owner() -> str:
    """Names this process, also where its id is given to another one later."""
    return f"{os.getpid()}-{_start_time(os.getpid())}-{_namespace()}"


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino if sys.platform == "linux" else 0


def _is_orphan(labels: str) -> bool:
    """Returns whether the process of a container has ended; False if it runs elsewhere."""
    match = re.search(rf"{_LABEL}[:=](\d+)-(\d+)-(\d+)", labels)
    if match is None or int(match[3]) != _namespace():
        return False
    return _start_time(int(match[1])) != match[2]


@functools.cache
def _sweeper(program: str, process: int) -> object:
    """Starts the guard that removes the containers of this process after its end, once."""
    command = ["sh", "-c", _SWEEP, "sh", program, _owner()]
    return spawn(command, log=subprocess.DEVNULL, env=_variables(), grace=300.0)
