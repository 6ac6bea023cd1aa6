"""How good a policy was in its evaluations, and whether it fell by more than chance.

A fall is success or return 5 standard errors (of two independent samples of episodes) below the
best evaluation, or 3.5 in two evaluations in a row. In addition, one of these must hold:

- Success is at most half of the best.
- The return is lower by one standard deviation of the returns, and by half of the gain since the
  first evaluation (half of the best, if there was no gain).

So neither chance nor a policy that oscillates by less than half counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from gspo_env.errors import ConfigError, figure
from gspo_env.rollout.metrics import Evaluation
from gspo_env.types import FloatArray

_CERTAIN = 5.0
"""Standard errors of a fall that is not chance, although the best is the highest of many."""
_LIKELY = 3.5
"""Standard errors of a fall that is not chance if two evaluations in a row show it."""
_LASTING = 3
"""Evaluations in a row for which a smaller fall has to last."""
_Z = NormalDist().inv_cdf(0.975)
"""Standard errors of a 95 % interval of a normal distribution."""


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


def may_be_chance(best: EvalSnapshot, last: EvalSnapshot, evaluations: int) -> bool:
    """Returns whether a higher success may be chance, at 5 % over all evaluations.

    The best of many evaluations is high by selection, so the level is divided by their number.
    """
    return success_fall(best, last) < NormalDist().inv_cdf(1 - 0.05 / max(1, evaluations))


def describe_fall(evaluations: Sequence[EvalSnapshot]) -> str:
    """Describes what the policy has lost since its best evaluation; empty if nothing."""
    last = len(evaluations) - 1
    if last < 1:
        return ""
    text = _fall(evaluations, _CERTAIN)
    if not text and last > 1 and _fall(evaluations[:last], _LIKELY):
        text = _fall(evaluations, _LIKELY)
    return text


def stays_lower(evaluations: Sequence[EvalSnapshot]) -> str:
    """Describes a success that was higher than in each of the last evaluations; empty if none.

    Success and return of each are below those of the best evaluation by more than chance. The fall
    may be smaller than that of `describe_fall`, since a policy that only oscillates recovers.
    """
    before, after = evaluations[:-_LASTING], evaluations[-_LASTING:]
    if not before:
        return ""
    best = max(before, key=lambda e: e.success)
    if any(min(success_fall(best, now), return_fall(best, now)) < _CERTAIN for now in after):
        return ""
    return _sentence("success", f"{after[-1].success:.1%}", f"{best.success:.1%}", after[-1], best)


def _fall(evaluations: Sequence[EvalSnapshot], threshold: float) -> str:
    """Describes what the last evaluation has lost by at least so many standard errors."""
    *before, now = evaluations
    best = max(before, key=lambda e: e.success)
    highest = max(before, key=lambda e: e.mean_return)
    gain = highest.mean_return - before[0].mean_return
    scale = gain / 2 if gain > 0 else abs(highest.mean_return) / 2
    success_drop, return_drop = best.success - now.success, highest.mean_return - now.mean_return
    if success_fall(best, now) >= threshold and success_drop >= best.success / 2:
        return _sentence("success", f"{now.success:.1%}", f"{best.success:.1%}", now, best)
    large = max(scale, highest.return_std, now.return_std)
    if return_fall(highest, now) >= threshold and return_drop >= large:
        values = figure(now.mean_return), figure(highest.mean_return)
        return _sentence("return", *values, now, highest)
    return ""


def _sentence(what: str, value: str, before: str, now: EvalSnapshot, best: EvalSnapshot) -> str:
    return f"{what} fell to {value} after step {now.step}, from {before} after step {best.step}"


def success_interval(
    successes_per_task: Sequence[Sequence[float]], *, tasks: int | None = None
) -> tuple[float, float]:
    """Computes a 95 % confidence interval of the success rate over tasks.

    It is Wilson's, with the effective number of samples: those of a task are not independent. Their
    design effect is the variance of the tasks' successes over that of independent samples, from 1
    to the samples of a task. Where successes or failures are rare, few tasks tell it, so half a
    task of the largest effect is added; and it is an estimate, so Student's quantile takes the
    place of the normal one. Of 4 to 256 tasks with 2 to 16 samples, at least 92.8 % of the
    intervals contain the rate (`studies/coverage.py`).

    Args:
        successes_per_task: The samples of each task, 0 or 1; their numbers may differ.
        tasks: The number of different tasks; by default every row is one.

    Raises:
        ConfigError: There is no task, a task has no samples, or a value is not 0 or 1.

    Source:
        Wilson 1927; effective samples: Korn and Graubard 1998; clustering by task: arXiv
        2411.00640, section 2.2.
    """
    rows = _rows(successes_per_task)
    sums, sizes = np.array([row.sum() for row in rows]), np.array([len(row) for row in rows])
    trials, rate = float(sizes.sum()), float(sums.sum() / sizes.sum())
    if tasks is not None and tasks < len(rows):
        return wilson_interval(rate, tasks)
    if len(rows) == 1 or sizes.max() == 1:
        return wilson_interval(rate, trials)
    if rate in (0.0, 1.0):
        return wilson_interval(rate, len(rows))
    from scipy.stats import t

    each, residuals = float(sizes.mean()), sums - rate * sizes
    effect = float(residuals @ residuals) / (len(rows) - 1) / each / (rate * (1 - rate))
    rare = min(rate, 1 - rate) * len(rows)
    effect = (rare * min(max(effect, 1.0), each) + 0.5 * each) / (rare + 0.5)
    wider = float(t.ppf(0.975, len(rows) - 1) / _Z) ** 2
    return wilson_interval(rate, max(trials / effect / wider, 1.0))


def _rows(successes_per_task: Sequence[Sequence[float]]) -> list[FloatArray]:
    rows = [np.asarray(row, dtype=np.float64).ravel() for row in successes_per_task]
    if not rows or not all(len(row) for row in rows):
        raise ConfigError(
            "successes_per_task has no rows or an empty row; expected samples of each task"
        )
    if not np.isin(np.concatenate(rows), (0.0, 1.0)).all():
        raise ConfigError("successes_per_task has other values; expected 0 or 1 for each sample")
    return rows


def wilson_interval(rate: float, trials: float) -> tuple[float, float]:
    """Computes Wilson's 95 % interval of a rate of success over a number of trials."""
    square = _Z**2 / trials
    centre = rate + square / 2
    half = sqrt(square * (rate * (1 - rate) + square / 4))
    return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))
