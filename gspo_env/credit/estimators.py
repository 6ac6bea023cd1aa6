"""The built-in estimators: pure functions from a group to one array of advantages an episode.

G episodes, K turns; turns are counted from 1 in formulas. G_ik is the return-to-go of episode i at
turn k, the sum over l >= k of gamma^(l-k) r_il. Episodes that ended in an error or have no turn
enter no statistic and get zeros.

A baseline "at turn k" is the mean over the other episodes j that have a turn k (K_j >= k): a
finished episode is not counted as zero. Where fewer than 3 episodes, i included, have a turn k, it
is the mean over every turn of every other episode. Where the policy decides when an episode ends, a
statistic of turn k is one of survivors only, and that is a bias: docs/credit.md shows how large.
"""

from __future__ import annotations

import numpy as np

from gspo_env.credit.registry import register_estimator
from gspo_env.credit.statistics import (
    MIN_PEERS,
    MIN_SCALE,
    anchors,
    check_choice,
    check_settings,
    discounted,
    spread,
    std_of,
    turn_baselines,
    usable,
    value_after,
    z_by_turn,
    z_score,
    zeros,
)
from gspo_env.errors import ConfigError
from gspo_env.types import FloatArray, Group


@register_estimator("outcome")
def outcome(
    group: Group,
    *,
    baseline: str = "mean",
    scale: str = "std",
    ddof: int = 0,
    score: str = "return",
) -> list[FloatArray]:
    """One advantage for a whole episode: (score - baseline) / scale.

    `score` is the sum of the per-turn rewards (`return`) or `Episode.outcome` (`outcome`).
    Leave-one-out with scale `none` is RLOO; mean with scale `none` is Dr. GRPO.

    Shapes:
        result: one (K_i,) array per episode, constant over its turns.

    Raises:
        ConfigError: A setting is unknown.

    Source:
        GRPO, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783.
    """
    check_settings(1.0, ddof)
    check_choice("baseline", baseline, ("mean", "leave_one_out"))
    check_choice("scale", scale, ("std", "none"))
    check_choice("score", score, ("return", "outcome"))
    rows, used = zeros(group), usable(group)
    if len(used) < 2:
        return rows
    episodes = [group.episodes[i] for i in used]
    scores_G = np.array([e.outcome if score == "outcome" else e.rewards.sum() for e in episodes])
    centred_G = scores_G - scores_G.mean()
    std = std_of(centred_G, ddof)
    if std < MIN_SCALE:
        return rows
    if baseline == "leave_one_out":
        # r_i minus the mean of the others is the mean-centred score times n / (n - 1)
        centred_G = centred_G * len(used) / (len(used) - 1)
    for i, value in zip(used, centred_G / (std if scale == "std" else 1.0), strict=True):
        rows[i] += value
    return rows


@register_estimator("turn_plus_outcome")
def turn_plus_outcome(
    group: Group, *, turn_weight: float = 1.0, scale: str = "std", ddof: int = 0
) -> list[FloatArray]:
    """The outcome's z-score, plus each turn's reward against the others' at the same turn.

    A_ik = z_g(O_i) + turn_weight * z_gk(r_ik), with O_i = `Episode.outcome`: where an environment
    gives its own `episodic_reward`, turn rewards are no part of it. z subtracts the mean
    and divides by the standard deviation (scale `none`: subtracts only); z_gk is over the episodes
    that have a turn k, over all turns of the group where fewer than 3 have.

    Shapes:
        result: one (K_i,) array per episode.

    Raises:
        ConfigError: A setting is unknown.

    Source:
        MT-GRPO, arXiv 2505.11821, section 3.

    Example:
        Outcomes [1, 0, 0] and turn rewards [0, 1], [0, 0], [0, 0], unscaled: the first episode gets
        [2/3 + 0, 2/3 + 2/3].
    """
    check_settings(1.0, ddof)
    check_choice("scale", scale, ("std", "none"))
    rows, used = zeros(group), usable(group)
    if len(used) < 2:
        return rows
    whole = z_score(np.array([group.episodes[i].outcome for i in used]), scale, ddof)
    by_turn = z_by_turn([group.episodes[i].rewards for i in used], scale, ddof)
    for i, total, values in zip(used, whole, by_turn, strict=True):
        rows[i] = total + turn_weight * values
    return rows


@register_estimator("returns_to_go")
def returns_to_go(
    group: Group, *, gamma: float = 1.0, scale: str = "std", ddof: int = 0
) -> list[FloatArray]:
    """Each turn's discounted return-to-go against the other episodes at the same turn.

    A_ik = (G_ik - b_ik) / sigma with the leave-one-out baseline b_ik at turn k. sigma pools the
    deviations over all turns of the group; each is taken from its turn's mean (the group's mean
    where the baseline falls back), so that a reward common to all episodes of equal length changes
    nothing.

    Shapes:
        result: one (K_i,) array per episode.

    Raises:
        ConfigError: A setting is unknown or out of range.

    Example:
        Three episodes with rewards [1, 0], [0, 1] and [0, 0] have returns-to-go [1, 0], [1, 1] and
        [0, 0]; unscaled, the first gets [1 - 1/2, 0 - 1/2].
    """
    check_settings(gamma, ddof)
    check_choice("scale", scale, ("std", "none"))
    used = usable(group)
    if len(used) < 2:
        return zeros(group)
    returns = [discounted(group.episodes[i].rewards, gamma) for i in used]
    baselines, means = turn_baselines(returns)
    deviations = np.concatenate([g - m for g, m in zip(returns, means, strict=True)])
    values = [g - b for g, b in zip(returns, baselines, strict=True)]
    return spread(group, used, values, deviations, scale, ddof)


