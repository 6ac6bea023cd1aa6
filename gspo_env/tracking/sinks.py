"""Feeds one tracker from the files of a run, in a thread of its own.

The run's files are the queue: training never waits for a tracker, and what has not arrived when the
process ends can be sent by the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from gspo_env.redaction import redact_text
from gspo_env.tracking.base import Input, RunInfo, Tracker, read_trace
from gspo_env.tracking.jsonl import Call, Received, RunFiles

_log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds without a successful call after which the end of a run stops waiting for a tracker; four
times as long if no call has failed."""
_SLOWEST_UPLOAD = 1e6
"""Bytes per second; uploads of files extend the patience."""
INTERVAL = 20.0
"""Seconds between two rounds of calls; one call for several steps is much cheaper."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
"""Seconds before a failed call is repeated; each pause is twice as long as the last."""
_LONGEST_PAUSE_AT_END = 1.0
_MOST_CALLS = 50
"""Maximum number of calls, besides those of metrics, between two looks at the file."""
_MOST_MESSAGE = 400
"""Maximum number of characters of an error message."""


class Sink:
    """A tracker with the bytes of the run's files that it has received."""

    def __init__(self, name: str, tracker: Tracker, run: RunInfo, files: RunFiles) -> None:
        """Continues behind what the tracker has received; a new run has received nothing."""
        self.name, self._tracker, self._run, self._files = name, tracker, run, files
        self.errors: list[str] = []
        """The calls that failed for good."""
        received = files.received(name)
        self._received = received if tracker.id == received.id else Received(id=tracker.id)
        self._received.address = redact_text(tracker.address)
        self._save()
        self._failure = ""
        """Why the last round of calls ended early."""
        self._last_success, self._allowance = time.monotonic(), 0.0
        self._ending, self._stopped = threading.Event(), threading.Event()
        # A daemon, so that a tracker that hangs cannot keep a dying process alive.
        self._thread = threading.Thread(target=self._work, name=f"gspo-{name}", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """The tracker's id of the run; empty if there is none."""
        return self._received.id

    @property
    def how_to_look(self) -> str:
        """The command or the address that shows the run."""
        return redact_text(self._tracker.how_to_look)

    @property
    def problem(self) -> str:
        """A sentence about what the tracker has not received; empty if it has everything."""
        points = sum(len(p.metrics) for _, p in self._files.read_points(self._received.metrics))
        calls = [call.name for _, call in self._files.read_calls(self._received.calls)]
        if not points and not calls:
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
        """Sends everything that is new; raises an error of a call that may succeed later.

        The points before each call are in their file when the call is. They come first, so that a
        store for files that fails does not hold them back.
        """
        while True:
            calls = list(islice(self._files.read_calls(self._received.calls), _MOST_CALLS))
            self._send_points()
            if not calls:
                return
            if traces := [call.arguments for _, call in calls if call.name == "trace"]:
                self._try("traces", self._log_traces, traces)
            for end, call in calls:
                self._try(call.name, self._make_call, call, end)
                self._received.calls = end
                self._save()

    def _send_points(self) -> None:
        most = self._tracker.points_per_call
        while batch := list(islice(self._files.read_points(self._received.metrics), most)):
            self._try("log", self._tracker.log_points, [point for _, point in batch])
            self._received.metrics = batch[-1][0]
            self._save()

    def _log_traces(self, traces: list[dict[str, Any]]) -> None:
        self._tracker.log_traces([read_trace(**fields) for fields in traces])

    def _make_call(self, call: Call, end: int) -> None:
        arguments = call.arguments
        match call.name:
            case "text":
                self._tracker.text(**arguments)
            case "artifact":
                path, size = self._files.locate(arguments["path"])
                self._allowance += size / _SLOWEST_UPLOAD
                self._tracker.artifact(path, arguments["folder"])
            case "input":
                self._tracker.log_input(Input(**arguments))
            case "finish" if next(self._files.read_calls(end), None) is None:  # it was not resumed
                self._tracker.finish(**arguments)

    def _try(self, what: str, call: Callable[..., object], *arguments: Any) -> None:
        """Makes a call, and counts it if it fails for good."""
        try:
            call(*arguments)
        except Exception as error:
            if self._tracker.is_transient(error):
                raise
            message = f"{what}: {_message(error)}"
            if not self.errors:
                _log.error("tracker %s failed, the run continues: %s", self.name, message)
            self.errors.append(message)
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


def _message(error: Exception) -> str:
    return redact_text(f"{type(error).__name__}: {error}"[:_MOST_MESSAGE])
