"""What a run records on disk, from which every tracker is fed.

`metrics.jsonl` has a line for each call of `log`: the step, the time in milliseconds since 1970 and
the metrics. `tracking/calls.jsonl` has a line for every other call: a text, a file, an input, a
trace or the end of the run. `tracking/run.json` describes the run, and `tracking/NAME.json` holds
how much of both files the tracker NAME has received.

A run that is resumed cuts both files to what its checkpoint has, since it records the later steps
again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Generic, Literal, TypeVar

from gspo_env.errors import DAMAGE, OutputError, raised_as
from gspo_env.files import METRICS, left_out, plain_path, read_file, write_file
from gspo_env.tracking.base import Point, RunInfo

_log = logging.getLogger(__name__)

T = TypeVar("T")

CALLS, DESCRIPTION = "tracking/calls.jsonl", "tracking/run.json"
"""Names of files in the folder of a run."""

_MOST_BYTES = 1 << 24
"""Maximum size of the files that describe a run and what a tracker has received."""
_LONGEST_FILE = 1 << 30
"""Maximum size of a file of JSON lines."""
_DESCRIBED = ("name", "key", "started", "params", "tags")
"""The fields of a run's description."""


class JsonlFile(Generic[T]):
    """A file of JSON lines that only grows.

    What cannot be written, for example because the disk is full, waits in memory and is written
    before the next line.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        record: Callable[..., T],
        *,
        size: int | None = None,
        private: bool = False,
    ) -> None:
        """Opens the file; an incomplete last line is cut off.

        Args:
            folder: The folder of the run.
            name: The file in it.
            record: Makes a record of the fields of a line.
            size: The bytes to keep; None keeps all.
            private: Whether only its owner can read it.

        Raises:
            OutputError: The file cannot be written.
        """
        self._record, self._unwritten = record, b""
        self._lock = threading.Lock()
        mode = 0o600 if private else 0o666
        with _writing(folder / name):
            self.path = plain_path(folder, name)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
            data = read_file(folder, name, _LONGEST_FILE)
            self.size = data[:size].rfind(b"\n") + 1
            self.cut = [self._read(line) for line in data[self.size :].splitlines()]
            """The records that are cut off; None for a damaged line."""
            os.ftruncate(self._file, self.size)

    @property
    def unwritten(self) -> int:
        """Number of lines that wait in memory."""
        return self._unwritten.count(b"\n")

    def append(self, **fields: Any) -> None:
        """Writes a line; half a character, which no store takes, becomes a question mark.

        Raises:
            OSError: It could not be written completely; the next call continues there.
        """
        line = (json.dumps(_encodable(fields), separators=(",", ":")) + "\n").encode()
        with self._lock:
            self.size += len(line)
            self._unwritten += line
            while self._unwritten:
                written = os.write(self._file, self._unwritten)
                self._unwritten = self._unwritten[written:]

    def read(self, offset: int = 0) -> Iterator[tuple[int, T]]:
        """Yields the records from a byte on, each with the byte at which the next one begins.

        Damaged lines, for example after a power failure, are skipped.
        """
        with self.path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                if (record := self._read(line)) is not None:
                    yield offset, record
                else:
                    _log.warning("%s: a damaged line is skipped: %r", self.path, line[:80])

    def _read(self, line: bytes) -> T | None:
        try:
            return self._record(**json.loads(line))
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            return None

    def close(self) -> None:
        """Closes the file for writing."""
        os.close(self._file)


CallName = Literal["text", "artifact", "input", "trace", "finish"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a tracker.

    Example:
        Call(name="text", arguments={"name": "score.txt", "text": "sum"})
    """

    name: CallName
    arguments: Mapping[str, Any]


def _encodable(tree: Any) -> Any:
    """Returns JSON without lone surrogates."""
    return json.loads(json.dumps(tree, default=str, ensure_ascii=False).encode(errors="replace"))


def _point(*, step: Any, time: Any, metrics: dict[str, Any]) -> Point:
    values = {str(name): float(value) for name, value in dict(metrics).items()}
    return Point(step=int(step), time=int(time), metrics=values)


def _call(*, name: CallName, arguments: dict[str, Any]) -> Call:
    place = PurePath(str(arguments.get("name" if name == "text" else "folder", "")))
    if place.is_absolute() or ".." in place.parts:
        raise ValueError(f"{str(place)!r} leaves the artifacts of the run")
    return Call(name=name, arguments=dict(arguments))


@dataclass(kw_only=True, slots=True)
class Received:
    """How much of a run's files a tracker has received; kept in a file of its own."""

    id: str = ""
    """The tracker's id of the run."""
    address: str = ""
    """The address of the tracker's store, without secrets."""
    metrics: int = 0
    """Bytes of `metrics.jsonl`."""
    calls: int = 0
    """Bytes of `tracking/calls.jsonl`."""

    @classmethod
    def load(cls, folder: Path, name: str) -> Received:
        """Reads what the tracker `name` has received of the run in `folder`."""
        file = _received_name(name)
        with left_out(folder / file, then=f"everything is sent again to {name}"):
            tree = json.loads(read_file(folder, file, _MOST_BYTES))
            metrics, calls = max(0, int(tree["metrics"])), max(0, int(tree["calls"]))
            names = {name: str(tree[name]) for name in ("id", "address")}
            return cls(**names, metrics=metrics, calls=calls)
        return cls()

    def save(self, folder: Path, name: str) -> None:
        """Writes the file."""
        _write_json(folder, _received_name(name), asdict(self))

    def is_complete(self, folder: Path) -> bool:
        """Whether the tracker has received everything in the folder of a run."""
        sizes = ((folder / METRICS, self.metrics), (folder / CALLS, self.calls))
        return all(not path.exists() or path.stat().st_size <= size for path, size in sizes)


