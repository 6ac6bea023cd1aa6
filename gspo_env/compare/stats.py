"""Honest numbers: intervals over tasks and seeds, pass@k, paired tests with correction."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np

from gspo_env.errors import ConfigError
from gspo_env.types import FloatArray


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


def interquartile_mean(values: Any, axis: int = -1) -> Any:
    """The mean of the middle half; as robust as the median and less noisy.

    Source:
        rliable, arXiv 2108.13264, section 4.3.
    """
    from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis=axis)


def interquartile_interval(
    strata: Sequence[FloatArray], *, confidence: float = 0.95, seed: int = 0, resamples: int = 2000
) -> tuple[FloatArray, FloatArray]:
    """Stratified bootstrap interval of the interquartile mean over all strata's runs.

    Runs are drawn within each stratum (a problem), so that each keeps its number of runs. Where
    there is one run only, or all are alike, the interval is that value.

    Shapes:
        strata: one (..., runs) array per problem; results: (...).

    Raises:
        ConfigError: There is no run.

    Source:
        rliable, arXiv 2108.13264, section 4.1.
    """
    from scipy.stats import bootstrap

    if not strata or any(rows.shape[-1] == 0 for rows in strata):
        raise ConfigError("there is no run to compute an interval of")
    if all(rows.shape[-1] == 1 for rows in strata):
        value = np.asarray(interquartile_mean(np.concatenate(strata, axis=-1)))
        return value, value

    def statistic(*samples: FloatArray, axis: int) -> Any:
        return interquartile_mean(np.concatenate(samples, axis=axis), axis)

    result = bootstrap(
        tuple(strata),
        statistic,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        axis=-1,
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return np.asarray(interval.low), np.asarray(interval.high)


def probability_of_improvement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The chance that a run of ours scores above a run of theirs; ties count one half.

    Source:
        Mann-Whitney U over the number of pairs; rliable, arXiv 2108.13264, section 4.3.
    """
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(ours, theirs).statistic / (len(ours) * len(theirs)))


def paired_permutation_test(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Two-sided p-value of the mean difference of pairs (of a seed), by exchanging within pairs.

    Exact up to 16 pairs; n pairs cannot give less than 2 / 2**n.

    Raises:
        ConfigError: The numbers of runs differ, or there is none.
    """
    from scipy.stats import permutation_test

    if len(ours) != len(theirs) or not len(ours):
        raise ConfigError(f"pairs need equally many runs; got {len(ours)} and {len(theirs)}")
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    if len(difference) == 1 or not difference.any():
        return 1.0
    result = permutation_test(
        (difference,),
        lambda d, axis: np.mean(d, axis=axis),
        permutation_type="samples",
        n_resamples=2**16,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def holm(pvalues: Sequence[float]) -> list[float]:
    """P-values adjusted so that one false alarm among all of them stays as rare as stated.

    Source:
        Holm 1979.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(pvalues), 0.0
    for rank, place in enumerate(np.argsort(pvalues, kind="stable")):
        largest = max(largest, min(1.0, (len(pvalues) - rank) * pvalues[place]))
        adjusted[place] = largest
    return adjusted


def _wilson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ConfigError(f"c is {c} with n = {n}; expected 0 <= c <= n")
    if not 1 <= k <= n:
        raise ConfigError(f"k is {k} with n = {n}; expected 1 <= k <= n")
