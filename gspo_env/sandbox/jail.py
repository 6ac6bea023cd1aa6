"""The program that isolates itself and then runs untrusted code; uses the standard library only.

It has three processes. The launcher enters new namespaces and waits. `init` is process 1 of the new
PID namespace; when it ends, the kernel kills every other process in it. Its child drops all
privileges and runs the code, or a command. If a step fails, the run stops before that begins.

A command has a loopback interface of its own and one socket that listens there. The launcher makes
the socket inside and passes it out, so that the process outside accepts its connections.

The status pipe carries `unshared`, then `running`, then `exit N` or `error WHY`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import marshal
import os
import resource
import select
import signal
import struct
import sys
import types
from typing import Any, NoReturn

from jail_filter import (  # type: ignore[import-not-found,unused-ignore] # beside this file
    ALL_NAMESPACES,
    ARCHITECTURES,
    CHECKED,
    COMMANDS,
    DENIED,
    NAMESPACES,
    PIVOT_ROOT,
    PR_SET_THP_DISABLE,
    check,
    deny,
    prctl,
)

HOME = "/sandbox"
"""The private folder, the only one that the code can write to."""
INNER_ID = 1000
"""User and group id inside. Outside they map to an unused id, or to the user who runs this."""

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY_NOSUID = 2, -100, 0x8000, 3
_SYS_MOUNT_SETATTR, _SYS_CLOSE_RANGE = 442, 436
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Sets up the run that standard input describes, and exits when the code has ended."""
    status = int(sys.argv[1])
    _guarded(status, lambda: _launch(status))


def _launch(status: int) -> None:
    if sys.argv[2] == "isolated":
        _enter_namespaces()
    os.write(status, b"unshared\n")
    request = marshal.loads(sys.stdin.buffer.read())
    if request["folder"] is None:
        _supervise(request, status)
    if sys.platform == "linux":  # without isolation, elsewhere the CPU limit must do
        _end_with_parent(request)
    os.chdir(request["folder"])
    _set_stdin(request["stdin"])
    _set_limits(request)
    os.write(status, b"running\n")
    _run(request)


def _enter_namespaces() -> None:
    names = {name: f"/proc/self/ns/{name}" for name in NAMESPACES}
    names["pid"] += "_for_children"
    before = {name: os.stat(path).st_ino for name, path in names.items() if name != "pid"}
    check("unshare of user, mount, PID and network namespaces", _libc.unshare(ALL_NAMESPACES))
    for name, inode in before.items():  # some user-space kernels report success and do nothing
        if os.stat(names[name]).st_ino == inode:
            raise OSError(errno.ENOSYS, f"unshare did not make a new {name} namespace")


def _supervise(request: dict[str, Any], status: int) -> NoReturn:
    _end_with_parent(request)
    if request["command"] is not None:
        _listen(request["port"], request["channel"])
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        _guarded(status, lambda: _init(request, status, alive))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    # Process 1 ends after every other process of its namespace, so nothing is left after this.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after `waitpid` there is none to kill
    os.waitpid(child, 0)
    os._exit(0)


def _listen(port: int, channel: int) -> None:
    """Passes out a socket that listens on the loopback address of the new network namespace."""
    import socket

    for name in ("rmem", "wmem"):  # the kernel counts what sockets hold for no process
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/tcp_{name}", "w") as file:
            file.write("4096 65536 65536")
    with socket.socket() as listener, socket.socket(fileno=channel) as way_out:
        up = struct.pack("16sh14x", b"lo", _IFF_UP)
        fcntl.ioctl(listener, _SIOCSIFFLAGS, up)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        socket.send_fds(way_out, [b"x"], [listener.fileno()])


def _end_with_parent(request: dict[str, Any]) -> None:
    _die_with_parent()
    if os.getppid() != request["parent"]:
        os._exit(1)


def _guarded(status: int, work: Any) -> NoReturn:
    """Runs a process's work, reports an OSError on the status pipe, and exits."""
    try:
        work()
    except OSError as error:
        os.write(status, f"error {error.strerror or error}\n".encode())
    finally:
        os._exit(1)


def _init(request: dict[str, Any], status: int, alive: int) -> None:
    """Runs process 1: builds the file system, starts the code and waits for it."""
    _die_with_parent()
    if select.select([alive], [], [], 0)[0]:  # the launcher died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _build_root(request)
    child = os.fork()
    if child == 0:
        _guarded(status, lambda: _enter(request, status))
    while True:
        pid, code = os.wait()
        if pid == child:
            os.write(status, f"exit {os.waitstatus_to_exitcode(code)}\n".encode())
            os._exit(0)


