"""More estimators that compare turns, in the notation of `gspo_env.credit.estimators`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from gspo_env.credit.estimators import GroupEstimator, Share
from gspo_env.credit.scores import turn_rewards
from gspo_env.credit.statistics import (
    discounted,
    divided,
    largest,
    mean_without,
    min_peers,
    rows_by_turn,
    turn_baselines,
    z_score,
)
from gspo_env.settings import settings
from gspo_env.types import Episode, FloatArray, Score, Turn


@settings
class TurnPlusOutcome(GroupEstimator):
    """The outcome's z-score, plus each turn's reward against the others' at the same turn.

    A_ik = z_g(O_i) + turn_weight * z_gk(r_ik), with O_i = `Episode.outcome`: if an environment
    gives its own `episodic_reward`, it does not include the turn rewards. z subtracts the mean and
    divides by the standard deviation (scale `none`: subtracts only); z_gk is over the episodes that
    have a turn k, or over all turns of the group if too few have.

    Source:
        MT-GRPO, arXiv 2505.11821, section 3.

    Example:
        Outcomes [1, 0, 0] and turn rewards [0, 1], [0, 0], [0, 0], unscaled: the first episode gets
        [2/3 + 0, 2/3 + 2/3].
    """

    turn_weight: float = 1.0
    """Weight of the turn's own reward, lambda."""
    compares_turns: ClassVar[bool] = True
    sums_comparisons: ClassVar[bool] = True
    uses_score: ClassVar[bool] = False

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        whole = self._z(np.array([e.outcome for e in episodes]))
        by_turn = z_by_turn([e.rewards for e in episodes], self.scale, self.ddof)
        return [z + self.turn_weight * z_K for z, z_K in zip(whole, by_turn, strict=True)]


@settings
class GiGPO(GroupEstimator):
    """The return's z-score, plus each return-to-go against others from the same state.

    A_ik = z_g(R_i) + step_weight * z_s(G_ik), where z_s is over every turn of the group that was
    played in the state s of turn k: the same `Turn.state_key`. A state that occurs once, or that
    has no key, adds nothing. Each episode counts once in z_g, however many turns it has.

    Source:
        GiGPO, arXiv 2505.10978, eq. 3, 6, 7 and 8.

    Example:
        Returns [1, 0] from the same first state, unscaled: [1/2 + 1/2] and [-1/2 - 1/2].
    """

    gamma: Share = 1.0
    """Discount per turn."""
    step_weight: float = 1.0
    """Weight of the comparison from equal states, omega."""

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        whole = self._z(np.array([turn_rewards(e, score).sum() for e in episodes]))
        rows = [np.full(len(e.turns), z) for e, z in zip(episodes, whole, strict=True)]
        returns = [discounted(turn_rewards(e, score), self.gamma) for e in episodes]
        for visits in anchors(episodes).values():
            turns = [episodes[i].turns[k] for i, k in visits]
            credit = self.compare_state(np.array([returns[i][k] for i, k in visits]), turns)
            for (i, k), value in zip(visits, credit, strict=True):
                rows[i][k] += self.step_weight * value
        return rows

    def compare_state(self, returns_N: FloatArray, turns: Sequence[Turn]) -> FloatArray:
        """Compares the N turns that were played in one state by their returns-to-go."""
        return self._z(returns_N)


@settings
class NormalizeThenAccumulate(GroupEstimator):
    """Normalises rewards to z-scores first, then sums them from each turn on.

    A_ik = sum over l >= k of gamma^(l-k) z(r_il), with z over all turns of the group
    (`per="group"`) or over the episodes that have a turn l (`per="turn"`; all turns if too few
    have). `root` divides by the square root of the number of terms, so that early turns do not
    dominate.

    Source:
        IGPO, arXiv 2510.14967; the square root: A2TGPO, arXiv 2605.06200.

    Example:
        Rewards [1, 0] and [0, 0], unscaled: z is [3/4, -1/4] and [-1/4, -1/4], so the first episode
        gets [1/2, -1/4] and the second [-1/2, -1/4].
    """

    gamma: Share = 1.0
    """Discount per turn."""
    per: Literal["group", "turn"] = "group"
    """Whether rewards are normalised over all turns of the group or turn by turn."""
    root: bool = False
    """Divides each sum by the square root of its number of terms."""
    sums_comparisons: ClassVar[bool] = True

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        rewards = [turn_rewards(e, score) for e in episodes]
        if self.per == "turn":
            z = z_by_turn(rewards, self.scale, self.ddof)
        else:
            ends = np.cumsum([len(row) for row in rewards])
            z = np.split(self._z(np.concatenate(rewards)), ends[:-1])
        rows = [discounted(z_K, self.gamma) for z_K in z]
        return [row / np.sqrt(np.arange(len(row), 0, -1)) for row in rows] if self.root else rows


