"""What must be impossible inside; runs there once and prints `isolated` or what was possible.

Not an attack suite (tests/test_sandbox.py is): one cheap look at each wall, so that a kernel which
agrees to everything and does nothing is not taken for a prison.
"""

import os
import socket
import sys
from collections.abc import Callable


def possible(action: Callable[[], object]) -> bool:
    """Whether an action goes through."""
    try:
        action()
    except (OSError, MemoryError):
        return False
    return True


def second_process() -> None:
    """Fork, and end the child at once."""
    if os.fork() == 0:
        os._exit(0)


def read_only(path: str) -> bool:
    """Whether the file system there refuses to be written."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


found = {
    "it sees the host's processes": os.getpid() > 2 or os.path.exists("/proc/1"),
    "it is root": os.getuid() == 0 or os.geteuid() == 0,
    "it sees the host's files": any(map(os.path.exists, ("/etc", "/proc", "/sys", "/.host"))),
    "its libraries can be written": not all(map(read_only, ("/", os.path.dirname(os.__file__)))),
    "it writes outside its folder": possible(lambda: os.mkdir("/x"))
    or possible(lambda: os.mkdir(f"{os.path.dirname(os.__file__)}/x")),
    "it opens sockets": possible(lambda: socket.socket(socket.AF_UNIX)),
    "it changes its own root": possible(lambda: os.chroot(".")),
    "it starts a second process": possible(second_process),
    "it takes more memory than it may": possible(lambda: bytearray(1 << 30)),
    "it writes too large a file": possible(lambda: os.truncate(os.open("f", 65), 1 << 30)),
}
print("; ".join(what for what, true in found.items() if true) or "isolated")
sys.exit(0)
