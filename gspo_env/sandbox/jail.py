"""The program that isolates itself and then runs untrusted Python; uses the standard library only.

It has three processes. The launcher enters new namespaces and waits. `init` is process 1 of the new
PID namespace; when it ends, the kernel kills every other process in it. Its child drops all
privileges and runs the code. If a step fails, the run stops before the code begins.

The status pipe carries `unshared`, then `running`, then `exit N` or `error WHY`.
"""

from __future__ import annotations

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

HOME = "/sandbox"
"""The private folder, the only one that the code can write to."""
INNER_ID = 1000
"""User and group id inside. Outside they map to an unused id, or to the user who runs this."""

_NAMESPACES = {
    "mnt": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_ALL_NAMESPACES = sum(_NAMESPACES.values())
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY_NOSUID = 2, -100, 0x8000, 3
_SYS_MOUNT_SETATTR = 442
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_SET_THP_DISABLE = 41

# The refused system calls with their numbers on (x86-64, arm64): those that could reach outside
# (sockets, other processes, mounts, programs), those that hold memory outside the limits (a pipe of
# spliced pages, memory files, queues, watches), and large parts of the kernel that calculations do
# not need.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _PIVOT_ROOT = (56, 220), (435, 435), (155, 41)
_MMAP, _PRCTL = (9, 222), (157, 167)
_DENIED = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "inotify_add_watch": (254, 27),
    "io_setup": (206, 0),
    "landlock_create_ruleset": (444, 444),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "syslog": (103, 116),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": _PIVOT_ROOT,
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
}

_libc = ctypes.CDLL(None, use_errno=True)


def deny(denied: dict[str, tuple[int, int]]) -> None:
    """Makes system calls fail with EPERM in this process and its descendants, irrevocably."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        known = " and ".join(_ARCHITECTURES)
        raise OSError(errno.ENOSYS, f"seccomp: the processor is {machine}; expected {known}")
    column, audit = _ARCHITECTURES[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000
    map_shared, map_anonymous = 1, 0x20
    program = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:  # the x32 numbering of the same calls
        program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for numbers in denied.values():
        program += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse | errno.EPERM)]
    # A mapping of 4 KiB could hold a huge page, or shared memory of which the rest is unmapped.
    program += [(equal, 0, 4, _MMAP[column]), (load, 0, 0, 40), (any_bit, 0, 2, map_anonymous)]
    program += [(any_bit, 0, 1, map_shared), (give, 0, 0, refuse | errno.EPERM), (load, 0, 0, 0)]
    program += [(equal, 0, 3, _PRCTL[column]), (load, 0, 0, 16)]
    program += [(equal, 0, 1, _PR_SET_THP_DISABLE), (give, 0, 0, refuse | errno.EPERM)]
    program += [(load, 0, 0, 0)]
    # ENOSYS makes the C library fall back to clone, whose flags a filter can read.
    program += [(equal, 0, 1, _CLONE3[column]), (give, 0, 0, refuse | errno.ENOSYS)]
    program += [(equal, 0, 3, _CLONE[column]), (load, 0, 0, 16)]
    program += [(any_bit, 0, 1, _ALL_NAMESPACES), (give, 0, 0, refuse | errno.EPERM)]
    program += [(give, 0, 0, allow)]
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in program))
    head = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    header = ctypes.create_string_buffer(head)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(header))


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
    names = {name: f"/proc/self/ns/{name}" for name in _NAMESPACES}
    names["pid"] += "_for_children"
    before = {name: os.stat(path).st_ino for name, path in names.items() if name != "pid"}
    _check("unshare of user, mount, PID and network namespaces", _libc.unshare(_ALL_NAMESPACES))
    for name, inode in before.items():  # some user-space kernels report success and do nothing
        if os.stat(names[name]).st_ino == inode:
            raise OSError(errno.ENOSYS, f"unshare did not make a new {name} namespace")


def _supervise(request: dict[str, Any], status: int) -> NoReturn:
    _end_with_parent(request)
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        _guarded(status, lambda: _init(request, status, alive))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    # Process 1 ends after every other process of its namespace, so nothing is left after this.
    os.waitpid(child, 0)
    os._exit(0)


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
    links = {name: os.readlink(name) for name in ("/lib", "/lib64") if os.path.islink(name)}
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp/.host")
    column = _ARCHITECTURES.get(os.uname().machine, (0, 0))[0]
    _check("pivot_root", _libc.syscall(_PIVOT_ROOT[column], b"/tmp", b"/tmp/.host"))
    os.chdir("/")
    for path in folders:
        os.makedirs(path)
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
    _check("umount2", _libc.umount2(b"/.host", _MNT_DETACH))
    os.rmdir("/.host")
    attributes = struct.pack("QQQQ", _ATTR_RDONLY_NOSUID, 0, 0, 0)
    call = (_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    _check("mount_setattr (Linux 5.12 or later)", _libc.syscall(*call))
    options = f"size={request['disk']},nr_inodes=1024,mode=700,uid={INNER_ID},gid={INNER_ID}"
    _mount("tmpfs", HOME, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    _check("sethostname", _libc.sethostname(b"sandbox", 7))


def _readable(extra: list[str]) -> list[str]:
    """Returns the resolved paths of the readable folders, none inside another."""
    base = os.path.realpath(sys.base_prefix)
    wanted = [f"{base}/lib", f"{base}/{sys.platlibdir}", "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
    found = {os.path.realpath(path) for path in (*wanted, *extra) if os.path.isdir(path)}
    return [p for p in sorted(found) if not any(p.startswith(f"{q}/") for q in found)]


def _enter(request: dict[str, Any], status: int) -> None:
    os.setsid()
    os.chdir(HOME)
    _set_stdin(request["stdin"])
    _set_limits(request)
    _drop_privileges(request["groups"])
    _prctl(_PR_SET_THP_DISABLE, 1)
    deny(_DENIED)
    os.write(status, b"running\n")
    os.closerange(3, 1 << 16)
    _run(request)


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
            _prctl(_PR_CAPBSET_DROP, capability)
    os.setresuid(INNER_ID, INNER_ID, INNER_ID)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check("capset", _libc.capset(header, none))


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
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    _check(f"prctl({option})", _libc.prctl(option, *padded))


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if t is None else os.fsencode(t) for t in (source, target, kind, options)]
    first, second, third, last = encoded
    name = f"mount of {kind or source or 'private'} on {target}"
    _check(name, _libc.mount(first, second, third, ctypes.c_ulong(flags), last))


def _check(name: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