def _build_root(request: dict[str, Any]) -> None:
    """Makes a root file system that holds, of the host's files, only read-only libraries."""
    folders = _readable(request["readable"])
    names = ("/lib", "/lib64") if request["command"] is None else ("/lib", "/lib64", "/bin")
    links = {name: os.readlink(name) for name in names if os.path.islink(name)}
    os.umask(0o022)  # a stricter one would hide the folders from the code
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/.host")
    column = ARCHITECTURES.get(os.uname().machine, (0, 0))[0]
    check("pivot_root", _libc.syscall(PIVOT_ROOT[column], b"/tmp", b"/tmp/.host"))
    os.chdir("/")
    for path, target in request["links"].items():  # before any folder of the host is mounted
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path in folders:
        if os.path.isdir(f"/.host{path}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT))
        _mount(f"/.host{path}", path, None, _MS_BIND | _MS_REC)
    for name, target in links.items():
        os.symlink(target, name)
    os.mkdir("/dev")
    for device in ("/dev/null", "/dev/urandom"):
        os.close(os.open(device, os.O_CREAT))
        _mount(f"/.host{device}", device, None, _MS_BIND)
    os.mkdir(HOME)
    if not os.path.exists("/tmp"):
        os.symlink(HOME, "/tmp")
    check("umount2", _libc.umount2(b"/.host", _MNT_DETACH))
    os.rmdir("/.host")
    attributes = struct.pack("QQQQ", _ATTR_RDONLY_NOSUID, 0, 0, 0)
    call = (_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    check("mount_setattr (Linux 5.12 or later)", _libc.syscall(*call))
    options = f"size={request['disk']},nr_inodes=1024,mode=700,uid={INNER_ID},gid={INNER_ID}"
    _mount("tmpfs", HOME, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    check("sethostname", _libc.sethostname(b"sandbox", 7))


def _readable(extra: list[str]) -> list[str]:
    """Returns the resolved paths of the readable folders and files, none inside another."""
    base = os.path.realpath(sys.base_prefix)
    system = [f"{base}/lib", f"{base}/{sys.platlibdir}", "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
    paths = {os.path.realpath(path) for path in (*system, *extra) if os.path.exists(path)}
    return [p for p in sorted(paths) if not any(p.startswith(f"{q}/") for q in paths)]


def _enter(request: dict[str, Any], status: int) -> None:
    os.setsid()
    os.chdir(HOME)
    _set_stdin(request["stdin"])
    _set_limits(request)
    _drop_privileges(request["groups"])
    prctl(PR_SET_THP_DISABLE, 1)
    deny(DENIED) if request["command"] is None else deny(COMMANDS, CHECKED)
    os.write(status, b"running\n")
    if ctypes.CDLL(None).syscall(_SYS_CLOSE_RANGE, 3, 0x7FFFFFFF, 0):  # before Linux 5.9
        os.closerange(3, 1 << 20)
    _run(request) if request["command"] is None else _execute_command(request)


def _set_stdin(data: bytes) -> None:
    sealed = hasattr(os, "memfd_create")
    if sealed:
        source = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        source = os.open("stdin", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with open(source, "wb", closefd=False) as file:
        file.write(data)
    if sealed:  # no limit counts what a memory file holds, so the code must not write to it
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(source, fcntl.F_ADD_SEALS, seals)
    os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)


def _set_limits(request: dict[str, Any]) -> None:
    for name, value in request["limits"].items():
        soft, hard = value if isinstance(value, tuple) else (value, value)
        limit = getattr(resource, f"RLIMIT_{name}")
        highest = resource.getrlimit(limit)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        try:
            resource.setrlimit(limit, (soft, hard))
        except ValueError as error:
            raise OSError(errno.EPERM, f"setrlimit {name} to {value}: {error}") from error


def _drop_privileges(groups: bool) -> None:
    if groups:
        os.setgroups([])
    os.setresgid(INNER_ID, INNER_ID, INNER_ID)
    for capability in range(64):
        if capability < 32 or _libc.prctl(_PR_CAPBSET_READ, ctypes.c_ulong(capability)) == 1:
            prctl(_PR_CAPBSET_DROP, capability)
    os.setresuid(INNER_ID, INNER_ID, INNER_ID)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    check("capset", _libc.capset(header, none))


def _run(request: dict[str, Any]) -> NoReturn:
    sys.path += request["readable"]
    sys.argv = ["code"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    import builtins

    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the module `site` would define them
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = 0
    try:
        _execute(request["code"], request["echo"], vars(main))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        _show(error, request["code"])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _execute_command(request: dict[str, Any]) -> NoReturn:
    command = request["command"]
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # Python ignores the first two
    try:
        os.execvpe(command[0], command, request["variables"])
    except OSError as error:
        os.write(2, f"{os.fsdecode(command[0])} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def _execute(source: str, echo: bool, scope: dict[str, Any]) -> None:
    only_ast = 0x400  # ast.PyCF_ONLY_AST, without the import of ast
    tree: Any = compile(source, "<code>", "exec", flags=only_ast, dont_inherit=True)
    body = tree.body
    if not (echo and body and type(body[-1]).__name__ == "Expr"):
        exec(compile(source, "<code>", "exec", dont_inherit=True), scope)
        return
    import ast

    last = ast.Interactive(body=[body.pop()])
    exec(compile(tree, "<code>", "exec", dont_inherit=True), scope)
    exec(compile(last, "<code>", "single", dont_inherit=True), scope)


def _show(error: BaseException, source: str) -> None:
    try:
        import linecache
        import traceback

        lines = source.splitlines(keepends=True)
        linecache.cache["<code>"] = (len(source), None, lines, "<code>")
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # out of memory, or the code replaced a module
        os.write(2, f"{type(error).__name__}\n".encode())


def _die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if t is None else os.fsencode(t) for t in (source, target, kind, options)]
    first, second, third, last = encoded
    name = f"mount of {kind or source or 'private'} on {target}"
    check(name, _libc.mount(first, second, third, ctypes.c_ulong(flags), last))
