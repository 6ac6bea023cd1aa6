"""Runs once inside the sandbox and prints `isolated`, or what was possible and must not be.

It makes one cheap check of each restriction, because some kernels report success for the system
calls of the set-up and do nothing. The attacks are in tests/sandbox/test_sandbox.py.
"""

import mmap
import os
import socket
from collections.abc import Callable


def possible(action: Callable[[], object]) -> bool:
    """Returns whether an action succeeds."""
    try:
        action()
    except (OSError, MemoryError):
        return False
    return True


def second_process() -> None:
    """Forks; the child exits at once."""
    if os.fork() == 0:
        os._exit(0)


def read_only(path: str) -> bool:
    """Returns whether the file system of a path is mounted read-only."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


found = {
    "it sees the host's processes": os.getpid() > 2 or os.path.exists("/proc/1"),
    "it is root": os.getuid() == 0 or os.geteuid() == 0,
    "it sees the host's files": any(map(os.path.exists, ("/etc", "/proc", "/sys", "/.host"))),
    "its libraries are writable": not all(map(read_only, ("/", os.path.dirname(os.__file__)))),
    "it writes outside its folder": possible(lambda: os.mkdir("/x"))
    or possible(lambda: os.mkdir(f"{os.path.dirname(os.__file__)}/x")),
    "it opens sockets": possible(lambda: socket.socket(socket.AF_UNIX))
    or possible(socket.socketpair),
    "it maps shared memory": possible(lambda: mmap.mmap(-1, 4096)),
    "it writes to its standard input": possible(lambda: os.pwrite(0, b"x", 0)),
    "it changes its own root": possible(lambda: os.chroot(".")),
    "it starts a second process": possible(second_process),
    "it exceeds its memory limit": possible(lambda: bytearray(1 << 30)),
    "it exceeds its limit on file sizes": possible(lambda: os.truncate(os.open("f", 65), 1 << 30)),
}
print("; ".join(what for what, true in found.items() if true) or "isolated")
