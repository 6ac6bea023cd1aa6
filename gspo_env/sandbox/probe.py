"""Runs once inside the sandbox; prints `isolated`, or what was possible and must not be.

It runs as code, and as a command, which has `-` as its first argument. It makes one cheap check of
each restriction, because some kernels report success for the system calls of the set-up and do
nothing. The attacks are in tests/sandbox/.
"""

import mmap
import os
import socket
import sys
from collections.abc import Callable


def possible(action: Callable[..., object], *arguments: object) -> bool:
    """Returns whether a call succeeds."""
    try:
        action(*arguments)
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


def of_code() -> dict[str, bool]:
    """Checks what only commands may do."""
    libraries = os.path.dirname(os.__file__)
    return {
        "its libraries are writable": not all(map(read_only, ("/", libraries))),
        "it writes outside its folder": possible(os.mkdir, "/x")
        or possible(os.mkdir, f"{libraries}/x"),
        "it opens sockets": possible(socket.socket, socket.AF_UNIX) or possible(socket.socketpair),
        "it maps shared memory": possible(mmap.mmap, -1, 4096),
        "it writes to its standard input": possible(os.pwrite, 0, b"x", 0),
        "it changes its own root": possible(os.chroot, "."),
        "it starts a second process": possible(second_process),
        "it exceeds its memory limit": possible(bytearray, 1 << 30),
    }


def of_command() -> dict[str, bool]:
    """Checks the ways out that commands have beside those of code."""
    types = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
    kinds = {(family, kind) for family in range(1, 45) for kind in types}
    kinds.remove((socket.AF_INET, socket.SOCK_STREAM))
    pairs = [(socket.AF_UNIX, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)]
    outside = [("192.0.2.1", 80), ("10.0.0.1", 80), ("169.254.169.254", 80)]
    return {
        "it opens other sockets": any(possible(socket.socket, *kind) for kind in kinds),
        "it opens pairs of datagram sockets": any(possible(socket.socketpair, *p) for p in pairs),
        "it has a route": any(possible(socket.create_connection, a, 1) for a in outside),
        "it sees other interfaces": possible(socket.if_nameindex)
        and {name for _, name in socket.if_nameindex()} > {"lo"},
        "it has no loopback": not possible(socket.create_connection, ("127.0.0.1", 8000), 5),
    }


def failures() -> list[str]:
    """Returns what was possible and must not be."""
    checks = {
        "it sees the host's processes": os.getpid() > 2 or os.path.exists("/proc/1"),
        "it is root": os.getuid() == 0 or os.geteuid() == 0,
        "it sees the host's files": any(map(os.path.exists, ("/etc", "/proc", "/sys", "/.host"))),
        "it exceeds its limit on file sizes": possible(
            lambda: os.truncate(os.open("f", 65), 1 << 30)
        ),
        **(of_command() if sys.argv[0] == "-" else of_code()),
    }
    return [what for what, true in checks.items() if true]


if __name__ == "__main__":
    print("; ".join(failures()) or "isolated")
