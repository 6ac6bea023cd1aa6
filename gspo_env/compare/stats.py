"""Statistics of comparisons: intervals, pass@k, and corrected paired tests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, comb, floor, log2
from typing import Any

import numpy as np

from gspo_env.errors import ConfigError
from gspo_env.types import FloatArray

_FEWEST_RUNS = 6
"""Runs from which there is an interval of their interquartile mean."""
_EXACT_PAIRS = 16
"""Pairs up to which all exchanges are listed."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimates P(at least one of k samples succeeds) without bias, from c of n successes.

    Raises:
        ConfigError: `0 <= c <= n` or `1 <= k <= n` does not hold.

    Source:
        arXiv 2107.03374, eq. 1.
    """
    _check_counts(n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Estimates P(all of k samples succeed) without bias, from c of n successes.

    Raises:
        ConfigError: `0 <= c <= n` or `1 <= k <= n` does not hold.

    Source:
        arXiv 2406.12045, section 3 (pass^k).
    """
    _check_counts(n, c, k)
    return comb(c, k) / comb(n, k)


def interquartile_mean(values: Any, axis: int = -1) -> Any:
    """Computes the mean of the middle half: robust to outliers, and less noisy than the median.

    Source:
        rliable, arXiv 2108.13264, section 4.3.
    """
    from scipy.stats import trim_mean

    return trim_mean(values, 0.25, axis=axis)


def interquartile_interval(
    values: Any, *, confidence: float = 0.95, seed: int = 0, resamples: int = 2000
) -> tuple[FloatArray, FloatArray]:
    """Computes a bootstrap interval of the interquartile mean over runs.

    Plain percentiles are too narrow with few runs. So the confidence level is raised by as much as
    a t interval is wider than a normal one. Of the intervals of 6 to 14 runs, 93 to 97 % contain
    the interquartile mean of the distribution (`studies/coverage.py`). With 5 runs or fewer no
    resample is far enough out, and the interval is their range, see `interval_name`. It contains
    the median of the distribution with probability 1 - 2^(1 - n).

    Shapes:
        values: (..., runs); bounds: (...).

    Raises:
        ConfigError: There is no run.

    Source:
        rliable, arXiv 2108.13264, section 4.1; expanded percentiles: Hesterberg, arXiv 1411.5279.
    """
    from scipy.stats import bootstrap, norm, t

    values = np.asarray(values, dtype=float)
    runs = values.shape[-1]
    if not runs:
        raise ConfigError("there are no runs; expected at least one")
    if runs < _FEWEST_RUNS:
        middle = interquartile_mean(values)  # rounded, so it may be outside of equal values
        return np.minimum(values.min(-1), middle), np.maximum(values.max(-1), middle)
    low, high = bootstrap(
        (values,),
        interquartile_mean,
        n_resamples=resamples,
        confidence_level=1 - 2 * norm.sf(t.ppf((1 + confidence) / 2, runs - 1)),
        method="percentile",
        axis=-1,
        rng=seed,
    ).confidence_interval
    return np.asarray(low), np.asarray(high)


def interval_name(runs: int) -> str:
    """Names what `interquartile_interval` returns for a number of runs."""
    return "range" if runs < _FEWEST_RUNS else "95 % interval"


def probability_of_improvement(
    ours: Sequence[float] | FloatArray, theirs: Sequence[float] | FloatArray
) -> float:
    """Estimates P(a run of `ours` scores above a run of `theirs`); ties count one half.

    A run that failed scores minus infinity: it is below every other and ties with its like.

    Source:
        Mann-Whitney U divided by the number of pairs; rliable, arXiv 2108.13264, section 4.3.
    """
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(ours, theirs).statistic / (len(ours) * len(theirs)))


def paired_permutation_test(
    ours: Sequence[float] | FloatArray, theirs: Sequence[float] | FloatArray
) -> float:
    """Computes the two-sided p-value of the mean paired difference by exchanges within pairs.

    The test is exact up to 16 pairs. The smallest p-value of n pairs is 2 / 2**n.

    Raises:
        ConfigError: The numbers of runs differ, or there are none.
    """
    from scipy.stats import permutation_test

    if len(ours) != len(theirs) or not len(ours):
        raise ConfigError(
            f"the arms have {len(ours)} and {len(theirs)} runs; expected equal numbers above 0"
        )
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    if len(difference) == 1 or not difference.any():
        return 1.0
    result = permutation_test(
        (difference,), np.mean, permutation_type="samples", n_resamples=2**_EXACT_PAIRS, rng=0
    )
    return float(result.pvalue)


