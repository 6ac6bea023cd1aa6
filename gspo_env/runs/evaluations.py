"""How good a policy was in its evaluations, and whether one differs from another by chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from gspo_env.errors import ConfigError
from gspo_env.rollout.metrics import Evaluation
from gspo_env.types import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSnapshot:
    """How good a policy was in one evaluation."""

    step: int
    episodes: int
    success: float
    mean_return: float
    return_std: float

    @classmethod
    def of(cls, step: int, evaluation: Evaluation) -> EvalSnapshot:
        """Summarises the sampled episodes of an evaluation."""
        stats = evaluation.sampled
        return cls(
            step=step,
            episodes=sum(not e.failed for group in evaluation.groups for e in group.episodes),
            success=stats.success,
            mean_return=stats.mean_return,
            return_std=stats.return_std,
        )

    @classmethod
    def from_metrics(
        cls, step: int, metrics: Mapping[str, float], episodes: int, *, prefix: str = "eval"
    ) -> EvalSnapshot:
        """Reads a snapshot from logged metrics; an unknown spread of returns is infinite."""
        return cls(
            step=step,
            episodes=episodes,
            success=metrics[f"{prefix}/success"],
            mean_return=metrics.get(f"{prefix}/return", 0.0),
            return_std=metrics.get(f"{prefix}/return_std", float("inf")),
        )


def success_fall(best: EvalSnapshot, now: EvalSnapshot) -> float:
    """Returns the standard errors by which success is lower than at the best; 0 if it is not."""
    variances = [e.success * (1 - e.success) for e in (best, now)]
    return _standard_errors(best.success - now.success, variances, best, now)


def return_fall(best: EvalSnapshot, now: EvalSnapshot) -> float:
    """Returns the standard errors by which the return is lower than at the best, or 0."""
    variances = [best.return_std**2, now.return_std**2]
    return _standard_errors(best.mean_return - now.mean_return, variances, best, now)


def _standard_errors(
    drop: float, variances: Sequence[float], best: EvalSnapshot, now: EvalSnapshot
) -> float:
    """Returns a fall in standard errors, with the variance of both samples together.

    So a handful of episodes without any spread proves nothing: the result is at most the root of
    the number of episodes in both.
    """
    counts = (best.episodes, now.episodes)
    if not all(counts) or not drop > 0:
        return 0.0
    total = sum(counts)
    within = sum(n * v for n, v in zip(counts, variances, strict=True)) / total
    between = counts[0] * counts[1] * (drop / total) ** 2
    return drop / sqrt((within + between) * (1 / counts[0] + 1 / counts[1]))


def success_interval(
    successes_per_task: Sequence[Sequence[float]], *, tasks: int | None = None
) -> tuple[float, float]:
    """Computes a 95 % confidence interval of the success rate over tasks.

    Uses Wilson's interval if each task has one sample. Otherwise a percentile bootstrap resamples
    tasks and keeps the samples of a task together, because they are not independent. Wilson's
    interval replaces it where there is nothing to resample: over the samples of a single task, and
    with one trial per task for equal rates in all tasks or fewer tasks than rows.

    Args:
        successes_per_task: The samples of each task, 0 or 1; their numbers may differ.
        tasks: The number of different tasks; by default every row is one.

    Raises:
        ConfigError: There is no task, a task has no samples, or a value is not 0 or 1.

    Source:
        Wilson 1927; Efron 1979; clustering by task: arXiv 2411.00640, section 2.2.
    """
    rows = _rows(successes_per_task)
    sums, sizes = np.array([row.sum() for row in rows]), np.array([len(row) for row in rows])
    rates = sums / sizes
    if tasks is not None and tasks < len(rows):
        return wilson_interval(round(float(sums.sum() / sizes.sum()) * tasks), tasks)
    if len(rows) == 1 or sizes.max() == 1:
        return wilson_interval(int(sums.sum()), int(sizes.sum()))
    if np.ptp(rates) == 0:
        return wilson_interval(round(float(rates.sum())), len(rates))
    from scipy.stats import bootstrap

    def rate(sums: FloatArray, sizes: FloatArray, axis: int) -> Any:
        return sums.sum(axis) / sizes.sum(axis)

    options = {"paired": True, "vectorized": True, "method": "percentile", "rng": 0}
    result = bootstrap((sums, sizes), rate, **options)
    low, high = result.confidence_interval
    return float(low), float(high)


def _rows(successes_per_task: Sequence[Sequence[float]]) -> list[FloatArray]:
    rows = [np.asarray(row, dtype=np.float64).ravel() for row in successes_per_task]
    if not rows or not all(len(row) for row in rows):
        raise ConfigError(
            "successes_per_task has no rows or an empty row; expected samples of each task"
        )
    if not np.isin(np.concatenate(rows), (0.0, 1.0)).all():
        raise ConfigError("successes_per_task has other values; expected 0 or 1 for each sample")
    return rows


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Computes Wilson's 95 % interval of a rate of success."""
    from scipy.stats import binomtest

    low, high = binomtest(successes, trials).proportion_ci(method="wilson")
    return float(low), float(high)