@settings
class GroupGAE(GroupEstimator):
    """Generalised advantage estimation with the group in place of a critic.

    V_ik is the mean return-to-go of the other episodes from the same `Turn.state_key`, if at least
    3 episodes (2 in a group of two), including i, visited it; else the baseline at turn k.
    delta_ik = r_ik + gamma * V_i(k+1) - V_ik and A_ik = sum over l >= k of
    (gamma * lam)^(l-k) delta_il, over the group's standard deviation. V is 0 after termination, and
    after every end if the score contains the outcome. Else, after truncation, it is the mean
    return-to-go of the others from the state that was cut, else of those that had one turn more,
    else 0. With lam = 1, no state keys and no truncation these are
    `returns_to_go` before scaling.

    Source:
        GAE, arXiv 1506.02438, eq. 16; leave-one-out values: VinePPO, arXiv 2410.01679.

    Example:
        lam = 0 and rewards [1, 0], [0, 1], [0, 0], unscaled: the first has V = [1/2, 1/2], so it
        gets [1 + 1/2 - 1/2, 0 - 1/2].
    """

    gamma: Share = 1.0
    """Discount per turn."""
    lam: Share = 0.95
    """Lambda of the generalised advantage estimation."""
    compares_turns: ClassVar[bool] = True

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        rewards = [turn_rewards(e, score) for e in episodes]
        returns = [discounted(rewards_K, self.gamma) for rewards_K in rewards]
        values, _ = turn_baselines(returns)
        for visits in anchors(episodes).values():
            if len({i for i, _ in visits}) >= min_peers(episodes):
                for i, k in visits:
                    values[i][k] = np.mean([returns[j][m] for j, m in visits if j != i])
        rows = []
        for i, (rewards_K, value_K) in enumerate(zip(rewards, values, strict=True)):
            # an outcome is final, also where it is that of an episode that was cut
            after = value_after(episodes, returns, i) if score == "turns" else 0.0
            next_K = np.append(value_K[1:], after)
            delta_K = rewards_K + self.gamma * next_K - value_K
            rows.append(discounted(delta_K, self.gamma * self.lam))
        everything = np.concatenate(rows)
        deviations, size = everything - everything.mean(), largest(np.concatenate(returns))
        return divided(rows, deviations, self.scale, self.ddof, size)


def z_by_turn(rows: Sequence[FloatArray], scale: str, ddof: int) -> list[FloatArray]:
    """Computes each turn's z-scores over the rows that have it, over all if too few do."""
    everything = np.concatenate(rows)
    deviations = everything - everything.mean()
    result = [np.zeros(len(row)) for row in rows]
    for k, reaching in enumerate(rows_by_turn(rows)):
        at_k = np.array([rows[n][k] for n in reaching])
        if len(reaching) >= min_peers(rows):
            z = z_score(at_k, scale, ddof)
        else:
            others = np.array([mean_without(everything, rows[n]) for n in reaching])
            z = divided([at_k - others], deviations, scale, ddof, largest(everything))[0]
        for n, value in zip(reaching, z, strict=True):
            result[n][k] = value
    return result


def anchors(episodes: Sequence[Episode]) -> dict[str, list[tuple[int, int]]]:
    """Returns every (episode, turn) that was played in a state, by the state's key."""
    visits: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, episode in enumerate(episodes):
        for k, turn in enumerate(episode.turns):
            if turn.state_key is not None:
                visits[turn.state_key].append((i, k))
    return visits


def value_after(episodes: Sequence[Episode], returns: Sequence[FloatArray], i: int) -> float:
    """Estimates the value after the last turn of an episode: 0 if it terminated."""
    if episodes[i].terminated:
        return 0.0
    turns = episodes[i].turns
    key = next((t.info.state_key for t in reversed(turns) if t.kind == "action"), None)
    visits = [] if key is None else anchors(episodes).get(key, [])
    peers = [returns[j][k] for j, k in visits if j != i]
    if not peers:
        peers = [
            row[len(turns)] for j, row in enumerate(returns) if j != i and len(row) > len(turns)
        ]
    return float(np.mean(peers)) if peers else 0.0
