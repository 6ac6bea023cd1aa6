"""A run: what its folder, or a run in progress, has recorded.

The run in a folder may be finished, killed, still running, or of an older version, and the folder
may be untrusted: nothing in it is executed, and what is missing or damaged is left out.

Example:
    run = Run.open("runs/Lookup-v0-seed0-1")
    print(run.state, run.series["eval/success"].values)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gspo_env.config import Config, to_dict
from gspo_env.episodes.schema import PHASES
from gspo_env.errors import OutputError, raised_as
from gspo_env.files import (
    BATCHES,
    FAILURE,
    METRICS,
    MODEL,
    WHATIF,
    check_folder,
    left_out,
    parse_toml,
    read_file,
    saved_step,
)
from gspo_env.redaction import redact_text
from gspo_env.runs.evaluations import EvalSnapshot, return_fall, success_fall, wilson_interval
from gspo_env.tracking.base import flatten
from gspo_env.types import Episode, FloatArray, IntArray

if TYPE_CHECKING:
    from gspo_env.runs.effects import Effect

CONFIG, WARNINGS = "config.toml", "warnings.txt"
"""Names of files in the folder of a run."""
ENVIRONMENT_ERROR = "first-environment-error.txt"
_MAX_BYTES = 1 << 20
"""Bytes of a text file that are read."""
_MAX_METRICS = 1 << 28
"""Bytes of a file of metrics that is read."""
_SOLVED = 0.9
"""Success from which a run counts as solved: groups without variance are its end then."""
SIGNIFICANT = 2.0
"""Standard errors of a rise that counts as learning; lenient, so that slow runs pass."""
_LATE = 0.25
"""Share of the steps that the beginning and the end of a run have."""
_FEWEST = 3
"""Steps that both have at least, so that one step of chance does not decide."""
_EVAL_TASKS = 256
"""Tasks of an evaluation, if the config of the run cannot be read."""
_Z = 1.96
"""Standard errors of a 95 % interval."""
_MAX_STEP = 1 << 53
"""Every step below is exact as a float; only a damaged file has a higher one."""
_MAX_VALUE = 1e100
"""Sums and squares of smaller values are finite; only a damaged file has larger ones."""

History = Sequence[tuple[int, Mapping[str, float]]]
"""The metrics of each step."""
Points = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Steps and values of each metric."""


