"""What a run records on disk; trackers are fed from it.

`metrics.jsonl` has a line for each call of `log`: the step, the time in milliseconds since 1970 and
the metrics. `tracking/files.jsonl` has one for each text, each file or folder, and the end of the
run, `tracking/traces.jsonl` has one for each trace, `tracking/run.json` describes the run, and
`tracking/NAME.json` is the place in these files up to which the tracker NAME has received them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gspo_env.errors import OutputError
from gspo_env.tracking.base import Input, Point, RunInfo, Status
from gspo_env.tracking.traces import Trace, read_trace

_log = logging.getLogger(__name__)

T = TypeVar("T")

METRICS = "metrics.jsonl"
"""Name of the file in the run's folder."""
FOLDER = "tracking"
"""Name of the folder of everything else."""

_MOST_WAITING = 1 << 26
"""Maximum number of bytes that wait in memory for a disk that is full."""


class JsonlFile:
    """A file of JSON lines that is only appended to.

    A line that cannot be written, for example because the disk is full, waits in memory and is
    written before the next one.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        """Opens the file; a last line that was not written to its end is cut off.

        Args:
            path: The file.
            private: Whether only its owner can read it.

        Raises:
            OutputError: The file cannot be written.
        """
        self.path = path
        self._lost = 0
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        mode = 0o600 if private else 0o666
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
            self.size = _whole_lines(self._file)
            os.ftruncate(self._file, self.size)
        except OSError as error:
            raise OutputError(
                f"cannot write {str(path)!r}: {error.strerror}; expected a folder that can be "
                "written, named with --output"
            ) from error

    @property
    def missing(self) -> int:
        """Number of lines that could not be written."""
        return len(self._waiting) + self._lost

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a line.

        Raises:
            OSError: It could not be written; it is kept for the next call.
        """
        with self._lock:
            while sum(map(len, self._waiting)) > _MOST_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append((json.dumps(record, separators=(",", ":")) + "\n").encode())
            self._write()

    def sync(self) -> None:
        """Makes the operating system write the file to the disk."""
        with self.path.open("rb") as file:
            os.fsync(file)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def read(
        self, make: Callable[..., T], offset: int, end: int | None = None
    ) -> Iterator[tuple[int, T]]:
        """Yields the records between two bytes, each with the byte at which the next one begins.

        A line that is no record, for example after a power failure, is left out.

        Args:
            make: Makes a record of a line's fields.
            offset: 0, or the end of a record.
            end: The size of the file by default.
        """
        end = self.size if end is None else min(end, self.size)
        with self.path.open("rb") as file:
            file.seek(offset)
            while offset < end:
                line = file.readline()
                offset += len(line)
                try:
                    record = make(**json.loads(line))
                except (ValueError, TypeError):
                    _log.warning("%s: a line is damaged and left out: %r", self.path, line[:80])
                else:
                    yield offset, record

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A text, a file, a folder, an input, or the end of the run."""

    after: int
    """Bytes of `metrics.jsonl` that were written before it."""
    time: int
    """When it happened, in milliseconds since 1970."""
    name: str = ""
    """Name of a text."""
    text: str = ""
    path: str = ""
    """A file or a folder; relative paths are in the run's folder."""
    folder: str = ""
    """The artifact folder of `path`."""
    input: Mapping[str, Any] | None = None
    """The fields of an `Input`."""
    status: Status | None = None
    reason: str = ""


