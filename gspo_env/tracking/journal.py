"""The record of a run's metrics on disk, from which trackers are fed.

`metrics.jsonl` has a line for each call of `log`: the step, the time in milliseconds since 1970 and
the metrics. What a run that goes on recorded before is not recorded again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_env.errors import OutputError

METRICS = "metrics.jsonl"
"""Name of the file in the run's folder."""

_KEPT = 10_000
"""Maximum number of lines that wait in memory for a disk that is full."""


class Lines:
    """A file of JSON lines that is only appended to.

    A line that cannot be written, for example because the disk is full, waits in memory and is
    written before the next one.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file; a last line that was not written to its end is cut off.

        Raises:
            OutputError: The file cannot be written.
        """
        self.path = path
        self.lost = 0
        """Lines that were dropped, because too many waited for the disk."""
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self.size = _whole_lines(self._file)
            os.ftruncate(self._file, self.size)
        except OSError as error:
            raise OutputError(
                f"cannot write {str(path)!r}: {error.strerror}; expected a folder that can be "
                "written, named with --output"
            ) from error

    @property
    def waiting(self) -> int:
        """Lines that are not on disk."""
        return len(self._waiting) + self.lost

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a line.

        Raises:
            OSError: It could not be written; it is kept for the next call.
        """
        with self._lock:
            if len(self._waiting) >= _KEPT:
                self._waiting.popleft()
                self.lost += 1
            self._waiting.append((json.dumps(record, separators=(",", ":")) + "\n").encode())
            self._write()

    def flush(self) -> None:
        """Writes the lines that wait in memory.

        Raises:
            OSError: They still cannot be written.
        """
        with self._lock:
            self._write()

    def sync(self) -> None:
        """Makes the operating system write the file to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def read(self, offset: int, most: int = 1 << 20) -> list[tuple[int, Any]]:
        """Returns the records from a byte on, each with the byte at which the next one begins.

        Args:
            offset: Where to begin: 0, or the end of a record.
            most: About how many bytes to read; at least one record is returned, if there is one.
        """
        found: list[tuple[int, Any]] = []
        with self.path.open("rb") as file:
            file.seek(offset)
            while offset < self.size and most > 0:
                line = file.readline()
                offset, most = offset + len(line), most - len(line)
                found.append((offset, json.loads(line)))
        return found

    def _write(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            try:
                written = os.write(self._file, line)
                if written < len(line):
                    os.write(self._file, line[written:])
            except OSError:
                os.ftruncate(self._file, self.size)
                raise
            self.size += len(line)
            self._waiting.popleft()


def _whole_lines(file: int) -> int:
    """Returns the size of a file without a last line that has no end."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - (1 << 16))
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class Journal:
    """The metrics of a run on disk."""

    def __init__(self, folder: Path, *, resumed: bool = False) -> None:
        """Opens the files in a run's folder.

        Args:
            folder: The run's folder.
            resumed: Whether the run goes on that recorded into this folder before.

        Raises:
            OutputError: A file cannot be written, or belongs to another run.
        """
        self.metrics = Lines(folder / METRICS)
        self._known: dict[int, set[str]] = {}
        if self.metrics.size and not resumed:
            raise OutputError(
                f"{str(folder / METRICS)!r} has the metrics of another run; expected a new folder"
            )
        offset = 0
        while records := self.metrics.read(offset):
            for offset, line in records:  # noqa: B007 - the next block begins after the last one
                self._known.setdefault(line["step"], set()).update(line["metrics"])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes the metrics of a step that no earlier part of the run recorded.

        Raises:
            OSError: They could not be written; they are kept for the next call.
        """
        known = self._known.get(step, ())
        new = {name: value for name, value in metrics.items() if name not in known}
        if new:
            now = int(time.time() * 1000)
            self.metrics.append({"step": step, "time": now, "metrics": new})