def _received_name(tracker: str) -> str:
    return f"tracking/{re.sub(r'[^A-Za-z0-9]+', '_', tracker)}.json"


class RunFiles:
    """The files of a run: its metrics, and, if it is tracked, its description and other calls."""

    def __init__(self, run: RunInfo, *, tracked: bool) -> None:
        """Opens the files.

        Raises:
            OutputError: A file cannot be written, is damaged or belongs to another run.
        """
        self.folder = run.folder.absolute()  # an environment may change the working folder
        sizes = run.resume or {}
        self._metrics = JsonlFile(self.folder, METRICS, _point, size=sizes.get("metrics"))
        if self._metrics.size and run.resume is None:
            raise OutputError(
                f"{str(run.folder / METRICS)!r} has the metrics of another run; expected a new "
                "folder, or the run to be resumed"
            )
        self._calls: JsonlFile[Call] | None = None
        if tracked:
            size = sizes.get("calls")
            self._calls = JsonlFile(self.folder, CALLS, _call, size=size, private=True)
        repeats = min((point.step for point in self._metrics.cut if point), default=None)
        self.run = replace(self._describe(run) if tracked else run, repeats=repeats)
        self._outside: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes the metrics of a step.

        Raises:
            OSError: The line could not be written; it waits in memory.
        """
        self._metrics.append(step=step, time=int(time.time() * 1000), metrics=metrics)

    def add(self, name: str, /, **arguments: Any) -> None:
        """Writes another call; errors as in `log`."""
        if self._calls is not None:
            self._calls.append(name=name, arguments=arguments)

    def add_artifact(self, path: Path, folder: str) -> None:
        """Writes the call for a file or a folder; errors as in `log`."""
        path = path.absolute()
        if path.is_relative_to(self.folder):
            path = path.relative_to(self.folder)
        else:
            self._outside.add(str(path))
        self.add("artifact", path=str(path), folder=folder)

    def locate(self, path: str) -> tuple[Path, int]:
        """Returns the absolute path of an artifact, and its bytes.

        Raises:
            OutputError: This process did not add it, and it is not in the folder of the run or has
                a link.
        """
        place = self.folder / path
        files = [place, *place.rglob("*")] if place.is_dir() else [place]
        if path not in self._outside:
            problem = f"{path!r} is not in the folder of the run"
            with raised_as(OutputError, problem, OSError, ValueError, reason=str):
                for file in files:
                    plain_path(self.folder, file.relative_to(self.folder))
        return place, sum(file.stat().st_size for file in files)

    def read_points(self, offset: int) -> Iterator[tuple[int, Point]]:
        """Yields the points from a byte on, each with the byte at which the next one begins."""
        return self._metrics.read(offset)

    def read_calls(self, offset: int) -> Iterator[tuple[int, Call]]:
        """Yields the calls from a byte on, each with the byte at which the next one begins."""
        return iter(()) if self._calls is None else self._calls.read(offset)

    def received(self, name: str) -> Received:
        """Returns what the tracker `name` has received of the lines that are still in the files."""
        received = Received.load(self.folder, name)
        received.metrics = min(received.metrics, self.sizes["metrics"])
        received.calls = min(received.calls, self.sizes["calls"])
        return received

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of what was recorded so far, for `RunInfo.resume`."""
        return {"metrics": self._metrics.size, "calls": self._calls.size if self._calls else 0}

    @property
    def unwritten(self) -> int:
        """Number of lines that wait in memory."""
        return self._metrics.unwritten + (self._calls.unwritten if self._calls else 0)

    def close(self) -> None:
        """Closes the files for writing."""
        self._metrics.close()
        if self._calls is not None:
            self._calls.close()

    def _describe(self, run: RunInfo) -> RunInfo:
        """Writes the description of a new run, or reads that of a resumed one."""
        path = self.folder / DESCRIPTION
        if not path.exists():
            tree = _encodable({name: getattr(run, name) for name in _DESCRIBED})
            _write_json(self.folder, DESCRIPTION, tree)
            return replace(run, **tree)
        causes = OSError, *DAMAGE
        with raised_as(OutputError, f"{str(path)!r} is damaged", *causes, mend="; remove it"):
            tree = _encodable(json.loads(read_file(self.folder, DESCRIPTION, _MOST_BYTES)))
            return replace(run, **{name: tree[name] for name in _DESCRIBED})


def _write_json(folder: Path, name: str, tree: object) -> None:
    """Writes a file that only its owner can read, all or nothing."""

    def write(path: Path) -> None:
        path.touch(0o600)
        path.write_text(json.dumps(tree, default=str))

    with _writing(folder / name):
        write_file(folder, name, write)


def _writing(path: Path) -> raised_as:
    mend = "; expected a folder that can be written, named with --output"
    return raised_as(OutputError, f"cannot write {str(path)!r}", OSError, mend=mend)
