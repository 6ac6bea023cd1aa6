"""What a run records on disk, and the queue that feeds one tracker from it.

`metrics.jsonl` has a line for each call of `log`: the step, the time in milliseconds since 1970 and
the metrics. `tracking/calls.jsonl` has a line for every other call: a text, a file, an input, a
trace or the end of the run. `tracking/run.json` describes the run, and `tracking/NAME.json` holds
how much of both files the tracker NAME has received.
"""

from __future__ import annotations

import heapq
import inspect
import json
import logging
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from gspo_env.errors import OutputError
from gspo_env.files import plain_path, read_file, write_file
from gspo_env.redaction import redact_text
from gspo_env.tracking.base import Input, Point, Repeatable, RunInfo, Status, Tracker
from gspo_env.tracking.traces import read_trace

_log = logging.getLogger(__name__)

T = TypeVar("T")

METRICS, CALLS, DESCRIPTION = "metrics.jsonl", "tracking/calls.jsonl", "tracking/run.json"
"""Names of the files in the folder of a run."""

PATIENCE = 30.0
"""Seconds without a successful call after which the end of a run stops waiting for a tracker; four
times as long if no call has failed, for example while a store is created."""
_SLOWEST_UPLOAD = 1e6
"""Bytes per second; uploads of files extend the patience."""
INTERVAL = 20.0
"""Seconds between two rounds of calls; one call for several steps is much cheaper."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
"""Seconds before a failed call is repeated; each pause is twice as long as the last."""
_LONGEST_PAUSE_AT_END = 1.0
_MOST_POINTS, _MOST_CALLS = 200, 50
"""Maximum number of steps in one call, and of other calls between two looks at the file."""
_MOST_MESSAGE = 400
"""Maximum number of characters of an error message."""
_MOST_BYTES = 1 << 24
"""Maximum size of the files that describe a run and what a tracker has received."""
_LONGEST_FILE = 1 << 30
"""Maximum size of a file of JSON lines."""


_PLACE = re.compile(rb"(?!(?:.*/)?\.{0,2}(?:/|\Z))[^\0]{1,250}|", re.DOTALL)
"""Where a text or a file is kept in a tracker, in UTF-8."""


class JsonlFile(Generic[T]):
    """A file of JSON lines that only grows.

    What cannot be written, for example because the disk is full, waits in memory and is written
    before the next line.
    """

    def __init__(
        self, folder: Path, name: str, record: Callable[..., T], *, private: bool = False
    ) -> None:
        """Opens the file; an incomplete last line is cut off.

        Args:
            folder: The folder of the run.
            name: The file in it.
            record: Makes a record of the fields of a line.
            private: Whether only its owner can read it.

        Raises:
            OutputError: The file cannot be written.
        """
        self._record, self._unwritten = record, b""
        self._lock = threading.Lock()
        mode = 0o600 if private else 0o666
        try:
            self.path = plain_path(folder, name)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
            self.size = read_file(folder, name, _LONGEST_FILE).rfind(b"\n") + 1
            os.ftruncate(self._file, self.size)
        except OSError as error:
            raise OutputError(
                f"cannot write {str(folder / name)!r}: {error.strerror}; expected a folder that "
                "can be written, named with --output"
            ) from error

    @property
    def unwritten(self) -> int:
        """Number of lines that wait in memory."""
        return self._unwritten.count(b"\n")

    def append(self, **fields: Any) -> None:
        """Writes a line.

        Raises:
            OSError: It could not be written completely; the next call continues there.
        """
        line = (json.dumps(fields, separators=(",", ":")) + "\n").encode()
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
                try:
                    record = self._record(**json.loads(line))
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    _log.warning("%s: a damaged line is skipped: %r", self.path, line[:80])
                else:
                    yield offset, record

    def close(self) -> None:
        """Closes the file for writing."""
        os.close(self._file)


CallName = Literal["text", "artifact", "input", "trace", "finish"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a tracker.

    Example:
        Call(name="text", arguments={"name": "score.txt", "text": "sum"}, after=2048)
    """

    name: CallName
    arguments: Mapping[str, Any]
    after: int
    """Size of `metrics.jsonl` at the time of the call, in bytes."""


