"""Honest numbers about success: intervals over tasks, pass@k and pass^k."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from gspo_env.errors import ConfigError


def success_interval(
    successes_per_task: Sequence[Sequence[float]], *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """The interval of the success rate over tasks.

    Wilson's where each task was tried once. Else a percentile bootstrap that draws tasks and
    keeps a task's samples together, because they are not independent. Where that has nothing to
    draw from (one task) Wilson's over its samples; where every task has the same rate, Wilson's
    with one try a task, since a bootstrap would claim a width of zero.

    Shapes:
        successes_per_task: one row per task, its samples as 0 or 1.

    Raises:
        ConfigError: There is no task, or a task without samples, or a value that is not 0 or 1.

    Source:
        Wilson 1927; Efron 1979; clustering by task: arXiv 2411.00640, section 2.2.
    """
    rows = [np.asarray(row, dtype=np.float64).ravel() for row in successes_per_task]
    if not rows or not all(len(row) for row in rows):
        raise ConfigError(
            "successes_per_task has an empty row or none; expected samples of each task"
        )
    values = np.concatenate(rows)
    if not np.isin(values, (0.0, 1.0)).all():
        raise ConfigError("successes_per_task holds other values; expected 0 or 1 for each sample")
    means = np.array([row.mean() for row in rows])
    if len(rows) == 1 or all(len(row) == 1 for row in rows):
        return _wilson(int(values.sum()), len(values), confidence)
    if np.ptp(means) == 0:
        return _wilson(round(float(means.sum())), len(means), confidence)
    from scipy.stats import bootstrap

    result = bootstrap(
        (means,),
        np.mean,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased chance that at least one of k samples succeeds, from c successes in n.

    Raises:
        ConfigError: Not 0 <= c <= n, or not 1 <= k <= n.

    Source:
        arXiv 2107.03374, eq. 1.
    """
    _check_counts(n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """The unbiased chance that all of k samples succeed, from c successes in n.

    Raises:
        ConfigError: Not 0 <= c <= n, or not 1 <= k <= n.

    Source:
        arXiv 2406.12045, section 3 (pass^k).
    """
    _check_counts(n, c, k)
    return comb(c, k) / comb(n, k)


def _wilson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ConfigError(f"c is {c} with n = {n}; expected 0 <= c <= n")
    if not 1 <= k <= n:
        raise ConfigError(f"k is {k} with n = {n}; expected 1 <= k <= n")
