"""Runs the command of a program; uses the standard library and `runtime/processes.py` only.

It ends the command with all of its descendants when the trainer asks for it or dies, however it
dies, and when the command itself ends. It keeps the ends of both output streams and reports them
with the exit code as one JSON object on its standard output. Started with `python -I -S`, the
folder of `processes.py`, the process id of the trainer, the seconds between SIGTERM and SIGKILL and
the command. Standard input brings the length of the program's input, a line feed, and this input;
its end or another byte is the request to end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, NoReturn

_KEPT = 1 << 16
"""Bytes that are kept of the end of each output stream."""
_LOOK = 5.0
"""Seconds between two looks whether the trainer still lives, beside the end of the pipe."""
_POLL = 0.05
"""Seconds between two looks at the command where the system has no `pidfd_open`."""


def main() -> NoReturn:
    """Runs the command and reports its end."""
    folder, parent, grace, command = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    sys.path.append(folder)
    import processes  # type: ignore[import-not-found,unused-ignore]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the trainer decides; the command gets the default
    processes.adopt_descendants()
    own = os.getpid()
    try:
        process = subprocess.Popen(
            command,
            stdin=_read_input(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=(lambda: processes.die_with_parent(own)) if _is_linux() else None,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _report(127, b"", f"{command[0]} cannot be started: {error}".encode())
        os._exit(1)
    streams = _Streams(process)
    code = process.returncode if streams.follow(parent) else None
    _report(code, streams.end("stdout"), streams.end("stderr"))
    processes.end_descendants(process.pid, grace)  # the episode need not wait for what it left
    os._exit(0)


def _is_linux() -> bool:
    return sys.platform == "linux"


def _read_input() -> IO[bytes]:
    """Reads the program's input from standard input, of which the end is left for later."""
    digits = b""
    while not digits.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            os._exit(1)
        digits += byte
    left = int(digits)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the command reads it
    while left:
        if not (data := os.read(0, min(left, 1 << 16))):
            os._exit(1)
        file.write(data)
        left -= len(data)
    file.seek(0)
    return file


def _report(code: int | None, stdout: bytes, stderr: bytes) -> None:
    told = {
        "code": code,
        "stdout": stdout.decode("utf-8", "replace"),
        "stderr": stderr.decode("utf-8", "replace"),
    }
    data = json.dumps(told).encode()
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(1, data) :]
        os.close(1)


class _Streams:
    """Both output streams of a process, of which the ends are kept."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.kept: dict[int, bytearray] = {}
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self.kept[stream.fileno()] = bytearray()
        self.open_ends = set(self.kept)

    def follow(self, parent: int) -> bool:
        """Reads until the command ends; returns False if the trainer asked for the end or died."""
        with contextlib.suppress(AttributeError, OSError):  # before Linux 5.3, and elsewhere
            return self._wait(parent, os.pidfd_open(self.process.pid), _LOOK)
        return self._wait(parent, None, _POLL)

    def _wait(self, parent: int, watched: int | None, pause: float) -> bool:
        looked = time.monotonic()
        while True:
            sources = [0, *self.open_ends, *([] if watched is None else [watched])]
            ready = select.select(sources, [], [], pause)[0]
            if 0 in ready:
                return False
            for end in self.open_ends & set(ready):
                self._read(end)
            if (watched in ready or not ready) and self.process.poll() is not None:
                return True
            if time.monotonic() - looked > _LOOK:
                looked = time.monotonic()
                if os.getppid() != parent:
                    return False

    def _read(self, end: int) -> bool:
        """Reads what is there; returns whether there may be more."""
        try:
            data = os.read(end, 1 << 16)
        except BlockingIOError:
            return False
        kept = self.kept[end]
        kept += data
        del kept[:-_KEPT]
        if not data:
            self.open_ends.discard(end)
        return bool(data)

    def end(self, name: str) -> bytes:
        """Returns the end of a stream, which other processes may still hold open."""
        stream: Any = getattr(self.process, name)
        left = 1 << 10  # a descendant that escaped must not hold up the report
        while stream.fileno() in self.open_ends and left and self._read(stream.fileno()):
            left -= 1
        return bytes(self.kept[stream.fileno()])


if __name__ == "__main__":
    main()