def _encodable(tree: Any) -> Any:
    """Returns JSON without lone surrogates, which no store takes."""
    return json.loads(json.dumps(tree, default=str, ensure_ascii=False).encode(errors="replace"))


def _point(*, step: int, time: int, metrics: dict[str, float]) -> Point:
    """Returns the point of a line, which a stranger may have written."""
    numbers = [step, time, *dict(metrics).values()]
    numeric = (isinstance(n, float) or (isinstance(n, int) and abs(n) < 2**63) for n in numbers)
    if type(step) is not int or not all(numeric):
        raise TypeError("expected numbers of 64 bits")
    return Point(step=step, time=time, metrics=_encodable(metrics))


def _call(*, name: Any, arguments: dict[str, Any], after: int) -> Call:
    """Returns the call of a line, which a stranger may have written."""
    if name not in get_args(CallName) or type(after) is not int:
        raise TypeError("expected the name of a call and a number of bytes")
    arguments = _encodable(arguments)
    place = arguments["name"] or "/" if name == "text" else arguments.get("folder", "")
    if not _PLACE.fullmatch(place.encode()) or arguments.get("status", "FAILED") not in get_args(
        Status
    ):
        raise ValueError("expected a place in the run, and how it ended")
    if name == "trace":
        read_trace(**arguments)
    return Call(name=name, arguments=arguments, after=after)


@dataclass(kw_only=True, slots=True)
class Received:
    """How much of a run's files a tracker has received; kept in a file of its own."""

    id: str = ""
    """The tracker's id of the run."""
    metrics: int = 0
    """Bytes of `metrics.jsonl`."""
    calls: int = 0
    """Bytes of `tracking/calls.jsonl`."""

    @classmethod
    def load(cls, folder: Path, name: str) -> Received:
        """Reads what the tracker `name` has received of the run in `folder`."""
        try:
            received = cls(**json.loads(read_file(folder, _received_name(name), _MOST_BYTES)))
            counts = received.metrics, received.calls
            if isinstance(received.id, str) and all(type(n) is int and n >= 0 for n in counts):
                return received
            raise ValueError(f"expected a text and two numbers of bytes, got {received}")
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError, RecursionError) as error:
            _log.warning("%s: everything is sent again to %s: %s", folder, name, error)
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
        self.metrics = JsonlFile(self.folder, METRICS, _point)
        if self.metrics.size and not run.resume:
            raise OutputError(
                f"{str(run.folder / METRICS)!r} has the metrics of another run; expected a new "
                "folder, or the run to be resumed"
            )
        self._calls = JsonlFile(self.folder, CALLS, _call, private=True) if tracked else None
        self.run = self._describe(run) if tracked else run
        self._recorded = defaultdict[int, set[str]](set)
        for _, point in self.metrics.read():
            self._recorded[point.step].update(point.metrics)
        self._outside: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes the metrics of a step, but for those that the run recorded before it was resumed.

        Raises:
            OSError: The line could not be written; it waits in memory.
        """
        recorded = self._recorded[step]
        new = {name: value for name, value in metrics.items() if name not in recorded}
        if new:
            self.metrics.append(step=step, time=int(time.time() * 1000), metrics=new)

    def add(self, name: str, /, **arguments: Any) -> None:
        """Writes another call; errors as in `log`."""
        if self._calls is not None:
            self._calls.append(name=name, arguments=arguments, after=self.metrics.size)

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
            try:
                for file in files:
                    plain_path(self.folder, file.relative_to(self.folder))
            except (OSError, ValueError) as error:
                raise OutputError(f"{path!r} is not in the folder of the run: {error}") from error
        return place, sum(file.stat().st_size for file in files)

    def read_calls(self, offset: int) -> Iterator[tuple[int, Call]]:
        """Yields the calls from a byte on, each with the byte at which the next one begins."""
        return iter(()) if self._calls is None else self._calls.read(offset)

    def received(self, name: str) -> Received:
        """Returns what the tracker `name` has received; a power failure may have cut the files."""
        received = Received.load(self.folder, name)
        received.metrics = min(received.metrics, self.metrics.size)
        received.calls = min(received.calls, self._calls.size if self._calls else 0)
        return received

    @property
    def unwritten(self) -> int:
        """Number of lines that wait in memory."""
        return self.metrics.unwritten + (self._calls.unwritten if self._calls else 0)

    def close(self) -> None:
        """Closes the files for writing."""
        self.metrics.close()
        if self._calls is not None:
            self._calls.close()

    def _describe(self, run: RunInfo) -> RunInfo:
        """Writes the description of a new run, or reads that of a resumed one."""
        try:
            tree = _encodable(json.loads(read_file(self.folder, DESCRIPTION, _MOST_BYTES)))
            return replace(run, **{n: kind(tree[n]) for n, kind in _DESCRIBED.items() if n in tree})
        except FileNotFoundError:
            tree = _encodable({n: getattr(run, n) for n in _DESCRIBED})
            _write_json(self.folder, DESCRIPTION, tree)
            return replace(run, **tree)
        except (OSError, ValueError, TypeError, RecursionError, OverflowError) as error:
            path = self.folder / DESCRIPTION
            raise OutputError(f"{str(path)!r} is damaged ({error}); remove it") from error


def _write_json(folder: Path, name: str, tree: object) -> None:
    """Writes a file that only its owner can read, all or nothing."""

    def write(path: Path) -> None:
        path.touch(0o600)
        path.write_text(json.dumps(tree, default=str))

    write_file(folder, name, write)


_DESCRIBED = {"name": str, "key": str, "started": int, "params": dict, "tags": dict}
"""The fields of a run's description, which a stranger may have written, and their types."""
_Ordered = Iterator[tuple[int, int, Point | Call]]