def sequential_test(
    differences: Sequence[float] | FloatArray, looks: Sequence[int], level: float
) -> tuple[float, int]:
    """Tests a mean paired difference each time that more pairs are there, until one look decides.

    As in `paired_permutation_test`, signs are exchanged within pairs. The looks share the level in
    proportion to their pairs: what earlier looks could have decided is taken from later ones, so
    the probability that any look decides wrongly is at most the level. The test is exact up to 16
    pairs; of more, it draws 2**16 exchanges, the same ones at each look. The usual boundaries are
    those of normal sums, which the first look at 4 pairs does not have.

    Args:
        differences: Those of the pairs that are there, at least as many as at the first look.
        looks: Numbers of pairs at which is tested, increasing; the last are all pairs.
        level: The two-sided level.

    Returns:
        The p-value, by the order of the looks, and the look's pairs. If a look decided, the p-value
        is at most the level; else it is that of the last look that was possible.

    Source:
        Lan and DeMets 1983, with the linear spending function of Kim and DeMets 1987; p-value:
        Armitage 1957.

    Example:
        >>> sequential_test([0.2] * 6, looks=(6, 9, 12), level=0.05)
        (0.03125, 6)
    """
    values, most = np.asarray(differences, dtype=np.float64), looks[-1]
    if most > _EXACT_PAIRS:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), (2**_EXACT_PAIRS, most))
        signs[0] = 1.0  # what was seen
    else:
        signs = 1.0 - 2.0 * (np.arange(2**most)[:, None] >> np.arange(most) & 1)
    possible = [pairs for pairs in looks if pairs <= len(values)]
    undecided, spent, p = np.ones(len(signs), dtype=bool), 0.0, 1.0
    for pairs in possible:
        sums = np.abs(signs[:, :pairs] @ values[:pairs])
        seen = sums[0] - 1e-9 * np.abs(values[:pairs]).sum()  # rounded, equal sums may differ
        p = spent + float(np.mean(undecided & (sums >= seen))) if values[:pairs].any() else 1.0
        allowed = level * pairs / most
        if p <= allowed or pairs == possible[-1]:
            return min(1.0, p), pairs
        bounds = np.sort(sums[undecided])[::-1]
        count = int((allowed - spent) * len(signs))  # the most exchanges that may decide here
        decided = undecided & (sums > bounds[count] + 1e-9 * bounds[0]) if bounds[0] else ~undecided
        decided &= undecided
        spent, undecided = spent + float(decided.mean()), undecided & ~decided
    return p, 0


def looks_of(pairs: int) -> tuple[int, ...]:
    """Returns the looks of a sequential test: after a half, three quarters and all of the pairs.

    Example:
        >>> looks_of(10)
        (5, 8, 10)
    """
    return tuple(sorted({ceil(share * pairs) for share in (0.5, 0.75, 1.0)}))


def sequential_interval(
    differences: Sequence[float] | FloatArray, looks: Sequence[int]
) -> tuple[float, float]:
    """Computes an interval of a mean paired difference that holds at whichever look it is read.

    Each look has a share of the 5 % in proportion to its new pairs, so by Bonferroni's inequality
    at least 95 % of the comparisons have only intervals that contain the mean.

    Args:
        differences: Those of the pairs of one look.
        looks: See `sequential_test`.
    """
    look = min(bisect_left(looks, len(differences)), len(looks) - 1)
    new = looks[look] - (looks[look - 1] if look else 0)
    return paired_interval(differences, 1 - 0.05 * new / looks[-1])


def fewest_pairs(level: float) -> int:
    """Returns the fewest pairs whose permutation test can have a p-value below a level.

    Example:
        >>> fewest_pairs(0.05)
        6
    """
    return floor(log2(2 / level)) + 1


def paired_interval(
    differences: Sequence[float] | FloatArray, confidence: float = 0.95
) -> tuple[float, float]:
    """Computes Student's interval of a mean paired difference; infinite for fewer than two pairs.

    Source:
        Student 1908.

    Example:
        >>> low, high = paired_interval([0.1, 0.2, 0.3])
        >>> round(low, 3), round(high, 3)
        (-0.048, 0.448)
    """
    from scipy.stats import t

    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return -np.inf, np.inf
    half = t.ppf((1 + confidence) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def holm(pvalues: Sequence[float]) -> list[float]:
    """Corrects p-values by Holm's method, which controls the family-wise error rate.

    Source:
        Holm 1979.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(pvalues), 0.0
    for rank, index in enumerate(np.argsort(pvalues, kind="stable")):
        largest = max(largest, min(1.0, (len(pvalues) - rank) * pvalues[index]))
        adjusted[index] = largest
    return adjusted


def power(effect: float, pairs: int, *, alpha: float = 0.05) -> float:
    """Computes the power of a two-sided paired t-test.

    Args:
        effect: The true mean of the paired differences in their standard deviations.
        pairs: Number of pairs, at least 2.
        alpha: Level of the test.

    Source:
        The noncentral t distribution: Cohen 1988, chapter 2.
    """
    from scipy.stats import chi2, norm, t

    bound, shift = t.ppf(1 - alpha / 2, pairs - 1), abs(effect) * pairs**0.5
    # SciPy's noncentral t is NaN far out; given the sample's spread, the mean is normal
    middles = (np.arange(1000) + 0.5) / 1000
    spread_N = np.sqrt(chi2.ppf(middles, pairs - 1) / (pairs - 1))
    above, below = norm.cdf(shift - bound * spread_N), norm.cdf(-shift - bound * spread_N)
    return float((above + below).mean())


def smallest_difference(
    spread: float, pairs: int, *, alpha: float = 0.05, desired: float = 0.8
) -> float:
    """Computes the smallest true difference that a paired test shows with the desired power.

    Args:
        spread: Standard deviation of the paired differences.
        pairs: Number of pairs, at least 2.
        alpha: Level of the test.
        desired: The power.
    """
    from scipy.optimize import brentq

    def missing(effect: float) -> float:
        return power(effect, pairs, alpha=alpha) - desired

    return spread * float(brentq(missing, 1e-6, 1e4 / pairs**0.5))


def pairs_needed(
    spread: float, difference: float, *, alpha: float = 0.05, desired: float = 0.8
) -> int:
    """Returns the fewest pairs whose test shows a true difference with the desired power.

    Args:
        spread: Standard deviation of the paired differences.
        difference: The difference, above 0.
        alpha: Level of the test.
        desired: The power.
    """
    low = high = max(2, fewest_pairs(alpha))

    def shows(pairs: int) -> bool:
        return not spread or power(difference / spread, pairs, alpha=alpha) >= desired

    while not shows(high):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle + 1, high)
    return high


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ConfigError(f"c is {c} with n = {n}; expected 0 <= c <= n")
    if not 1 <= k <= n:
        raise ConfigError(f"k is {k} with n = {n}; expected 1 <= k <= n")
