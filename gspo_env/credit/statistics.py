"""Functions that the estimators share: usable episodes, baselines, z-scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_env.types import FloatArray, Group

MIN_SCALE = 1e-8
"""If a group's standard deviation is below this, its advantages are 0."""
_ROUNDING = 1e-14
"""The same as a share of what is compared: equal outcomes of 1e8 differ from their mean."""
MIN_PEERS = 3
"""The minimum number of episodes with a turn for a baseline of that turn alone; see `min_peers`."""


def min_peers(rows: Sequence[object]) -> int:
    """Returns `MIN_PEERS`, or 2 in a group of two, whose only other episode is the baseline."""
    return min(MIN_PEERS, len(rows))


def usable(group: Group) -> list[int]:
    """Returns the indices of the episodes that enter statistics: those played without an error."""
    return [i for i, e in enumerate(group.episodes) if e.turns and not e.failed]


def all_zero(rows: Sequence[FloatArray]) -> bool:
    """Returns whether all advantages of a group are 0, so that nothing is learned from them."""
    return all(np.abs(values).max(initial=0) < MIN_SCALE for values in rows)


def std_of(deviations: FloatArray, ddof: int) -> float:
    """Computes the standard deviation from deviations from a mean."""
    return float(np.sqrt((deviations**2).sum() / max(len(deviations) - ddof, 1)))


def mean_without(everything: FloatArray, part: FloatArray) -> float:
    """Computes the mean of everything except one episode's own values."""
    return float((everything.sum() - part.sum()) / (len(everything) - len(part)))


def discounted(rewards_K: FloatArray, gamma: float) -> FloatArray:
    """Computes the returns-to-go (K,) of rewards (K,)."""
    returns_K = np.zeros(len(rewards_K))
    total = 0.0
    for k in reversed(range(len(rewards_K))):
        total = rewards_K[k] + gamma * total
        returns_K[k] = total
    return returns_K


def divided(
    rows: Sequence[FloatArray], deviations: FloatArray, scale: str, ddof: int, size: float
) -> Sequence[FloatArray]:
    """Divides rows by the standard deviation of the deviations; zeros if nothing differs.

    Args:
        rows: What is divided, if the scale is `std`.
        deviations: From a mean.
        scale: See `GroupEstimator`.
        ddof: See `GroupEstimator`.
        size: The largest of the values, whose rounding is no difference.
    """
    std = std_of(deviations, ddof)
    if std < max(MIN_SCALE, _ROUNDING * size):
        return [np.zeros(len(row)) for row in rows]
    return [row / std for row in rows] if scale == "std" else rows


def largest(values: FloatArray) -> float:
    """Returns the largest absolute value."""
    return float(np.abs(values).max(initial=0.0))


def z_score(values: FloatArray, scale: str, ddof: int) -> FloatArray:
    """Subtracts the mean and divides by the standard deviation; zeros if all values are equal."""
    centred: FloatArray = values - values.mean()
    return divided([centred], centred, scale, ddof, largest(values))[0]


def rows_by_turn(rows: Sequence[FloatArray]) -> list[list[int]]:
    """Returns, for each turn, the indices of the rows that have it."""
    most = max(map(len, rows))
    return [[n for n, row in enumerate(rows) if len(row) > k] for k in range(most)]


def turn_baselines(returns: Sequence[FloatArray]) -> tuple[list[FloatArray], list[FloatArray]]:
    """Returns each turn's leave-one-out baseline, and the mean to measure deviations from."""
    everything = np.concatenate(returns)
    baselines = [np.zeros(len(row)) for row in returns]
    means = [np.full(len(row), everything.mean()) for row in returns]
    for k, reaching in enumerate(rows_by_turn(returns)):
        total = sum(returns[n][k] for n in reaching)
        for n in reaching:
            if len(reaching) >= min_peers(returns):
                baselines[n][k] = (total - returns[n][k]) / (len(reaching) - 1)
                means[n][k] = total / len(reaching)
            else:
                baselines[n][k] = mean_without(everything, returns[n])
    return baselines, means


def fallbacks(group: Group) -> int:
    """Counts the turns whose baseline is the group-pooled mean."""
    rows = [group.episodes[i].rewards for i in usable(group)]
    if len(rows) < 2:
        return 0
    least = min_peers(rows)
    return sum(len(reaching) for reaching in rows_by_turn(rows) if len(reaching) < least)
