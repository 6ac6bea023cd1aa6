"""What the estimators share: usable episodes, baselines, z-scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gspo_env.types import Episode, FloatArray, Group, StopReason

MIN_SCALE = 1e-8
"""A group whose standard deviation is below this has nothing to compare: its advantages are 0."""
MIN_PEERS = 3
"""The least number of episodes that must reach a turn for a baseline of that turn alone."""


def is_usable(episode: Episode) -> bool:
    """Whether an episode was played."""
    return bool(episode.turns) and episode.stop_reason is not StopReason.ERROR


def usable(group: Group) -> list[int]:
    """The places of the episodes that enter statistics."""
    return [i for i, episode in enumerate(group.episodes) if is_usable(episode)]


def zeros(group: Group) -> list[FloatArray]:
    """No advantage for any turn."""
    return [np.zeros(len(episode.turns)) for episode in group.episodes]


def std_of(deviations: FloatArray, ddof: int) -> float:
    """The standard deviation that deviations from a mean have."""
    return float(np.sqrt((deviations**2).sum() / max(len(deviations) - ddof, 1)))


def mean_without(everything: FloatArray, own: FloatArray) -> float:
    """The mean of everything but one episode's own values."""
    return float((everything.sum() - own.sum()) / (len(everything) - len(own)))


def discounted(rewards_K: FloatArray, gamma: float) -> FloatArray:
    """Returns-to-go (K,) of rewards (K,)."""
    returns_K = np.zeros(len(rewards_K))
    total = 0.0
    for k in reversed(range(len(rewards_K))):
        total = rewards_K[k] + gamma * total
        returns_K[k] = total
    return returns_K


def z_score(values: FloatArray, scale: str, ddof: int) -> FloatArray:
    """Values less their mean, over their standard deviation; zeros where they are all alike."""
    centred: FloatArray = values - values.mean()
    std = std_of(centred, ddof)
    if std < MIN_SCALE:
        return np.zeros(len(values))
    return centred / std if scale == "std" else centred


def _reaching(rows: Sequence[FloatArray]) -> list[list[int]]:
    """For each turn, the places of the rows that have it."""
    most = max(map(len, rows))
    return [[n for n, row in enumerate(rows) if len(row) > k] for k in range(most)]


def z_by_turn(rows: Sequence[FloatArray], scale: str, ddof: int) -> list[FloatArray]:
    """Each turn's z-scores over the rows that have it, over everything where fewer than 3 have."""
    everything = np.concatenate(rows)
    pooled = std_of(everything - everything.mean(), ddof)
    result = [np.zeros(len(row)) for row in rows]
    for k, here in enumerate(_reaching(rows)):
        at_k = np.array([rows[n][k] for n in here])
        if len(here) >= MIN_PEERS:
            z = z_score(at_k, scale, ddof)
        elif pooled < MIN_SCALE:
            continue
        else:
            others = np.array([mean_without(everything, rows[n]) for n in here])
            z = (at_k - others) / (pooled if scale == "std" else 1.0)
        for n, value in zip(here, z, strict=True):
            result[n][k] = value
    return result


def turn_baselines(returns: Sequence[FloatArray]) -> tuple[list[FloatArray], list[FloatArray]]:
    """Each turn's leave-one-out baseline, and the mean that deviations are taken from."""
    everything = np.concatenate(returns)
    baselines = [np.zeros(len(row)) for row in returns]
    means = [np.full(len(row), everything.mean()) for row in returns]
    for k, here in enumerate(_reaching(returns)):
        total = sum(returns[n][k] for n in here)
        for n in here:
            if len(here) >= MIN_PEERS:
                baselines[n][k] = (total - returns[n][k]) / (len(here) - 1)
                means[n][k] = total / len(here)
            else:
                baselines[n][k] = mean_without(everything, returns[n])
    return baselines, means


def anchors(group: Group, used: Sequence[int]) -> dict[str, list[tuple[int, int]]]:
    """Every (place in used, turn) that was played in a state, by the state's key."""
    visits: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for n, i in enumerate(used):
        for k, turn in enumerate(group.episodes[i].turns):
            if turn.state_key is not None:
                visits[turn.state_key].append((n, k))
    return visits


def value_after(group: Group, used: Sequence[int], returns: Sequence[FloatArray], n: int) -> float:
    """What was still to come when an episode ended: 0 unless it was cut."""
    episode = group.episodes[used[n]]
    if episode.terminated:
        return 0.0
    key = episode.turns[-1].info.state_key
    visits = [] if key is None else anchors(group, used).get(key, [])
    peers = [returns[m][k] for m, k in visits if m != n]
    if not peers:
        turns = len(episode.turns)
        peers = [row[turns] for m, row in enumerate(returns) if m != n and len(row) > turns]
    return float(np.mean(peers)) if peers else 0.0


def spread(
    group: Group,
    used: Sequence[int],
    values: Sequence[FloatArray],
    deviations: FloatArray,
    scale: str,
    ddof: int,
) -> list[FloatArray]:
    """One row an episode, scaled by the deviations; zeros where nothing differs."""
    rows = zeros(group)
    std = std_of(deviations, ddof)
    if std >= MIN_SCALE:
        for i, row in zip(used, values, strict=True):
            rows[i] = row / std if scale == "std" else row
    return rows


def fallbacks(group: Group) -> int:
    """Turns whose baseline is the group-pooled mean."""
    turns = [len(group.episodes[i].turns) for i in usable(group)]
    if len(turns) < 2:
        return 0
    reaching = [sum(count > k for count in turns) for k in range(max(turns))]
    return sum(count for count in reaching if count < MIN_PEERS)