def is_complete(step: int, success: float, steps: float, stop_at_success: float) -> bool:
    """Returns whether a run ends after a step.

    Args:
        step: The step.
        success: The success of its evaluation; 0 without one.
        steps: The setting.
        stop_at_success: The setting.
    """
    return step >= steps or (step > 0 and 0 < stop_at_success <= success)


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """The finite values of a metric."""

    steps: IntArray
    """(N,) in ascending order."""
    values: FloatArray
    """(N,)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run has recorded; of a run in progress, what it has recorded so far."""

    settings: Mapping[str, Any]
    """By dotted name; empty if unknown. Those that are missing count as the defaults."""
    series: Mapping[str, Series]
    """By name of the metric."""
    steps: IntArray
    """The training steps that were logged."""
    evaluations: tuple[EvalSnapshot, ...]
    """The evaluations in order."""
    window: int
    """Number of steps that count as the beginning, and as the end."""
    folder: Path = Path()
    name: str = ""
    config: str = ""
    """The text of `config.toml`."""
    dtype: str = ""
    """The dtype of the trained weights; empty if unknown."""
    warnings: tuple[str, ...] = ()
    """What the run warned of, as `name: sentence`."""
    failure: str = ""
    """The error that ended the run; empty if none did."""
    environment_error: str = ""
    """The first failure of an environment; empty if none failed."""
    finished: bool = False
    """Whether the run has saved the model of its last step."""

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Reads the folder of a run.

        Raises:
            OutputError: It is not the folder of a run.
        """
        path = Path(folder)
        if not (path / METRICS).is_file():
            raise OutputError(f"{str(folder)!r} has no {METRICS}; expected the folder of a run")
        check_folder(path)
        config = read_text(path / CONFIG)
        settings, points = _settings(config), _read_points(path)
        run = cls.of(
            settings,
            points,
            folder=path,
            name=path.resolve().name,
            config=config,
            dtype=_trained_dtype(path, settings),
            warnings=tuple(line for line in read_text(path / WARNINGS).splitlines() if line),
            failure=read_text(path / FAILURE).strip(),
            environment_error=read_text(path / ENVIRONMENT_ERROR).strip(),
        )
        # `compare` keeps no model
        done = saved_step(path / MODEL)
        finished = (path / MODEL).is_dir() and (done is None or run.is_complete(done))
        return replace(run, finished=finished)

    @classmethod
    def of(cls, settings: Mapping[str, Any], points: Points, **fields: Any) -> Self:
        """Makes a run of metrics; values that are not finite are left out."""
        series = {name: s for name, pair in points.items() if len((s := _series(*pair)).steps)}
        trained = [each.steps for name, each in series.items() if name.startswith("rollout/")]
        steps = np.unique(np.concatenate(trained)) if trained else np.zeros(0, np.int64)
        count = len(steps)
        window = max(1, min(count // 2, max(_FEWEST, math.ceil(_LATE * count))))
        return cls(
            settings=settings,
            series=series,
            steps=steps,
            evaluations=tuple(_evaluations(series, settings.get("eval_tasks"))),
            window=window,
            **fields,
        )

    @classmethod
    def in_progress(cls, config: Config, history: History) -> Self:
        """Makes a run of the metrics that it has logged so far."""
        points: dict[str, tuple[list[float], list[float]]] = {}
        for step, metrics in sorted(history, key=lambda entry: entry[0]):
            for name, value in metrics.items():
                steps, values = points.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        return cls.of(flatten(to_dict(config)), points)

    def episodes(
        self, phases: Collection[str] = PHASES, steps: Collection[int] | None = None
    ) -> list[Episode]:
        """Returns the episodes that the run has kept; see `gspo_env.episodes.read_episodes`.

        Raises:
            OutputError: It has kept none, or one is damaged.
        """
        from gspo_env.episodes.records import read_episodes
        from gspo_env.episodes.restore import to_episode

        return [*map(to_episode, read_episodes(self.folder, phases=phases, steps=steps))]

    def effects(self) -> dict[int, dict[str, Effect]]:
        """Returns what `gspo-env whatif` recorded about the kept batches, by step and arm."""
        if not any(self.folder.glob(f"{BATCHES}/*/{WHATIF}")):
            return {}
        from gspo_env.runs.effects import read_effects

        return read_effects(self.folder)

    def number(self, name: str) -> float | None:
        """Returns a setting that is a finite number, else None."""
        value = self.settings.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if abs(value) < _MAX_VALUE else None

    def text(self, name: str) -> str:
        """Returns a setting as text, empty if unknown."""
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

    def highest(self, name: str) -> float:
        """Returns the highest value of a metric, 0 if it was not logged."""
        return float(self.series[name].values.max()) if name in self.series else 0.0

    def interval(self, name: str) -> tuple[FloatArray, FloatArray] | None:
        """Returns the 95 % intervals of a mean over the tasks of evaluations, else None.

        Episodes of the same task count once, since they are not independent.
        """
        tasks, spread = self.series.get("eval/tasks"), self.series.get("eval/return_std")
        curve = self.series[name]
        if tasks is None or not np.array_equal(tasks.steps, curve.steps):
            return None
        if name in ("eval/success", "eval/success_greedy"):
            bounds = [
                wilson_interval(float(value), float(count))
                for value, count in zip(curve.values.clip(0, 1), tasks.values.clip(1), strict=True)
            ]
            return np.array([low for low, _ in bounds]), np.array([high for _, high in bounds])
        if name == "eval/return" and spread is not None:
            half = _Z * spread.values / np.sqrt(tasks.values.clip(1))
            return curve.values - half, curve.values + half
        return None

    def mean(self, name: str, steps: IntArray) -> float | None:
        """Returns the mean of a metric over some steps; None if it was not logged there."""
        if name not in self.series:
            return None
        series = self.series[name]
        values = series.values[np.isin(series.steps, steps)]
        return float(values.mean()) if len(values) else None

    @property
    def episodes_per_step(self) -> float:
        """Mean number of training episodes of a step."""
        before = self.series.get("rollout/episodes_before")
        if before is not None and len(before.steps) > 1 and np.ptp(before.values):
            return float(np.ptp(before.values) / np.ptp(before.steps))
        default = Config()
        tasks = self.number("tasks_per_step") or default.tasks_per_step
        return max(1.0, tasks * (self.number("rollout.group_size") or default.rollout.group_size))

    def training(self, steps: IntArray) -> EvalSnapshot | None:
        """Returns how good the policy was in some training steps; None if that was not logged."""
        names = ("success", "return", "return_std")
        means = {name: self.mean(f"rollout/{name}", steps) for name in names}
        if means["success"] is None:
            return None
        return EvalSnapshot.from_metrics(
            int(steps[-1]),
            {f"rollout/{name}": mean for name, mean in means.items() if mean is not None},
            round(len(steps) * self.episodes_per_step),
            prefix="rollout",
        )

    @property
    def pairs(self) -> Iterator[tuple[EvalSnapshot, EvalSnapshot]]:
        """The first and the last evaluation, then the beginning and the end of training."""
        if len(self.evaluations) > 1:
            yield self.evaluations[0], self.evaluations[-1]
        first, last = (
            self.training(self.steps[: self.window]),
            self.training(self.steps[-self.window :]),
        )
        if first is not None and last is not None:
            yield first, last

    @property
    def improved(self) -> bool:
        """Whether success or return rose by more than chance, in evaluations or in training."""
        return any(
            max(success_fall(last, first), return_fall(last, first)) >= SIGNIFICANT
            for first, last in self.pairs
        )

    @property
    def solved(self) -> bool:
        """Whether the policy succeeds nearly always at the end."""
        success = [e.success for e in self.evaluations[-1:]]
        return max([*success, self.late("rollout/success") or 0.0]) >= _SOLVED

    def is_complete(self, step: int) -> bool:
        """Returns whether the run ends after a step."""
        success = next((e.success for e in self.evaluations if e.step == step), 0.0)
        steps, stop = self.number("steps") or 0.0, self.number("stop_at_success") or 0.0
        return is_complete(step, success, steps, stop)

    @property
    def progress(self) -> str:
        """The steps that were logged, of those that the settings ask for."""
        done, planned = int(max(self.steps, default=0)), self.number("steps")
        if planned is None:
            return f"{done} steps"
        reached = ", stop_at_success reached" if done < planned and self.is_complete(done) else ""
        return f"{done} of {planned:.0f} steps{reached}"

    @property
    def state(self) -> str:
        """Says in a few words how far the run came."""
        if self.failure:
            return f"{self.progress}, ended by an error"
        if not self.is_complete(int(max(self.steps, default=0))):
            return f"{self.progress}, stopped early or still running"
        return (
            self.progress if self.finished else f"{self.progress}, no trained model in the folder"
        )


def _series(steps: Sequence[float], values: Sequence[float]) -> Series:
    rows = [
        (step, value)
        for step, value in zip(steps, values, strict=True)
        if abs(value) < _MAX_VALUE and step < _MAX_STEP
    ]
    return Series(
        steps=np.asarray([step for step, _ in rows], np.int64),
        values=np.asarray([value for _, value in rows], np.float64),
    )


def _evaluations(series: Mapping[str, Series], tasks: object) -> Iterator[EvalSnapshot]:
    count = tasks if isinstance(tasks, int) and 0 < tasks < _MAX_STEP else _EVAL_TASKS
    rows: dict[int, dict[str, float]] = {}
    for name, each in series.items():
        if name.startswith("eval/"):
            for step, value in zip(each.steps.tolist(), each.values.tolist(), strict=True):
                rows.setdefault(step, {})[name] = value
    for step, metrics in sorted(rows.items()):
        if "eval/success" in metrics:
            yield EvalSnapshot.from_metrics(step, metrics, count)


def _read_points(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Reads steps and values of each metric; of a step that was run twice, the last.

    The last line is left out if it has not been written to its end.
    """
    metrics: dict[str, dict[int, float]] = {}
    with raised_as(OutputError, f"cannot read {str(folder / METRICS)!r}", OSError):
        lines = read_file(folder, METRICS, _MAX_METRICS).split(b"\n")[:-1]
    for line in lines:
        with left_out(f"a line of {METRICS}"):
            record = json.loads(line)
            step = int(record["step"])
            values = {str(name): float(value) for name, value in record["metrics"].items()}
            for name, value in values.items():
                metrics.setdefault(name, {})[step] = value
    sorted_points = {name: dict(sorted(points.items())) for name, points in metrics.items()}
    return {name: (list(points), list(points.values())) for name, points in sorted_points.items()}


def _settings(text: str) -> dict[str, Any]:
    try:
        return flatten(parse_toml(text))
    except (ValueError, RecursionError):
        return {}


def read_text(path: Path) -> str:
    """Reads the beginning of a text, without secrets; empty if there is none."""
    if not path.is_file():  # a pipe or a device may never end
        return ""
    try:
        with path.open("rb") as file:
            return redact_text(file.read(_MAX_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def _trained_dtype(folder: Path, settings: dict[str, Any]) -> str:
    """Returns the dtype of the weights as the settings or a saved model name it, else nothing."""
    dtype = str(settings.get("model_dtype", ""))
    if dtype not in ("", "auto"):
        return dtype
    for model in (folder / MODEL, *sorted(folder.glob("checkpoints/*/model"))):
        text = read_text(model / "config.json")
        if match := re.search(r'"(?:torch_)?dtype"\s*:\s*"(\w+)"', text):
            return match[1]
    return ""
