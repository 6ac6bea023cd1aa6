"""Reads the folder of a run as data: settings, metrics, warnings and how it ended.

The run may be finished, killed, still going on, or of an older version. Nothing in the folder is
run, and what is missing or damaged is left out.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspo_env.config import Config
from gspo_env.episodes.page import read_points
from gspo_env.errors import OutputError
from gspo_env.health.collapse import EvalSnapshot
from gspo_env.redaction import redact_text
from gspo_env.tracking.base import MODEL, flatten
from gspo_env.tracking.jsonl import METRICS
from gspo_env.training.checkpoints import FAILURE
from gspo_env.types import FloatArray, IntArray

CONFIG = "config.toml"
"""Settings that are not known there count as the defaults of `Config`."""
_MOST_TEXT = 1 << 20
"""Bytes of a text file that are read."""
_MOST = 1 << 53
"""A step below which every number is exact; only a damaged file has more."""
_LATE = 0.25
"""Share of the steps that the beginning and the end of a run have."""
_FEWEST = 3
"""Steps that both have at least, so that one step of chance does not decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """The finite values of a metric."""

    steps: IntArray
    """(N,) in ascending order."""
    values: FloatArray
    """(N,)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What the folder of a run says."""

    folder: Path
    name: str
    settings: Mapping[str, Any]
    """By dotted name; empty if the folder has no settings."""
    config: str
    """The text of `config.toml`."""
    series: Mapping[str, Series]
    """By name of the metric."""
    steps: IntArray
    """The training steps that were logged."""
    evaluations: tuple[EvalSnapshot, ...]
    """The evaluations in order, as far as the metrics say."""
    warnings: tuple[str, ...]
    """What the run said while it went on, as `name: sentence`."""
    failure: str
    """The error that ended the run; empty if none did."""
    environment_error: str
    """The first failure of an environment; empty if none failed."""
    model: bool
    """Whether the folder has a trained model, as after the last step."""

    @property
    def window(self) -> int:
        """Number of steps that count as the beginning, and as the end."""
        count = len(self.steps)
        return max(1, min(count // 2, max(_FEWEST, math.ceil(_LATE * count))))

    def number(self, name: str) -> float | None:
        """Returns a setting that is a finite number, else None."""
        value = self.settings.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    def text(self, name: str) -> str:
        """Returns a setting as text, empty if it is not known."""
        return str(self.settings.get(name, ""))

    def early(self, name: str) -> float | None:
        """Returns the mean of a metric over the first steps; None if it was not logged there."""
        return self.mean(name, self.steps[: self.window])

    def late(self, name: str) -> float | None:
        """Returns the mean of a metric over the last steps; None if it was not logged there."""
        return self.mean(name, self.steps[-self.window :])

    def total(self, name: str) -> float:
        """Returns the sum of a metric over all steps."""
        return float(self.series[name].values.sum()) if name in self.series else 0.0

    def mean(self, name: str, steps: IntArray) -> float | None:
        """Returns the mean of a metric over some steps; None if it was not logged there."""
        if name not in self.series:
            return None
        found = self.series[name]
        values = found.values[np.isin(found.steps, steps)]
        return float(values.mean()) if len(values) else None

    @property
    def episodes_per_step(self) -> float:
        """Mean number of training episodes of a step."""
        before = self.series.get("rollout/episodes_before")
        if before is not None and len(before.steps) > 1 and np.ptp(before.values):
            return float(np.ptp(before.values) / np.ptp(before.steps))
        usual = Config()
        tasks = self.number("tasks_per_step") or usual.tasks_per_step
        return max(1.0, tasks * (self.number("rollout.group_size") or usual.rollout.group_size))

    def training(self, *, late: bool) -> EvalSnapshot | None:
        """Returns how good the policy was in the first or in the last steps of training."""
        mean = self.late if late else self.early
        success = mean("rollout/success")
        if success is None:
            return None
        steps = self.steps[-self.window :] if late else self.steps[: self.window]
        return EvalSnapshot(
            step=int(steps[-1]),
            episodes=round(self.window * self.episodes_per_step),
            success=success,
            mean_return=mean("rollout/return") or 0.0,
            spread=_known(mean("rollout/return_std")),
            turns=mean("rollout/turns"),
        )

    @property
    def progress(self) -> str:
        """The steps that were logged, of those that the settings ask for."""
        done, planned = int(max(self.steps, default=0)), self.number("steps")
        return f"{done} steps" if planned is None else f"{done} of {planned:.0f} steps"

    @property
    def state(self) -> str:
        """Says in a few words how far the run came."""
        if self.failure:
            return f"{self.progress}, ended by an error"
        if max(self.steps, default=0) < (self.number("steps") or 0):
            return f"{self.progress}, stopped early or still going on"
        return self.progress if self.model else f"{self.progress}, no trained model in the folder"


def _known(spread: float | None) -> float:
    """Returns a spread; one that is not known is infinite, so that no difference counts."""
    return math.inf if spread is None else spread


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run.

    Raises:
        OutputError: This is not the folder of a run.
    """
    path = Path(folder)
    try:
        if not (path / METRICS).is_file():
            raise OutputError(f"{str(folder)!r} has no {METRICS}; expected the folder of a run")
        points = read_points(path)
    except OSError as error:
        raise OutputError(f"cannot read {str(path / METRICS)!r}: {error.strerror}") from error
    config = _read(path / CONFIG)
    settings = _settings(config)
    series = {name: s for name, pair in points.items() if len((s := _series(*pair)).steps)}
    trained = [each.steps for name, each in series.items() if name.startswith("rollout/")]
    return RunRecord(
        folder=path,
        name=path.resolve().name,
        settings=settings,
        config=config,
        series=series,
        steps=np.unique(np.concatenate(trained)) if trained else np.zeros(0, np.int64),
        evaluations=tuple(_evaluations(series, settings.get("eval_tasks"))),
        warnings=tuple(line for line in _read(path / "warnings.txt").splitlines() if line),
        failure=_read(path / FAILURE).strip(),
        environment_error=_read(path / "first-environment-error.txt").strip(),
        model=(path / MODEL).is_dir(),
    )


def runs_in(folder: str | Path) -> list[Path]:
    """Returns the runs in a folder by name; the folder itself if it is a run, or has none."""
    path = Path(folder)
    if (path / METRICS).is_file() or not path.is_dir():
        return [path]
    return sorted(p for p in path.iterdir() if (p / METRICS).is_file()) or [path]


def _series(steps: list[float], values: list[float]) -> Series:
    kept = [(n, v) for n, v in zip(steps, values, strict=True) if math.isfinite(v) and n < _MOST]
    return Series(
        steps=np.asarray([n for n, _ in kept], np.int64), values=np.asarray([v for _, v in kept])
    )


def _evaluations(series: Mapping[str, Series], tasks: object) -> Iterator[EvalSnapshot]:
    count = tasks if isinstance(tasks, int) and tasks > 0 else Config().eval_tasks
    rows: dict[int, dict[str, float]] = {}
    for name, each in series.items():
        if name.startswith("eval/"):
            for step, value in zip(each.steps.tolist(), each.values.tolist(), strict=True):
                rows.setdefault(step, {})[name] = value
    for step, metrics in sorted(rows.items()):
        if "eval/success" in metrics:
            yield EvalSnapshot.recorded(step, {"eval/return_std": _known(None), **metrics}, count)


def _settings(text: str) -> dict[str, Any]:
    try:
        return flatten(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def _read(path: Path) -> str:
    """Reads the beginning of a text, without secrets; empty if there is none."""
    if not path.is_file():  # a pipe or a device may never end
        return ""
    try:
        with path.open("rb") as file:
            return redact_text(file.read(_MOST_TEXT).decode(errors="replace"))
    except OSError:
        return ""


def trained_dtype(run: RunRecord) -> str:
    """Returns the dtype of the weights as the settings or a saved model name it, else nothing."""
    named = run.text("model_dtype")
    if named not in ("", "auto"):
        return named
    places = [run.folder / MODEL, *sorted(run.folder.glob("checkpoints/*/model"))]
    for place in places:
        if found := re.search(r'"(?:torch_)?dtype"\s*:\s*"(\w+)"', _read(place / "config.json")):
            return found[1]
    return ""
