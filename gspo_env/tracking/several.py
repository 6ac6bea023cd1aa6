"""Trackers that record the same run: an error of one stops neither the run nor the others."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from gspo_env.errors import ConfigError, MissingExtraError, TrackingError
from gspo_env.redaction import redact, redact_text
from gspo_env.registry import find, name_of
from gspo_env.tracking.base import RunInfo, Status, Tracker, TrackerChoice, flatten
from gspo_env.tracking.journal import METRICS, Journal

_log = logging.getLogger(__name__)

NON_FINITE = "tracking/non_finite"
"""The metric that counts the values of a step that were dropped because they are not finite."""


class Several:
    """The started trackers of a run, as a context manager that finishes them.

    No method raises an error of a tracker: the first of each is logged at once, the others are
    counted, and `problems` lists at the end the trackers that did not record everything.

    Example:
        with start(MLflow(), RunInfo(name="first", folder=Path("runs/first"))) as tracker:
            tracker.log({"train/loss": 0.1}, step=1)
    """

    def __init__(self, choices: Mapping[str, TrackerChoice], run: RunInfo) -> None:
        """Starts each tracker.

        Raises:
            ConfigError: A setting is invalid.
            MissingExtraError: A tracker's package is not installed.
            OutputError: `metrics.jsonl` cannot be written in the run's folder.
        """
        self._trackers: dict[str, Tracker] = {}
        self._errors: dict[str, list[str]] = {}
        self._finished = False
        self._journal = Journal(run.folder, resumed=bool(run.resume))
        tags = {name: redact_text(value) for name, value in run.tags.items()}
        run = replace(run, params=flatten(redact(run.params)), tags=tags)
        for name, choice in choices.items():
            try:
                self._trackers[name] = choice.start(run)
            except (ConfigError, MissingExtraError):
                self.finish("FAILED")
                raise
            except Exception as error:
                self._count(name, "start", error)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        """Finishes as FINISHED, FAILED, or KILLED after an interrupt."""
        killed = exc_type is not None and issubclass(exc_type, KeyboardInterrupt)
        self.finish("FINISHED" if exc_type is None else "KILLED" if killed else "FAILED")
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
        try:
            self._journal.log(values, step)
        except OSError as error:
            self._count(METRICS, "log", error)
        self._each("log", lambda tracker: tracker.log(values, step))

    def text(self, name: str, text: str) -> None:
        """Stores a text under a name such as `episodes/step-0010.txt`, without secrets."""
        text = redact_text(text)
        self._each("text", lambda tracker: tracker.text(name, text))

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """Stores a file, or the files of a folder; keep them until `finish`."""
        self._each("artifact", lambda tracker: tracker.artifact(Path(path), folder))

    def finish(self, status: Status = "FINISHED") -> None:
        """Writes what is left and ends the run in each tracker; the first call counts."""
        self._each("finish", lambda tracker: tracker.finish(status))
        self._finished = True

    @property
    def how_to_look(self) -> str:
        """The commands and addresses that show the run."""
        found: list[str] = []
        for name, tracker in self._trackers.items():
            try:
                found.append(tracker.how_to_look)
            except Exception as error:
                self._count(name, "how_to_look", error)
        return " or ".join(filter(None, found))

    @property
    def ids(self) -> dict[str, str]:
        """The id of the run in each tracker, by name, for `RunInfo.resume`; empty if not known."""
        return {name: getattr(tracker, "id", "") for name, tracker in self._trackers.items()}

    @property
    def failed(self) -> set[str]:
        """Names of the trackers that did not record everything."""
        return set(self._errors)

    @property
    def problems(self) -> list[str]:
        """A sentence for each tracker that did not record everything."""
        return [
            f"{name} did NOT record everything: {len(errors)} "
            f"call{'s' * (len(errors) > 1)} failed, the first was {errors[0]}"
            for name, errors in self._errors.items()
        ]

    def _each(self, method: str, call: Callable[[Tracker], None]) -> None:
        if self._finished:
            return
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:
                self._count(name, method, error)

    def _count(self, name: str, method: str, error: Exception) -> None:
        found = [redact_text(f"{method}: {type(error).__name__}: {error}")]
        if isinstance(error, TrackingError):
            found = error.calls  # the tracker has logged them
        elif name not in self._errors:
            _log.error("tracker %s failed, the run continues: %s", name, found[0])
        self._errors.setdefault(name, []).extend(found)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def start(choice: TrackerChoice, run: RunInfo) -> Several:
    """Starts the chosen tracker, or each of those that `combine` joined.

    Raises:
        ConfigError: A setting is invalid.
        MissingExtraError: A tracker's package is not installed.
    """
    return Several(parts(choice), run)


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
            "start": lambda self, run: Several(parts(self), run),
        },
        frozen=True,
        kw_only=True,
        slots=True,
    )


def _remake(names: str, values: Sequence[Any]) -> Any:
    """Unpickles an instance of `combine`'s class, which no module holds."""
    made = combine(names)
    return made(**{f.name: value for f, value in zip(fields(made), values, strict=True)})
