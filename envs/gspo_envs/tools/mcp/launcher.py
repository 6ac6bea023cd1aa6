"""Runs the command of an MCP server; uses the standard library only.

It ends the server when the trainer dies, however it dies, and bounds what the server sends: length
and values of a message, messages a second, and what is kept of standard error, which is a file.
Started with `python -I -S`, the process id of the trainer, the limit in bytes, the file of
`gspo_env.runtime.processes` and the command.
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

_MESSAGES = 1000
"""Messages a second; a server that sends more has to wait."""
MOST_VALUES = 200_000
"""Values of a message; one of two bytes takes a hundred times as many in memory."""
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[{,"))
_KEPT = 1 << 16
"""Bytes of standard error after which the file begins anew."""
_PR_SET_PDEATHSIG = 1
_GRACE = 1.0
"""Seconds that a server has after SIGTERM; the client kills the launcher after 2."""
_runtime: dict[str, Any] = {}
"""The functions of `gspo_env.runtime.processes`, which cannot be imported with `-I -S`."""


class Structure:
    """Counts the values of a line of JSON that comes in parts."""

    def __init__(self) -> None:
        self._inside, self._tail = False, b""

    def values(self, part: bytes) -> int:
        """Returns the number of values that begin in the next part."""
        part = self._tail + part
        self._tail = b"\\" if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""
        pieces = re.sub(rb"\\.", b"", part[: len(part) - len(self._tail)]).split(b'"')
        outside = b"".join(pieces[self._inside :: 2])
        self._inside ^= len(pieces) % 2 == 0
        return len(outside.translate(None, _NO_STRUCTURE))


def main() -> NoReturn:
    """Starts the server, forwards its output and exits with its exit code."""
    parent, limit, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    _runtime.update(runpy.run_path(sys.argv[3]))
    _runtime["adopt_descendants"]()
    for number in (signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, lambda *_: _kill_group())
    # sent to the group: the server decides, until shortly before the client kills this process
    signal.signal(signal.SIGTERM, lambda *_: _kill_later())
    _die_with_parent(signal.SIGUSR1)
    if os.getppid() != parent:
        os._exit(1)
    try:
        server = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: _die_with_parent(signal.SIGKILL),
        )
    except (OSError, ValueError) as error:
        os.write(2, str(error).encode("utf-8", "replace"))
        os._exit(127)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # or a server that exits would not close the pipe
    code = _forward(server, limit)
    _runtime["kill_descendants"]()
    os._exit(code & 0xFF)


def _forward(server: subprocess.Popen[bytes], limit: int) -> int:
    """Copies both streams until the server has ended; returns its exit code."""
    assert server.stdout is not None
    assert server.stderr is not None
    out, err = server.stdout.fileno(), server.stderr.fileno()
    open_ends, line, values, structure = {out, err}, 0, 0, Structure()
    while open_ends:
        ready = select.select(open_ends, [], [], 1.0)[0]
        if not ready and server.poll() is not None:
            break  # another process holds the pipe open
        for end in ready:
            data = os.read(end, 1 << 16)
            if not data:
                open_ends.discard(end)
            elif end == err:
                _note(data)
            else:
                for n, part in enumerate(data.split(b"\n")):
                    if n:
                        line, values, structure = 0, 0, Structure()
                    line, values = line + len(part), values + structure.values(part)
                    if line > limit or values > MOST_VALUES:
                        _note(
                            b"a message has more than %d bytes or %d values" % (limit, MOST_VALUES)
                        )
                        _kill_group()
                _write(data)
                time.sleep(data.count(b"\n") / _MESSAGES)
    return server.wait()


def _note(data: bytes) -> None:
    """Appends to standard error, of which the last part is kept."""
    if os.lseek(2, 0, os.SEEK_CUR) + len(data) > _KEPT:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
    os.write(2, data)


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        _kill_group()


def _kill_later() -> None:
    signal.setitimer(signal.ITIMER_REAL, _GRACE)


def _kill_group() -> NoReturn:
    """Kills the server and what it started; the group was made for this process."""
    _runtime["kill_descendants"]()
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _die_with_parent(number: int) -> None:
    """Asks Linux for a signal at the end of the parent; elsewhere a closed input must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


if __name__ == "__main__":
    main()
