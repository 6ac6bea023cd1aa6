"""The built-in estimators: settings and one method, from a group to one array an episode.

Notation: G episodes, K turns, turns counted from 1. G_ik is the return-to-go of episode i at turn
k, the sum over l >= k of gamma^(l-k) r_il, where `turn_rewards` gives the rewards r_il of the
group's score. Episodes that ended in an error or have no turn enter no statistic and get zeros.

A baseline "at turn k" is the mean over the other episodes j that have a turn k (K_j >= k); a
finished episode does not count as zero. If fewer than 3 episodes, including i, have a turn k (2 in
a group of two), the baseline is the mean over every turn of every other episode. If the policy
decides when an episode ends, a statistic of turn k covers survivors only, which is a bias: see
docs/credit.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Interval

from gspo_env.credit.scores import rewards_differ, turn_rewards
from gspo_env.credit.statistics import (
    MIN_SCALE,
    all_zero,
    discounted,
    divided,
    largest,
    std_of,
    turn_baselines,
    usable,
    z_score,
)
from gspo_env.settings import settings
from gspo_env.types import Episode, FloatArray, Group, Score

Share = Annotated[float, Interval(ge=0, le=1)]


class Estimator:
    """Base class of estimators: a subclass is a frozen dataclass and implements `advantages`."""

    __slots__ = ()

    uses_score: ClassVar[bool] = True
    """Whether it reads `Group.score`; if not, the setting `credit.score` is refused."""
    needs_rewards: ClassVar[bool] = True
    """Whether a group whose rewards are all the same teaches it nothing."""
    compares_turns: ClassVar[bool] = False
    """Whether an episode is compared with the others at the same turn, so that fallbacks count."""
    sums_comparisons: ClassVar[bool] = False
    """Whether it compares rewards turn by turn and sums them, which pays or fines one more turn
    where the policy decides when an episode ends; see docs/credit.md."""
    credits_agents: ClassVar[bool] = False
    """Whether it credits each agent of an environment with `rewards_by_agent` by its own."""

    def advantages(self, group: Group) -> Sequence[FloatArray]:
        """Computes the advantages of a group.

        Shapes:
            result: for each episode (K_i,), one for each turn, or (N_i,), one for each sampled
                token.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method 'advantages'")

    def teaches(self, group: Group) -> bool:
        """Returns whether a group can be learned from, by its rewards; see `max_resamples`.

        By default it can if no rewards are needed, or if those of two episodes differ.
        """
        score: Score = group.score if self.uses_score else "sum"
        return not self.needs_rewards or rewards_differ(group, score)

    def batch_divisor(self, advantages: FloatArray) -> float:
        """Returns what the advantages of a batch are divided by; infinity makes them all 0.

        Args:
            advantages: (N,) those of all groups that are trained on.
        """
        return 1.0

    def metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Returns further metrics of a batch, whose groups have their score."""
        return {}

    def check(self, chat: Any = None) -> None:
        """Rejects settings that cannot work.

        It is called before a run loads its model, and again with the model's
        `gspo_env.chat.ChatTokenizer`.
        """

    def check_episode(self, env: Any, episode: Episode) -> None:
        """Rejects an environment, by an episode of it that is played before the run begins."""

    def bind(self, learner: Any, collector: Any) -> Estimator:
        """Returns the estimator of a run, with what it needs of it, such as a teacher.

        Args:
            learner: The `gspo_env.learner.Trainer` of the policy.
            collector: The `gspo_env.rollout.Collector` of its episodes.
        """
        return self


@settings
class GroupEstimator(Estimator):
    """Base class of estimators that compare the usable episodes of a group."""

    scale: Literal["none", "batch", "std", "mean"] = "none"
    """Divisor: 1; the standard deviation of all advantages of the batch, or that of the group,
    which is a bias (see docs/credit.md); or the group's mean outcome, so that rare successes count
    more (MaxRL, arXiv 2602.02710; all 0 if that mean is not above 0). A z-score is divided with
    `std` only."""
    ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of the standard deviation."""

    def advantages(self, group: Group) -> Sequence[FloatArray]:
        """See `Estimator.advantages`: zeros if fewer than two episodes can be compared."""
        rows, used = [np.zeros(len(e.turns)) for e in group.episodes], usable(group)
        if len(used) >= 2:
            compared = self.compare([group.episodes[i] for i in used], group.score)
            divisor = 1.0
            if self.scale == "mean":
                mean = float(np.mean([group.episodes[i].outcome for i in used]))
                divisor = mean if mean >= MIN_SCALE else np.inf
            for i, row in zip(used, compared, strict=True):
                rows[i] = row / divisor
        return rows

    def teaches(self, group: Group) -> bool:
        """See `Estimator.teaches`: it can if an advantage is not zero."""
        return not all_zero(self.advantages(group))

    def batch_divisor(self, advantages: FloatArray) -> float:
        """See `Estimator.batch_divisor`."""
        if self.scale != "batch":
            return 1.0
        std = std_of(advantages - advantages.mean(), self.ddof)
        return std if std >= MIN_SCALE else np.inf

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """Computes the advantages of at least two usable episodes of a group."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'compare'")

    def _z(self, values: FloatArray) -> FloatArray:
        return z_score(values, self.scale, self.ddof)


@settings
class Outcome(GroupEstimator):
    """One advantage for a whole episode: (outcome - baseline) / scale.

    The outcome is `Episode.outcome`: the environment's own, or else the sum of the turn rewards.
    Leave-one-out with scale `none` is RLOO; the mean with scale `none`, together with the loss
    `dr_grpo`, is Dr. GRPO.

    Source:
        GRPO, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783.
    """

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from an episode's outcome."""
    uses_score: ClassVar[bool] = False

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        outcomes_G = np.array([e.outcome for e in episodes])
        centred_G = values_G = outcomes_G - outcomes_G.mean()
        if self.baseline == "leave_one_out":
            # O_i minus the mean of the others is the mean-centred outcome times n / (n - 1)
            values_G = centred_G * len(episodes) / (len(episodes) - 1)
        rows = [np.full(len(e.turns), value) for e, value in zip(episodes, values_G, strict=True)]
        return divided(rows, centred_G, self.scale, self.ddof, largest(outcomes_G))


@settings
class ReturnsToGo(GroupEstimator):
    """Each turn's discounted return-to-go against the other episodes at the same turn.

    A_ik = (G_ik - b_ik) / sigma with the leave-one-out baseline b_ik at turn k. sigma pools the
    deviations over all turns of the group; each is taken from its turn's mean (the group's mean
    where the baseline falls back), so that a reward common to all episodes of equal length changes
    nothing.

    Example:
        Three episodes with rewards [1, 0], [0, 1] and [0, 0] have returns-to-go [1, 0], [1, 1] and
        [0, 0]; unscaled, the first gets [1 - 1/2, 0 - 1/2].
    """

    gamma: Share = 1.0
    """Discount per turn."""
    compares_turns: ClassVar[bool] = True

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        returns = [discounted(turn_rewards(e, score), self.gamma) for e in episodes]
        baselines, means = turn_baselines(returns)
        deviations = np.concatenate([g - m for g, m in zip(returns, means, strict=True)])
        values = [g - b for g, b in zip(returns, baselines, strict=True)]
        return divided(values, deviations, self.scale, self.ddof, largest(np.concatenate(returns)))