@register_estimator("gigpo")
def gigpo(
    group: Group,
    *,
    gamma: float = 1.0,
    step_weight: float = 1.0,
    scale: str = "std",
    ddof: int = 0,
) -> list[FloatArray]:
    """The return's z-score, plus each return-to-go against others from the same state.

    A_ik = z_g(R_i) + step_weight * z_s(G_ik), where z_s is over every turn of the group that was
    played in the state s of turn k: the same `Turn.state_key`. A state that was met once, or that
    has no key, adds nothing. Each episode counts once in z_g, however many turns it has.

    Shapes:
        result: one (K_i,) array per episode.

    Raises:
        ConfigError: A setting is unknown or out of range.

    Source:
        GiGPO, arXiv 2505.10978, eq. 3, 6, 7 and 8.

    Example:
        Returns [1, 0] from one and the same first state, unscaled: [1/2 + 1/2] and [-1/2 - 1/2].
    """
    check_settings(gamma, ddof)
    check_choice("scale", scale, ("std", "none"))
    rows, used = zeros(group), usable(group)
    if len(used) < 2:
        return rows
    whole = z_score(np.array([group.episodes[i].rewards.sum() for i in used]), scale, ddof)
    for i, total in zip(used, whole, strict=True):
        rows[i] += total
    returns = [discounted(group.episodes[i].rewards, gamma) for i in used]
    for visits in anchors(group, used).values():
        z = z_score(np.array([returns[n][k] for n, k in visits]), scale, ddof)
        for (n, k), value in zip(visits, z, strict=True):
            rows[used[n]][k] += step_weight * value
    return rows


@register_estimator("normalize_then_accumulate")
def normalize_then_accumulate(
    group: Group,
    *,
    gamma: float = 1.0,
    per: str = "group",
    root: bool = False,
    scale: str = "std",
    ddof: int = 0,
) -> list[FloatArray]:
    """Rewards are made z-scores first, then summed from each turn on.

    A_ik = sum over l >= k of gamma^(l-k) z(r_il), with z over all turns of the group
    (`per="group"`) or over the episodes that have a turn l (`per="turn"`; all turns where fewer
    than 3 have). `root` divides by the square root of the number of terms, so that early turns are
    not the loudest.

    Shapes:
        result: one (K_i,) array per episode.

    Raises:
        ConfigError: A setting is unknown or out of range.

    Source:
        IGPO, arXiv 2510.14967; the square root: A2TGPO, arXiv 2605.06200.

    Example:
        Rewards [1, 0] and [0, 0], unscaled: z is [3/4, -1/4] and [-1/4, -1/4], so the first episode
        gets [1/2, -1/4] and the second [-1/2, -1/4].
    """
    check_settings(gamma, ddof)
    check_choice("scale", scale, ("std", "none"))
    check_choice("per", per, ("group", "turn"))
    rows, used = zeros(group), usable(group)
    if len(used) < 2:
        return rows
    rewards = [group.episodes[i].rewards for i in used]
    if per == "turn":
        z = z_by_turn(rewards, scale, ddof)
    else:
        lengths = np.cumsum([len(r) for r in rewards])[:-1]
        z = np.split(z_score(np.concatenate(rewards), scale, ddof), lengths)
    for i, values in zip(used, z, strict=True):
        total = discounted(values, gamma)
        rows[i] = total / np.sqrt(np.arange(len(values), 0, -1)) if root else total
    return rows


@register_estimator("group_gae")
def group_gae(
    group: Group, *, gamma: float = 1.0, lam: float = 0.95, scale: str = "std", ddof: int = 0
) -> list[FloatArray]:
    """Generalised advantage estimation with the group in the place of a critic.

    V_ik is the mean return-to-go of the other episodes from the same `Turn.state_key`, where at
    least 3 episodes, i included, met it; else the leave-one-out baseline at turn k.
    delta_ik = r_ik + gamma * V_i(k+1) - V_ik and A_ik = sum over l >= k of
    (gamma * lam)^(l-k) delta_il, over the group's standard deviation. V is 0 after termination;
    after truncation it is the mean return-to-go of the others from the state that was cut, else of
    those that had one turn more, else 0. With lam = 1, no state keys and no truncation these are
    `returns_to_go` before scaling.

    Shapes:
        result: one (K_i,) array per episode.

    Raises:
        ConfigError: A setting is unknown or out of range.

    Source:
        GAE, arXiv 1506.02438, eq. 16; leave-one-out values: VinePPO, arXiv 2410.01679.

    Example:
        lam = 0 and rewards [1, 0], [0, 1], [0, 0], unscaled: the first has V = [1/2, 1/2], so it
        gets [1 + 1/2 - 1/2, 0 - 1/2].
    """
    check_settings(gamma, ddof)
    check_choice("scale", scale, ("std", "none"))
    if not 0 <= lam <= 1:
        raise ConfigError(f"lam is {lam!r}; expected a number in [0, 1]")
    used = usable(group)
    if len(used) < 2:
        return zeros(group)
    returns = [discounted(group.episodes[i].rewards, gamma) for i in used]
    values, _ = turn_baselines(returns)
    for visits in anchors(group, used).values():
        if len({n for n, _ in visits}) < MIN_PEERS:
            continue
        for n, k in visits:
            values[n][k] = np.mean([returns[m][j] for m, j in visits if m != n])
    rows = []
    for n, (i, value_K) in enumerate(zip(used, values, strict=True)):
        after = value_after(group, used, returns, n)
        delta_K = group.episodes[i].rewards + gamma * np.append(value_K[1:], after) - value_K
        rows.append(discounted(delta_K, gamma * lam))
    everything = np.concatenate(rows)
    return spread(group, used, rows, everything - everything.mean(), scale, ddof)
