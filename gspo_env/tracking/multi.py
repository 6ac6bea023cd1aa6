"""Records a run in several trackers: an error of one stops neither the run nor the others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Self

from gspo_env.files import METRICS
from gspo_env.redaction import redact, redact_text
from gspo_env.registry import name_of, require
from gspo_env.tracking.base import Input, NoTracker, RunInfo, Status, Trace, TrackerChoice, flatten
from gspo_env.tracking.jsonl import RunFiles
from gspo_env.tracking.sinks import Sink

_log = logging.getLogger(__name__)

NON_FINITE = "tracking/non_finite"
"""The metric that counts the values of a step that were dropped because they are not finite."""

_TRACES_PER_SECOND = 0.2
"""Traces that a run may send besides those that the settings ask for. One computes for less than 10
milliseconds, so that they take at most 0.2 % of the time."""
_MOST_TRACES = 5000
"""Maximum number of traces of a run, besides those that the settings ask for."""


class MultiTracker:
    """The started trackers of a run, as a context manager that finishes them.

    Everything is written to the run's folder, from which each tracker is fed in a thread of its
    own. No method raises an error of a tracker: the first of each is logged at once, the others
    are counted, and `problems` lists at the end the trackers that did not record everything.

    Example:
        with start(MLflow(), RunInfo(name="first", folder=Path("runs/first"))) as tracker:
            tracker.log({"train/loss": 0.1}, step=1)
    """

    def __init__(self, choices: Mapping[str, TrackerChoice], run: RunInfo) -> None:
        """Starts each tracker, whose errors travel: nothing has been trained yet.

        Raises:
            ConfigError: A setting is invalid, or a store cannot be opened.
            MissingExtraError: A tracker's package is not installed.
            OutputError: A file cannot be written in the run's folder.
        """
        self.folder, self.started = run.folder, run.started
        self._sinks: dict[str, Sink] = {}
        self._unwritten: list[str] = []
        """Errors of the run's own files, while lines wait in memory."""
        self._late: dict[str, str] = {}
        """What the trackers have not received at the end, by tracker."""
        self._finished = False
        self._tracked = {n: c for n, c in choices.items() if not isinstance(c, NoTracker)}
        self._began, self._num_traces = time.monotonic(), 0
        tags = {name: redact_text(value) for name, value in run.tags.items()}
        run = replace(run, params=flatten(redact(run.params)), tags=tags)
        self._files = RunFiles(run, tracked=bool(self._tracked))
        for name, choice in self._tracked.items():
            run = replace(self._files.run, id=self._files.received(name).id)
            try:
                _require(choice)
                self._sinks[name] = Sink(name, choice.start(run), run, self._files)
            except BaseException:
                self.finish("FAILED")
                raise

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Finishes as FINISHED, FAILED, or KILLED after an interrupt."""
        if exc_type is None:
            self.finish()
            return
        status: Status = "KILLED" if issubclass(exc_type, KeyboardInterrupt) else "FAILED"
        self.finish(status, f"{exc_type.__name__}: {error}".rstrip(": "))
        for problem in self.problems:
            _log.error("%s", problem)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records finite metrics of a step; other values are dropped, counted and logged."""
        values = {name: _number(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name in values.keys() - finite.keys():
            _log.warning("step %d: metric %s is %s; not recorded", step, name, metrics[name])
        if dropped := len(values) - len(finite):
            finite[NON_FINITE] = float(dropped)
        self._write(self._files.log, finite, step)

    def text(self, name: str, text: str) -> None:
        """Stores a text under a name such as `score.txt`, without secrets."""
        text = redact_text(text.encode(errors="backslashreplace").decode())
        self._write(self._files.add, "text", name=name, text=text)

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """Stores a file, or the files of a folder; keep them until `finish`."""
        self._write(self._files.add_artifact, Path(path), folder)

    def input(self, source: Input) -> None:
        """Records what the run trains on or is evaluated on, without secrets."""
        self._write(self._files.add, "input", **redact(asdict(source)))

    def trace(self, trace: Trace) -> None:
        """Records what happened in an episode, for the trackers that show traces."""
        self._num_traces += 1
        self._write(self._files.add, "trace", **asdict(trace))

    def traces(self, phase: str) -> int:
        """Returns how many episodes of this step or evaluation become traces.

        As many as the settings of a tracker ask for, and more while they cost little.

        Args:
            phase: See `gspo_env.episodes.schema.Phase`.
        """
        eval_traces, train_traces = map(self._least, ("traces", "train_traces"))
        if not (eval_traces or train_traces):
            return 0
        affordable = min(_MOST_TRACES, int(_TRACES_PER_SECOND * (time.monotonic() - self._began)))
        least = train_traces if phase == "train" else eval_traces
        return max(least, affordable - self._num_traces)

    def finish(self, status: Status = "FINISHED", reason: str = "") -> None:
        """Ends the run in each tracker; the first call counts.

        Waits for what has not arrived, but not for a tracker that does not answer.

        Args:
            status: How the run ended.
            reason: Why it failed.
        """
        if not self._finished:
            self._write(self._files.add, "finish", status=status, reason=redact_text(reason))
            self.wait()

    def wait(self) -> None:
        """Waits for what has not arrived; nothing can be recorded afterwards."""
        self._finished = True
        for sink in self._sinks.values():
            sink.end()
        for name, sink in self._sinks.items():
            sink.wait()
            if problem := sink.problem:  # now: a resumed run adds to the same files
                self._late[name] = f"{problem}; {self.remedy}"
        self._files.close()

    @property
    def how_to_look(self) -> str:
        """The commands and addresses that show the run."""
        return " or ".join(filter(None, (sink.how_to_look for sink in self._sinks.values())))

    @property
    def ids(self) -> dict[str, str]:
        """The id of the run in each tracker, by name; empty if there is none."""
        return {name: sink.id for name, sink in self._sinks.items()}

    @property
    def recorded(self) -> dict[str, int]:
        """The bytes of what was recorded so far, for `RunInfo.resume`."""
        return self._files.sizes

    @property
    def failed(self) -> set[str]:
        """Names of the trackers that did not record everything."""
        return {*self._failures, *self._late}

    @property
    def problems(self) -> list[str]:
        """A sentence for each tracker that did not record everything."""
        failures = [
            f"{name} did NOT record everything: {len(errors)} "
            f"call{'s' * (len(errors) > 1)} failed, the first was {errors[0]}"
            for name, errors in self._failures.items()
        ]
        return [*failures, *self._late.values()]

    @property
    def remedy(self) -> str:
        """How to send what has not arrived."""
        return f"`gspo-env sync {self.folder}` sends them"

    @property
    def _failures(self) -> dict[str, list[str]]:
        """The calls that failed for good, by tracker."""
        errors = {METRICS: self._unwritten, **{n: sink.errors for n, sink in self._sinks.items()}}
        return {name: messages for name, messages in errors.items() if messages}

    def _least(self, setting: str) -> int:
        """Returns how many traces the settings of trackers ask for."""
        return max((getattr(choice, setting, 0) for choice in self._tracked.values()), default=0)

    def _write(self, write: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Writes to the run's files; what a full disk refuses waits in memory."""
        if self._finished:
            return
        try:
            write(*arguments, **keywords)
        except OSError as error:
            message = redact_text(f"write: {type(error).__name__}: {error}")
            if not self._unwritten:
                _log.error("%s cannot be written, the run continues: %s", METRICS, message)
            self._unwritten.append(message)
        else:
            if not self._files.unwritten:
                self._unwritten.clear()


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def start(choice: TrackerChoice, run: RunInfo) -> MultiTracker:
    """Starts the selected tracker, or each of those that `combine` joined.

    Raises:
        ConfigError: A setting is invalid, or a store cannot be opened.
        MissingExtraError: A tracker's package is not installed.
        OutputError: A file cannot be written in the run's folder.
    """
    return MultiTracker(parts(choice), run)


def _require(choice: TrackerChoice) -> None:
    if package := getattr(choice, "package", ""):
        require(package, f"the tracker {package!r}", f"'gspo-env[{package}]'")


def check_trackers(choice: TrackerChoice) -> None:
    """Opens the store of each tracker that has one, before anything is written or trained.

    Raises:
        ConfigError: It cannot be opened.
        MissingExtraError: A tracker's package is not installed.
    """
    for part in parts(choice).values():
        _require(part)
        getattr(part, "check", lambda: None)()


def parts(choice: TrackerChoice) -> dict[str, TrackerChoice]:
    """Returns the selected trackers by name."""
    if not hasattr(choice, "tracker_names"):
        return {name_of("tracker", choice): choice}
    values = [getattr(choice, f.name) for f in fields(choice)]  # type: ignore[arg-type]
    return dict(zip(choice.tracker_names, values, strict=True))
