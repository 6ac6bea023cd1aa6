"""Feeds one tracker from the journal of a run, in a thread of its own.

Training writes to the disk and goes on. A tracker that is slow, gone or full costs only the time
until its points arrive; what has not arrived when the process ends is sent by the next one.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gspo_env.redaction import redact_text
from gspo_env.tracking.base import Input, Repeatable, RunInfo, Tracker
from gspo_env.tracking.jsonl import FOLDER, METRICS, Event, Journal, write_atomically
from gspo_env.tracking.traces import TRACES_SHARE, Trace

_log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds without a success after which the end of a run stops waiting for a tracker; four times as
long if no call has failed, for example while a store is made."""
_SLOWEST_UPLOAD = 1e6
"""Bytes per second; the patience grows with the files that are sent."""
_INTERVAL = 0.5
"""Seconds between deliveries."""
_POINTS_WAIT = 20.0
"""Seconds between calls for points, since one call for several steps is much cheaper."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
"""Seconds before a call that failed is repeated; each pause is twice the one before."""
_PAUSE_AT_END = 1.0
"""The longest pause while the end of a run waits."""
_MESSAGE = 400
"""Maximum number of characters of an error."""
_POINTS = 200
"""Maximum number of steps in one call."""
_TRACES = 16
"""Maximum number of traces in one call."""
_TRACES_WAIT = 20.0
"""Seconds between calls, since one call for many traces is much cheaper."""
_TRACE_COST = 0.01
"""Processor seconds of a trace, before one was sent."""


@dataclass(kw_only=True, slots=True)
class Cursor:
    """What a tracker has received; kept in a file."""

    id: str = ""
    """The tracker's id of the run that received it."""
    metrics: int = 0
    """Bytes of `metrics.jsonl`."""
    files: int = 0
    """Bytes of `tracking/files.jsonl`."""
    traces: int = 0
    """Bytes of `tracking/traces.jsonl`."""

    @classmethod
    def read(cls, folder: Path, name: str) -> Cursor:
        """Reads the cursor of a tracker in a run's folder; a new one if there is none."""
        path = cls.path(folder, name)
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError) as error:
            _log.warning("%s is damaged, everything is sent again: %s", path, error)
            return cls()

    @staticmethod
    def path(folder: Path, name: str) -> Path:
        """Returns the file of a tracker's cursor."""
        return folder / FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}.json"

    def at_end(self, folder: Path) -> bool:
        """Whether the tracker has received everything that is in a run's folder."""
        files = (
            (folder / METRICS, self.metrics),
            (folder / FOLDER / "files.jsonl", self.files),
            (folder / FOLDER / "traces.jsonl", self.traces),
        )
        return all(not path.exists() or path.stat().st_size <= size for path, size in files)


@dataclass(slots=True)
class _Lane:
    """The state of one kind of calls: those that fail are repeated after a pause."""

    reason: str = ""
    """Why the last call failed; empty after a success."""
    _pause: float = 0.0
    due: float = 0.0
    """Time of the next call, in seconds of the monotonic clock."""

    @property
    def left(self) -> float:
        """Seconds until the next call."""
        return max(0.0, self.due - time.monotonic())

    def failed(self, reason: str, longest: float) -> None:
        self.reason = reason
        self._pause = min(longest, max(_FIRST_PAUSE, 2 * self._pause))
        self.due = time.monotonic() + self._pause

    def succeeded(self) -> None:
        self.reason, self._pause, self.due = "", 0.0, 0.0

    def hurry(self) -> None:
        """Makes the next call due."""
        self.due = 0.0


