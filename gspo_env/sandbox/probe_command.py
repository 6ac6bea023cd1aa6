"""Runs once as a command in the sandbox; prints `isolated`, or what was possible and must not be.

It makes one cheap check of each way out that commands have beside those of code, which `probe.py`
checks. The attacks are in tests/sandbox/test_commands.py.
"""

import os
import socket
from collections.abc import Callable


def possible(action: Callable[..., object], *arguments: object) -> bool:
    """Returns whether a call succeeds."""
    try:
        action(*arguments)
    except OSError:
        return False
    return True


kinds = [
    (family, kind)
    for family in range(1, 45)
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
    if (family, kind) != (socket.AF_INET, socket.SOCK_STREAM)
]
pairs = (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
outside = [("192.0.2.1", 80), ("10.0.0.1", 80), ("169.254.169.254", 80)]
found = {
    "it sees the host's processes": os.getpid() > 2 or os.path.exists("/proc/1"),
    "it is root": os.getuid() == 0 or os.geteuid() == 0,
    "it sees the host's files": any(map(os.path.exists, ("/etc", "/proc", "/sys", "/.host"))),
    "it opens other sockets": any(possible(socket.socket, *kind) for kind in kinds),
    "it opens pairs of datagram sockets": any(
        possible(socket.socketpair, socket.AF_UNIX, kind) for kind in pairs
    ),
    "it has a route": any(possible(socket.create_connection, a, 1) for a in outside),
    "it sees other interfaces": {name for _, name in socket.if_nameindex()} > {"lo"}
    if possible(socket.if_nameindex)
    else False,
    "it has no loopback": not possible(socket.create_connection, ("127.0.0.1", 8000), 5),
    "it exceeds its limit on file sizes": possible(lambda: os.truncate(os.open("f", 65), 1 << 30)),
}
print("; ".join(what for what, true in found.items() if true) or "isolated")
