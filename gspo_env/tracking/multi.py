"""Trackers that record the same run: an error of one stops neither the run nor the others."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from gspo_env.errors import ConfigError, MissingExtraError
from gspo_env.redaction import redact, redact_text
from gspo_env.registry import find, name_of
from gspo_env.tracking.base import Input, NoTracker, RunInfo, Status, TrackerChoice, flatten
from gspo_env.tracking.delivery import Cursor, Delivery
from gspo_env.tracking.jsonl import METRICS, Journal
from gspo_env.tracking.traces import Trace, affordable

_log = logging.getLogger(__name__)

NON_FINITE = "tracking/non_finite"
"""The metric that counts the values of a step that were dropped because they are not finite."""

_MOST_TRACES = 1 << 26
"""Bytes of traces on the disk, after which a run makes only those that a tracker wants."""


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
        """Starts each tracker.

        Raises:
            ConfigError: A setting is invalid, or an address does not answer.
            MissingExtraError: A tracker's package is not installed.
            OutputError: A file cannot be written in the run's folder.
        """
        self._deliveries: dict[str, Delivery] = {}
        self._errors: dict[str, list[str]] = {}
        self._finished = False
        self._names = list(choices)
        fed = {n: choice for n, choice in choices.items() if not isinstance(choice, NoTracker)}
        tags = {name: redact_text(value) for name, value in run.tags.items()}
        run = replace(run, params=flatten(redact(run.params)), tags=tags)
        self._least = {
            kind: max((_least_traces(choice, kind) for choice in fed.values()), default=0)
            for kind in ("traces", "train_traces")
        }
        self._began, self._traced = time.monotonic(), 0
        self._journal = Journal(run, files=bool(fed), traces=any(self._least.values()))
        self._folder, run = run.folder, self._journal.run
        for name, choice in fed.items():
            known = Cursor.read(run.folder, name).id or run.resume.get(name, "")
            own = replace(run, resume={**run.resume, name: known} if run.resume else {})
            try:
                self._deliveries[name] = Delivery(name, choice.start(own), own, self._journal)
            except (ConfigError, MissingExtraError):
                self.finish("FAILED")
                raise
            except Exception as error:
                self._count(name, "start", error)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Finishes as FINISHED, FAILED, or KILLED after an interrupt."""
        killed = exc_type is not None and issubclass(exc_type, KeyboardInterrupt)
        reason = "" if exc_type is None else f"{exc_type.__name__}: {error}".rstrip(": ")
        status: Status = "FINISHED" if exc_type is None else "KILLED" if killed else "FAILED"
        self.finish(status, reason)
        for problem in self.problems if exc_type is not None else []:
            _log.error("%s", problem)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records finite metrics of a step; other values are dropped, counted and logged."""
        values = {name: _number(value) for name, value in metrics.items()}
        dropped = [name for name, value in values.items() if not math.isfinite(value)]
        for name in dropped:
            _log.warning("step %d: metric %s is %s; not recorded", step, name, metrics[name])
            del values[name]
        if dropped:
            values[NON_FINITE] = float(len(dropped))
        self._note(lambda: self._journal.log(values, step))

    def text(self, name: str, text: str) -> None:
        """Stores a text under a name such as `episodes/step-0010.txt`, without secrets."""
        text = redact_text(text.encode(errors="backslashreplace").decode())
        self._note(lambda: self._journal.text(name, text))

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """Stores a file, or the files of a folder; keep them until `finish`."""
        self._note(lambda: self._journal.artifact(Path(path), folder))

    def input(self, source: Input) -> None:
        """Records what the run learns from or is measured on, without secrets."""
        source = replace(source, source=redact(source.source), profile=redact(source.profile))
        self._note(lambda: self._journal.input(source))

    def trace(self, trace: Trace) -> None:
        """Records a trace, if a tracker wants traces; the same trace again is left out."""
        self._traced += 1
        self._note(lambda: self._journal.trace(trace))

    def traces(self, phase: str) -> int:
        """Returns how many episodes of this step or evaluation become traces.

        As many as a tracker wants, and more while sending them computes less than a share of the
        time, `TRACES_SHARE`.

        Args:
            phase: See `gspo_env.episodes.schema.Phase`.
        """
        least = self._least["train_traces" if phase == "train" else "traces"]
        costs = [delivery.trace_cost for delivery in self._deliveries.values()]
        if not any(costs) or not any(self._least.values()):
            return least
        if self._journal.traces_size > _MOST_TRACES:
            return least
        seconds = time.monotonic() - self._began
        return affordable(least=least, seconds=seconds, cost=sum(costs), taken=self._traced)

    def finish(self, status: Status = "FINISHED", reason: str = "") -> None:
        """Ends the run in each tracker; the first call counts.

        Waits for what has not arrived, but not for a tracker that does not answer.

        Args:
            status: How the run ended.
            reason: Why it failed.
        """
        if not self._finished:
            self._note(lambda: self._journal.end(status, redact_text(reason)))
            self.wait()

    def wait(self) -> None:
        """Waits for what has not arrived; nothing can be recorded afterwards."""
        self._finished = True
        for delivery in self._deliveries.values():
            delivery.end()
        for delivery in self._deliveries.values():
            delivery.wait()
        self._journal.close()

    @property
    def how_to_look(self) -> str:
        """The commands and addresses that show the run."""
        shown = [delivery.how_to_look for delivery in self._deliveries.values()]
        return " or ".join(filter(None, shown))

    @property
    def ids(self) -> dict[str, str]:
        """The id of the run in each tracker, by name, for `RunInfo.resume`; empty if not known."""
        return {n: d.id if (d := self._deliveries.get(n)) else "" for n in self._names}

    @property
    def failed(self) -> set[str]:
        """Names of the trackers that did not record everything."""
        late = {name for name, delivery in self._deliveries.items() if self._is_late(delivery)}
        return {*self._failures, *late}

    @property
    def problems(self) -> list[str]:
        """A sentence for each tracker that did not record everything."""
        lost = [
            f"{name} did NOT record everything: {len(errors)} "
            f"call{'s' * (len(errors) > 1)} failed, the first was {errors[0]}"
            for name, errors in self._failures.items()
        ]
        late = [
            f"{d.problem}; {self._remedy}" if d.is_repeatable else d.problem
            for d in self._deliveries.values()
            if self._is_late(d)
        ]
        return [*lost, *late]

    @property
    def _remedy(self) -> str:
        """How what has not arrived is sent later."""
        return f"`gspo-env sync {self._folder}` sends them"

    @property
    def _failures(self) -> dict[str, list[str]]:
        """The calls that failed for good, by tracker."""
        failures = {name: list(errors) for name, errors in self._errors.items()}
        for name, delivery in self._deliveries.items():
            if delivery.errors:
                failures[name] = failures.get(name, []) + delivery.errors
        return failures

    def _is_late(self, delivery: Delivery) -> bool:
        return self._finished and bool(delivery.problem)

    def _note(self, write: Callable[[], None]) -> None:
        """Writes to the journal, and wakes the trackers."""
        if self._finished:
            return
        try:
            write()
        except OSError as error:
            self._count(METRICS, "write", error)
        else:
            if self._errors.get(METRICS) and not self._journal.missing:
                del self._errors[METRICS]  # what failed before is written now
        for delivery in self._deliveries.values():
            delivery.notify()

    def _count(self, name: str, method: str, error: Exception) -> None:
        message = redact_text(f"{method}: {type(error).__name__}: {error}")
        if name not in self._errors:
            _log.error("tracker %s failed, the run continues: %s", name, message)
        self._errors.setdefault(name, []).append(message)


def _least_traces(choice: Any, kind: str) -> int:
    """Returns how many traces a tracker wants at least, by its settings."""
    name = kind if hasattr(type(choice), kind) else "traces"
    return int(getattr(choice, name)) if hasattr(type(choice), name) else 0


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def start(choice: TrackerChoice, run: RunInfo) -> MultiTracker:
    """Starts the chosen tracker, or each of those that `combine` joined.

    Raises:
        ConfigError: A setting is invalid, or an address does not answer.
        MissingExtraError: A tracker's package is not installed.
        OutputError: A file cannot be written in the run's folder.
    """
    return MultiTracker(parts(choice), run)


def check_trackers(choice: TrackerChoice) -> None:
    """Tries the address of each tracker that has one, before anything is written or trained.

    Raises:
        ConfigError: It does not answer, or cannot be written.
    """
    part: Any
    for part in parts(choice).values():
        if hasattr(type(part), "check"):
            part.check()


def parts(choice: TrackerChoice) -> dict[str, TrackerChoice]:
    """Returns the chosen trackers by name."""
    if not hasattr(choice, "_names"):
        return {name_of("tracker", choice): choice}
    values = [getattr(choice, f.name) for f in fields(choice)]  # type: ignore[arg-type]
    return dict(zip(choice._names, values, strict=True))


@cache
def combine(names: str) -> type[Any]:
    """Makes the settings class of several trackers: a dataclass with one field for each.

    Example:
        >>> combine("mlflow,none")().mlflow.experiment
        'gspo_env'

    Raises:
        ConfigError: A name is unknown or repeated.
    """
    chosen = [name.strip() for name in names.split(",")]
    keys = [re.sub(r"\W", "_", name.rpartition(":")[2]).lower() for name in chosen]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"tracker is {names!r}; expected different names")
    classes = [find("tracker", name) for name in chosen]
    made = [(key, cls, field(default_factory=cls)) for key, cls in zip(keys, classes, strict=True)]
    return make_dataclass(
        "Trackers",
        made,
        namespace={
            "__doc__": "The settings of several trackers.",
            "__module__": __name__,
            "__reduce__": lambda self: (_remake, (names, [getattr(self, key) for key in keys])),
            "_names": tuple(chosen),
            "start": lambda self, run: MultiTracker(parts(self), run),
        },
        frozen=True,
        kw_only=True,
        slots=True,
    )


def _remake(names: str, values: Sequence[Any]) -> Any:
    """Unpickles an instance of `combine`'s class, which no module holds."""
    made = combine(names)
    return made(**{f.name: value for f, value in zip(fields(made), values, strict=True)})