class TrackerQueue:
    """Sends what a run records to one tracker, in a thread of its own.

    The run's files are the queue: training never waits for a tracker, and what has not arrived when
    the process ends can be sent by the next one.
    """

    def __init__(self, name: str, tracker: Tracker, run: RunInfo, files: RunFiles) -> None:
        """Continues behind what the tracker has received."""
        self.name, self._tracker, self._run, self._files = name, tracker, run, files
        self.errors: list[str] = []
        """The calls that failed for good."""
        self._received = files.received(name)
        self._received.id = self.id or run.resume.get(name, "")
        self._repeatable = cast(
            Repeatable | None, tracker if hasattr(type(tracker), "log_points") else None
        )
        self._opened = self._repeatable is None
        if self._opened:
            self._received.id = str(inspect.getattr_static(tracker, "id", "")) or self.id
        self._failure = ""
        """Why the last round of calls ended early."""
        self._last_success, self._allowance = time.monotonic(), 0.0
        self._ending, self._stopped = threading.Event(), threading.Event()
        # A daemon, so that a tracker that hangs cannot keep a dying process alive.
        self._thread = threading.Thread(target=self._work, name=f"gspo-{name}", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """The tracker's id of the run; empty if it is not known yet, or there is none."""
        return self._received.id

    @property
    def how_to_look(self) -> str:
        """The command or the address that shows the run; empty if the tracker fails."""
        try:
            return redact_text(self._tracker.how_to_look)
        except Exception as error:
            self._lose("how_to_look", error)
            return ""

    @property
    def is_repeatable(self) -> bool:
        """Whether another process can send what has not arrived."""
        return self._repeatable is not None

    @property
    def problem(self) -> str:
        """A sentence about what the tracker has not received; empty if it has everything."""
        points = sum(len(point.metrics) for _, point in self._points())
        calls = [call.name for _, call in self._calls()]
        if self._opened and not points and not calls:
            return ""
        traces = calls.count("trace")
        files = len(calls) - traces - calls.count("finish")
        return (
            f"{self.name} has not received {points} points, {files} files and {traces} traces, "
            f"which wait in {self._run.folder}: {self._failure or 'it does not answer'}"
        )

    def end(self) -> None:
        """Announces that nothing more will be recorded."""
        self._last_success = time.monotonic()
        self._ending.set()

    def wait(self) -> None:
        """Waits until everything has arrived, or no call has succeeded for some time."""
        while self._thread.is_alive():
            patience = (PATIENCE if self._failure else 4 * PATIENCE) + self._allowance
            if time.monotonic() > self._last_success + patience:
                break
            self._thread.join(0.05)
        self._stopped.set()

    def _points(self) -> Iterator[tuple[int, Point]]:
        return self._files.metrics.read(self._received.metrics)

    def _calls(self) -> Iterator[tuple[int, Call]]:
        return self._files.read_calls(self._received.calls)

    def _work(self) -> None:
        """Makes rounds of calls until everything has arrived; runs in the thread."""
        pause = _FIRST_PAUSE
        while not self._stopped.is_set():
            is_last = self._ending.is_set()
            try:
                self._send()
            except Exception as error:
                self._announce(error)
                longest = _LONGEST_PAUSE_AT_END if is_last else _LONGEST_PAUSE
                (self._stopped if is_last else self._ending).wait(min(pause, longest))
                pause = min(2 * pause, longest)
            else:
                if self._failure:
                    _log.warning("tracker %s records again", self.name)
                self._failure, pause = "", _FIRST_PAUSE
                if is_last:
                    return
                self._ending.wait(INTERVAL)

    def _send(self) -> None:
        """Sends everything that is new; raises an error of a call that may succeed later."""
        tracker = self._repeatable
        if tracker is None:
            self._send_in_order()
            return
        if not self._opened:
            self._open(tracker)
        # Points come first, so that a store for files that fails does not hold them back.
        self._send_points(tracker)
        self._send_calls(tracker)

    def _open(self, tracker: Repeatable) -> None:
        run_id = tracker.open()
        if run_id != self.id:  # a new run, which has received nothing
            self._received = Received(id=run_id)
            self._save()
        self._opened = True

    def _send_points(self, tracker: Repeatable) -> None:
        while batch := list(islice(self._points(), _MOST_POINTS)):
            self._call("log", tracker.log_points, [point for _, point in batch])
            self._received.metrics = batch[-1][0]
            self._save()

    def _send_calls(self, tracker: Repeatable) -> None:
        while batch := list(islice(self._calls(), _MOST_CALLS)):
            traces = [read_trace(**c.arguments) for _, c in batch if c.name == "trace"]
            if traces:
                self._call("traces", tracker.log_traces, traces)
            for end, call in batch:
                self._send_call(call, end)

    def _send_in_order(self) -> None:
        """Makes each call once, in the order of the run."""
        # The calls first: the points before each of them are in their file by then.
        calls = [(call.after, end, call) for end, call in self._calls()]
        points: _Ordered = ((end, end, point) for end, point in self._points())
        for _, end, record in heapq.merge(points, calls, key=lambda item: item[0]):
            if isinstance(record, Point):
                self._call("log", self._log_point, record)
                self._received.metrics = end
                self._save()
            else:
                self._send_call(record, end)

    def _log_point(self, point: Point) -> None:
        self._tracker.log(point.metrics, point.step)

    def _send_call(self, call: Call, end: int) -> None:
        self._call(call.name, self._make_call, call, end)
        self._received.calls = end
        self._save()

    def _make_call(self, call: Call, end: int) -> None:
        arguments = call.arguments
        match call.name:
            case "text":
                self._tracker.text(**arguments)
            case "artifact":
                path, size = self._files.locate(arguments["path"])
                self._allowance += size / _SLOWEST_UPLOAD
                self._tracker.artifact(path, arguments["folder"])
            case "input" if self._repeatable is not None:
                self._repeatable.log_input(Input(**arguments))
            case "finish" if next(self._files.read_calls(end), None) is None:  # it was not resumed
                self._tracker.finish(**arguments)

    def _call(self, what: str, call: Callable[..., object], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            if self._repeatable is not None and self._repeatable.is_transient(error):
                self._opened = False
                raise
            self._lose(what, error)
        else:
            self._last_success = time.monotonic()

    def _save(self) -> None:
        self._received.save(self._files.folder, self.name)

    def _announce(self, error: Exception) -> None:
        """Notes an error after which the calls are repeated; logs the first."""
        failure = _message(error)
        if not self._failure:
            _log.error(
                "tracker %s does not record now; the run continues, and what it has not received "
                "waits in %s: %s",
                *(self.name, self._run.folder, failure),
            )
        self._failure = failure

    def _lose(self, what: str, error: Exception) -> None:
        """Counts a call that failed for good; logs the first."""
        message = f"{what}: {_message(error)}"
        if not self.errors:
            _log.error("tracker %s failed, the run continues: %s", self.name, message)
        self.errors.append(message)


def _message(error: Exception) -> str:
    return redact_text(f"{type(error).__name__}: {error}"[:_MOST_MESSAGE])