class Journal:
    """The record of a run on disk."""

    def __init__(self, run: RunInfo, *, files: bool, traces: bool = False) -> None:
        """Opens the files in a run's folder.

        Args:
            run: The run; it goes on where it stopped if its `resume` is not empty.
            files: Whether a tracker reads the texts and files.
            traces: Whether a tracker reads traces.

        Raises:
            OutputError: A file cannot be written, or belongs to another run.
        """
        # An environment may change the working folder.
        self.folder = run.folder.absolute()
        self.metrics = JsonlFile(self.folder / METRICS)
        if self.metrics.size and not run.resume:
            raise OutputError(
                f"{str(run.folder / METRICS)!r} has the metrics of another run; expected a new "
                "folder, or the run to be resumed"
            )
        self._known: dict[int, set[str]] = {}
        for _, point in self.points(0):
            self._known.setdefault(point.step, set()).update(point.metrics)
        self.files: JsonlFile | None = None
        if files:
            self.files = JsonlFile(self.folder / FOLDER / "files.jsonl", private=True)
        self._traces: JsonlFile | None = None
        if traces:
            self._traces = JsonlFile(self.folder / FOLDER / "traces.jsonl", private=True)
        self._traced = {trace.key for _, trace in self.traces(0)}
        self._outside: set[str] = set()
        self.run = self._describe(run) if files else run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes the metrics of a step that no earlier part of the run recorded.

        Raises:
            OSError: They could not be written; they are kept for the next call.
        """
        known = self._known.get(step, ())
        new = {name: value for name, value in metrics.items() if name not in known}
        if new:
            self.metrics.append({"step": step, "time": _now(), "metrics": new})

    def text(self, name: str, text: str) -> None:
        """Notes a text; errors as in `log`."""
        self._note(name=name, text=text)

    def artifact(self, path: Path, folder: str) -> None:
        """Notes a file or a folder; errors as in `log`."""
        path = path.absolute()
        if path.is_relative_to(self.folder):
            path = path.relative_to(self.folder)
        else:
            self._outside.add(str(path))
        self._note(path=str(path), folder=folder)

    def input(self, source: Input) -> None:
        """Notes an input of the run; errors as in `log`."""
        self._note(input=asdict(source))

    def trace(self, trace: Trace) -> None:
        """Writes a trace that no earlier part of the run wrote; errors as in `log`."""
        if self._traces is not None and trace.key not in self._traced:
            self._traced.add(trace.key)
            self._traces.append(asdict(trace))

    def end(self, status: Status, reason: str) -> None:
        """Notes the end of the run; errors as in `log`."""
        self._note(status=status, reason=reason)

    def points(self, offset: int, end: int | None = None) -> Iterator[tuple[int, Point]]:
        """Returns the points from a byte on, each with the byte at which the next one begins."""
        return self.metrics.read(Point, offset, end)

    def events(self, offset: int) -> Iterator[tuple[int, Event]]:
        """Returns the events from a byte on, each with the byte at which the next one begins."""
        return iter(()) if self.files is None else self.files.read(Event, offset)

    def traces(self, offset: int) -> Iterator[tuple[int, Trace]]:
        """Returns the traces from a byte on, each with the byte at which the next one begins."""
        return iter(()) if self._traces is None else self._traces.read(read_trace, offset)

    def find(self, path: str) -> Path:
        """Returns the place of an event's file.

        Raises:
            OutputError: It is not in the run's folder, and this process did not name it.
        """
        found = self.folder / path
        if path not in self._outside and not found.resolve().is_relative_to(self.folder.resolve()):
            raise OutputError(f"{path!r} is not in the folder of the run")
        return found

    @property
    def traces_size(self) -> int:
        """Bytes of the traces."""
        return 0 if self._traces is None else self._traces.size

    @property
    def missing(self) -> int:
        """Number of lines that could not be written."""
        return sum(lines.missing for lines in self._lines)

    def close(self) -> None:
        """Closes the files for writing."""
        for lines in self._lines:
            lines.close()

    @property
    def _lines(self) -> list[JsonlFile]:
        return [each for each in (self.metrics, self.files, self._traces) if each is not None]

    def _note(self, **event: Any) -> None:
        if self.files is not None:
            self.files.append({"after": self.metrics.size, "time": _now(), **event})

    def _describe(self, run: RunInfo) -> RunInfo:
        """Writes what the run is, or reads it if the run goes on."""
        note = self.folder / FOLDER / "run.json"
        if note.exists():
            try:
                return replace(run, **json.loads(note.read_text()))
            except (ValueError, TypeError) as error:
                raise OutputError(f"{str(note)!r} is damaged ({error}); remove it") from error
        known = {"name": run.name, "key": run.key, "started": run.started}
        write_atomically(note, {**known, "params": run.params, "tags": run.tags})
        return run


def write_atomically(path: Path, tree: object) -> None:
    """Writes a JSON file that only its owner can read, all or nothing."""
    part = path.with_name(f"{path.name}.part")
    with open(part, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(tree, file, default=str)
    part.replace(path)


def _now() -> int:
    return int(time.time() * 1000)
