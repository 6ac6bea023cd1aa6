"""Which rewards the estimators learn from: those of the turns, the outcome, or their sum."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.credit.statistics import MIN_SCALE, usable
from gspo_env.errors import ConfigError, figure
from gspo_env.types import Episode, FloatArray, Group, Score

if TYPE_CHECKING:
    from gspo_env.credit.estimators import Estimator

logger = logging.getLogger(__name__)

_KEPT = ("score", "reason", "_turns", "_outcomes")
"""The state of a `ScoreChoice`."""


def turn_rewards(episode: Episode, score: Score) -> FloatArray:
    """Returns the reward of each turn that an estimator of returns learns from.

    `turns` are the rewards as emitted. `outcome` is `Episode.outcome` at the last turn and 0
    before. `sum` adds the environment's own outcome to the reward of the last turn; it adds nothing
    if there is none, because the default outcome is the sum of the rewards.

    Shapes:
        result: (K,); an episode without a turn has no reward, whatever its outcome.

    Example:
        Rewards [0.2, 0.2] and the episodic reward 1 are [0.2, 0.2], [0, 1] or [0.2, 1.2].
    """
    rewards_K = np.zeros(len(episode.turns)) if score == "outcome" else episode.rewards
    adds = score == "outcome" or (score == "sum" and episode.ending.outcome is not None)
    if episode.turns and adds:
        rewards_K[-1] += episode.outcome
    return rewards_K


def contents(episodes: Sequence[Episode]) -> tuple[bool, bool]:
    """Returns whether any turn has a reward, and any episode an outcome of its own."""
    played = [e for e in episodes if not e.failed]
    outcomes = any(e.turns and e.ending.outcome is not None for e in played)
    return any(e.rewards.any() for e in played), outcomes


def auto_score(groups: Sequence[Group]) -> Score:
    """Returns the score of groups whose environment and settings leave it open."""
    has_rewards, has_outcomes = contents([e for group in groups for e in group.episodes])
    return "outcome" if has_outcomes and not has_rewards else "turns"


def rewards_differ(group: Group, score: Score) -> bool:
    """Returns whether the rewards of an episode differ from the others' at some turn.

    Example:
        Rewards [0, 1] and [1] differ, [0, 1] and [0, 1, 0] don't.
    """
    rewards = [turn_rewards(group.episodes[i], score) for i in usable(group)]
    rows = np.zeros((len(rewards), max(map(len, rewards), default=0)))
    for row, rewards_K in zip(rows, rewards, strict=True):
        row[: len(rewards_K)] = rewards_K
    return len(rows) > 1 and bool(np.ptp(rows, axis=0).max() >= MIN_SCALE)


@dataclass(slots=True)
class ScoreChoice:
    """Decides once for a run which rewards its estimator learns from.

    A score that the config or the environment gives is kept. Otherwise the episodes decide by what
    they contain, not by its value, since every outcome may be 0 at first: outcomes of the
    environment's own and no reward of a turn give `outcome`, all else `turns`. Nothing is decided
    while the episodes contain neither, since no score differs from another there.
    """

    env_id: str
    score: Score | None = None
    """The score; None until it is decided."""
    reason: str = ""
    """Why it is this one, or why it is not decided."""
    _is_set: bool = field(init=False, repr=False)
    _turns: bool = field(default=False, repr=False)
    _outcomes: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Notes whether the episodes have to decide."""
        self._is_set = self.score is not None

    def see(self, episodes: Sequence[Episode]) -> bool:
        """Considers further episodes.

        Args:
            episodes: Every episode of a step, of all groups.

        Returns:
            Whether these episodes decided the score.

        Raises:
            ConfigError: The score is `sum`, and no terminated episode has an outcome of its own.
        """
        turns, outcomes = contents(episodes)
        news = turns and not self._turns, outcomes and not self._outcomes
        self._turns |= turns
        self._outcomes |= outcomes
        terminated = any(episode.terminated for episode in episodes)
        if self.score == "sum" and terminated and not self._outcomes:
            raise ConfigError(
                f"the score is 'sum', but the episodes of {self.env_id} have no outcome of their "
                "own; expected 'turns', or an environment that sets info['episodic_reward'] on the "
                "last step and declares `gives_outcome = True`"
            )
        if self.score is not None:
            self._warn_of(*news)
            return False
        self.score, self.reason = self._decide(episodes)
        return self.score is not None

    def state(self) -> dict[str, Any]:
        """Returns the state for `restore`."""
        return {name: getattr(self, name) for name in _KEPT}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the state of another choice."""
        for name in _KEPT:
            setattr(self, name, saved[name])

    def _decide(self, episodes: Sequence[Episode]) -> tuple[Score | None, str]:
        if not self._turns and not self._outcomes:
            return None, "no turn has had a reward, and no episode an outcome of its own"
        if not self._turns:
            return "outcome", "episodes have outcomes of their own, and no turn has a reward"
        if not self._outcomes:
            return "turns", "turns have rewards, and no episode has an outcome of its own"
        returns = np.mean([episode.rewards.sum() for episode in episodes])
        outcomes = np.mean([episode.outcome for episode in episodes])
        mean_return, mean_outcome = figure(float(returns)), figure(float(outcomes))
        reason = (
            f"turns have rewards (mean sum of an episode {mean_return}) and episodes have outcomes "
            f"of their own (mean {mean_outcome}); declare `credit_score` in the environment or set "
            "--score to turns, outcome or sum"
        )
        logger.warning("%s is trained on the rewards of its turns: %s", self.env_id, reason)
        return "turns", reason

    def _warn_of(self, turns: bool, outcomes: bool) -> None:
        """Warns if the other kind of reward appears after the decision."""
        if self._is_set or not (turns if self.score == "outcome" else outcomes):
            return
        what = "rewards of turns" if self.score == "outcome" else "outcomes of its own"
        logger.warning(
            "%s now has %s, unlike its first episodes: the run keeps the score %r; declare "
            "`credit_score` in the environment or set --score",
            *(self.env_id, what, self.score),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """The choice of each environment that a run trains on, by the `env_id` of its tasks."""

    choices: Mapping[str, ScoreChoice]
    estimator: Estimator
    """Decides which groups can be learned from."""

    def teaches(self, group: Group) -> bool:
        """Returns whether training on a group can teach anything, by its rewards."""
        turns = [turn for episode in group.episodes for turn in episode.turns]
        if any(turn.info.token_advantages for turn in turns):
            return True
        choice = self.choices.get(group.task.env_id)
        score = (choice and choice.score) or auto_score([group])
        return self.estimator.teaches(replace(group, score=score))

    @property
    def only(self) -> Score | None:
        """The score of the only environment; None with several, or before it is decided."""
        first = next(iter(self.choices.values()))
        return first.score if len(self.choices) == 1 else None

    @property
    def by_environment(self) -> dict[str, Score]:
        """The score of each environment, `turns` before it is decided."""
        return {env_id: choice.score or "turns" for env_id, choice in self.choices.items()}

    def see(self, groups: Sequence[Group]) -> str:
        """Considers further episodes; see `ScoreChoice.see`.

        Args:
            groups: The groups of a step.

        Returns:
            The reasons of scores that these episodes decided; empty if none.

        Raises:
            ConfigError: The score of an environment is `sum`, and it gives no outcome.
        """
        reasons = []
        for env_id, choice in self.choices.items():
            episodes = [e for g in groups if g.task.env_id == env_id for e in g.episodes]
            if episodes and choice.see(episodes):
                several = f"{env_id} has the score {choice.score!r}: "
                reasons.append((several if len(self.choices) > 1 else "") + choice.reason)
        return "; ".join(reasons)

    def state(self) -> dict[str, Any]:
        """Returns the state for `restore`."""
        states = {env_id: choice.state() for env_id, choice in self.choices.items()}
        only = next(iter(states.values()))
        return only if len(states) == 1 else {"score": None, "environments": states}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the states of other choices."""
        for env_id, choice in self.choices.items():
            choice.restore(saved["environments"][env_id] if len(self.choices) > 1 else saved)