class Delivery:
    """Sends a run to one tracker; each point arrives once, in order."""

    def __init__(self, name: str, tracker: Tracker, run: RunInfo, journal: Journal) -> None:
        """Begins behind what the tracker received before."""
        self.name, self.tracker = name, tracker
        self.errors: list[str] = []
        """The calls that failed for good."""
        self._journal, self._folder = journal, run.folder
        self._cursor = Cursor.read(journal.folder, name)
        self._cursor.metrics = min(self._cursor.metrics, journal.metrics.size)
        self._cursor.id = self._cursor.id or run.resume.get(name, "")
        self._repeatable = _repeatable(tracker)
        if self._repeatable is None:
            self._cursor.id = str(inspect.getattr_static(tracker, "id", "")) or self._cursor.id
        self._opened = self._repeatable is None
        self._lanes = {name: _Lane() for name in ("start", "points", "files", "traces")}
        self._takes_traces = self._repeatable is not None and hasattr(type(tracker), "log_traces")
        self._began = self._traced = time.monotonic()
        self._traces_cost, self._traces_sent = 0.0, 0
        self._points_due = 0.0
        self._news, self._ending, self._stopped = (threading.Event() for _ in range(3))
        self._alive = time.monotonic()
        self._allowance = 0.0
        # A daemon, so that a tracker that hangs cannot keep a dying process alive.
        self._thread = threading.Thread(target=self._work, name=f"gspo-{name}", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """The tracker's id of the run; empty if it is not known yet, or there is none."""
        return self._cursor.id

    @property
    def how_to_look(self) -> str:
        """The command or the address that shows the run; empty if the tracker fails."""
        try:
            return redact_text(self.tracker.how_to_look)
        except Exception as error:
            self._lose(redact_text(f"how_to_look: {type(error).__name__}: {error}"))
            return ""

    @property
    def is_repeatable(self) -> bool:
        """Whether another process can send what is missing."""
        return self._repeatable is not None

    @property
    def problem(self) -> str:
        """A sentence about what the tracker has not received; empty if it has everything."""
        points = sum(len(p.metrics) for _, p in self._journal.points(self._cursor.metrics))
        files = sum(not e.status for _, e in self._journal.events(self._cursor.files))
        traces = len(list(self._new_traces())) if self._takes_traces else 0
        if not self._left():
            return ""
        reason = next((lane.reason for lane in self._lanes.values() if lane.reason), "")
        what = f"{points} points, {files} files" if traces else f"{points} points and {files} files"
        return (
            f"{self.name} has not received {what}{f' and {traces} traces' if traces else ''}, "
            f"which wait in {self._folder}: {reason or 'it does not answer'}"
        )

    @property
    def trace_cost(self) -> float:
        """Processor seconds of one trace; 0 if the tracker takes none."""
        if not self._takes_traces:
            return 0.0
        return self._traces_cost / self._traces_sent if self._traces_sent else _TRACE_COST

    def notify(self) -> None:
        """Says that there is something new in the journal."""
        self._news.set()

    def end(self) -> None:
        """Says that nothing more will come."""
        self._alive = time.monotonic()
        for lane in self._lanes.values():
            lane.hurry()
        self._ending.set()
        self._news.set()

    def wait(self) -> None:
        """Waits until everything has arrived, or nothing has for some time."""
        while self._thread.is_alive():
            fails = any(lane.reason for lane in self._lanes.values())
            patience = (PATIENCE if fails else 4 * PATIENCE) + self._allowance
            if time.monotonic() > self._alive + patience:
                break
            self._thread.join(0.05)
        self._stopped.set()

    def _work(self) -> None:
        """Delivers until the run has ended; runs in the thread."""
        while not self._stopped.is_set():
            self._news.clear()
            began, sent, done = time.monotonic(), False, False
            try:
                sent = self._deliver()
                done = not sent and self._ending.is_set() and not self._left()
            except Exception as error:  # of the journal or the cursor
                self._fail(self._lanes["points"], f"{type(error).__name__}: {error}")
            if done:
                return
            if sent:
                self._ending.wait(_INTERVAL)
            else:
                # a pause may have ended since `_deliver` saw it
                dues = [*(lane.due for lane in self._lanes.values()), self._points_due]
                dues = [due for due in dues if due > began]
                self._news.wait(max(0.0, min(dues) - time.monotonic()) if dues else 60.0)

    def _left(self) -> bool:
        """Whether something has not arrived."""
        journal, cursor = self._journal, self._cursor
        lanes = journal.points(cursor.metrics), journal.events(cursor.files), self._new_traces()
        return any(next(lane, None) for lane in lanes) or not self._opened

    def _deliver(self) -> bool:
        """Sends the next points or the next event; returns whether something was sent."""
        if not self._opened and not self._open():
            return False
        place, event = next(self._journal.events(self._cursor.files), (0, None))
        if self._send_points(None if event is None else event.after):
            return True
        if self._lanes["points"].left:
            return False
        last = event is not None and bool(event.status)
        if event is None or last:
            return self._send_traces() or (event is not None and self._send_event(event, place))
        # A store for files that fails does not keep the points behind them.
        return self._send_event(event, place) or self._send_points(None) or self._send_traces()

    def _open(self) -> bool:
        """Begins or goes on with the run in a repeatable tracker; returns whether it is open."""
        lane, tracker, cursor = self._lanes["start"], self._repeatable, self._cursor
        found: list[str] = []
        if tracker is None or lane.left:
            return False
        if not self._call(lane, "start", lambda: found.append(tracker.open())):
            return False
        self._opened = True
        if found and found[0] != cursor.id:  # a new run, which has nothing yet
            cursor.id, cursor.metrics, cursor.files, cursor.traces = found[0], 0, 0, 0
            self._save()
        return True

    def _send_points(self, end: int | None) -> bool:
        """Sends points up to a byte, or all; all of them only now and then."""
        lane, tracker = self._lanes["points"], self.tracker
        early = end is None and time.monotonic() < self._points_due
        if lane.left or (early and not self._ending.is_set()):
            return False
        found = list(islice(self._journal.points(self._cursor.metrics, end), _POINTS))
        if not found:
            return False
        if (repeatable := self._repeatable) is not None:
            self._journal.metrics.sync()  # what has arrived is never missing on disk
            points = [point for _, point in found]
            if not self._call(lane, "log", lambda: repeatable.log_points(points)):
                return False
            self._cursor.metrics = found[-1][0]
            self._points_due = time.monotonic() + _POINTS_WAIT * (len(found) < _POINTS)
            self._save()
        else:
            for place, point in found:
                self._call(lane, "log", lambda p=point: tracker.log(p.metrics, p.step))  # type: ignore[misc]
                self._cursor.metrics = place
                self._save()
        return True

    def _new_traces(self) -> Iterator[tuple[int, Trace]]:
        return self._journal.traces(self._cursor.traces) if self._takes_traces else iter(())

    def _send_traces(self) -> bool:
        """Sends traces now and then, as many together as possible, unless that costs too much."""
        lane, tracker, now = self._lanes["traces"], self.tracker, time.monotonic()
        early = now < self._traced + _TRACES_WAIT
        dear = self._traces_cost > TRACES_SHARE * (now - self._began)
        if lane.left or ((early or dear) and not self._ending.is_set()):
            return False
        before, sent = time.thread_time(), False
        found = list(islice(self._new_traces(), _TRACES))
        if found:
            traces = [trace for _, trace in found]
            sent = self._call(lane, "traces", lambda: tracker.log_traces(traces))  # type: ignore[attr-defined]
        self._traces_cost += time.thread_time() - before
        if len(found) < _TRACES:
            self._traced = now
        if sent:
            self._traces_sent += len(found)
            self._cursor.traces = found[-1][0]
            self._save()
        return sent

    def _send_event(self, event: Event, place: int) -> bool:
        lane = self._lanes["files"]
        if lane.left:
            return False
        what = "finish" if event.status else "text" if event.name else "artifact"
        what = "input" if event.input is not None else what
        if not self._call(lane, what, lambda: self._send(event, place)):
            return False
        self._cursor.files = place
        self._save()
        return True

    def _send(self, event: Event, place: int) -> None:
        if event.name:
            self.tracker.text(event.name, event.text)
        elif event.path:
            path = self._journal.find(event.path)
            files = path.rglob("*") if path.is_dir() else [path]
            size = sum(file.stat().st_size for file in files if file.is_file())
            self._allowance += size / _SLOWEST_UPLOAD
            self.tracker.artifact(path, event.folder)
        elif event.input is not None:
            if hasattr(type(self.tracker), "log_input"):
                self.tracker.log_input(Input(**event.input))  # type: ignore[attr-defined]
        elif event.status and not next(self._journal.events(place), None):
            self.tracker.finish(event.status, event.reason)  # the run was not resumed after it

    def _call(self, lane: _Lane, what: str, call: Callable[[], None]) -> bool:
        """Calls the tracker; returns False if the call has to be repeated."""
        try:
            call()
        except Exception as error:
            message = redact_text(f"{what}: {type(error).__name__}: {error}"[:_MESSAGE])
            again = self._repeatable
            if again is not None and (what == "start" or again.passing(error)):
                self._fail(lane, message)
                return False
            self._lose(message)
            return True
        if lane.reason:
            _log.warning("tracker %s records again", self.name)
        lane.succeeded()
        self._alive = time.monotonic()
        return True

    def _lose(self, message: str) -> None:
        if not self.errors:
            _log.error("tracker %s failed, the run continues: %s", self.name, message)
        self.errors.append(message)

    def _fail(self, lane: _Lane, message: str) -> None:
        if not lane.reason:
            _log.error(
                "tracker %s does not record now; the run continues, and what it has not received "
                "waits in %s: %s",
                *(self.name, self._folder, message),
            )
        lane.failed(message, _PAUSE_AT_END if self._ending.is_set() else _LONGEST_PAUSE)
        self._opened = self._repeatable is None

    def _save(self) -> None:
        write_atomically(Cursor.path(self._journal.folder, self.name), asdict(self._cursor))


def _repeatable(tracker: Any) -> Repeatable | None:
    return tracker if hasattr(type(tracker), "log_points") else None
