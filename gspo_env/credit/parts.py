"""Several rewards, each on a scale of its own: the estimator `parts`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

import numpy as np

from gspo_env.credit.estimators import GroupEstimator
from gspo_env.credit.scores import turn_rewards
from gspo_env.credit.statistics import usable
from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, find
from gspo_env.settings import settings
from gspo_env.types import Episode, FloatArray, Group, Score, Turn

logger = logging.getLogger(__name__)

REWARD = "reward"
"""The part that is the reward of the selected score."""
MEASURED = ("tokens", "calls", "seconds")
"""Parts that every turn has: its sampled tokens, its tool calls, and the wall-clock time of the
sampling and of the environment's step."""


@settings
class Parts(GroupEstimator):
    """Rewards that are normalised one by one within the group, then weighted and added.

    A_ik = sum over parts p of weights[p] * A^p_ik, where A^p are the advantages by `estimator` if
    the part p were the only reward, divided by their standard deviation in the group. A part is an
    entry of `reward_parts`, `reward` (that of the score), or measured: `tokens`, `calls` and
    `seconds` of each turn, which a weight below 0 makes a penalty. A part compares the episodes
    that have it in some turn; to the others, and where all have the same, it adds 0. With
    `normalize = False`, nothing is divided, so that weights are prices in units of the reward.

    Source:
        GDPO, arXiv 2601.05242; with `estimator = "outcome"` that of TRL's
        `multi_objective_aggregation="normalize_then_sum"`, but for its mean of the batch.

    Example:
        Two episodes have the parts [a: 1, b: 0] and [a: 0, b: 10], and the weights are a = 1 and
        b = 0.5: the first gets 1 - 0.5 from `outcome`, the second -1 + 0.5, before the scale.
    """

    weights: dict[str, Any] = field(default_factory=dict)
    """The weight of each part by name, such as `reward=1 format=0.5 tokens=-0.1`; parts without one
    count nothing."""
    estimator: str = "returns_to_go"
    """Name of the built-in estimator that each part goes through, which has its default settings
    but for the divisor."""
    normalize: bool = True
    """Divides each part's advantages by their standard deviation in the group."""
    scale: Literal["none", "batch"] = "batch"
    """Divisor of the sum: 1, or the standard deviation of all advantages of the batch."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        for name, weight in self.weights.items():
            if type(weight) not in (int, float) or not math.isfinite(weight):
                raise ConfigError(f"weights has {name}={weight!r}; expected finite numbers")
        cls = find("advantage", self.estimator) if self.estimator in BUILTIN["advantage"] else None
        compares = cls is not None and issubclass(cls, GroupEstimator) and not cls.credits_agents
        if cls is Parts or not compares:
            raise ConfigError(
                f"advantage.estimator is {self.estimator!r}; expected the name of a built-in "
                "estimator that compares the episodes of a group, such as returns_to_go or outcome"
            )

    @property
    def uses_score(self) -> bool:  # type: ignore[override]
        """Whether a part is the reward of the score."""
        return REWARD in self.weights and self._each.uses_score

    @property
    def compares_turns(self) -> bool:  # type: ignore[override]
        """As the estimator of each part."""
        return self._each.compares_turns

    @property
    def sums_comparisons(self) -> bool:  # type: ignore[override]
        """As the estimator of each part."""
        return self._each.sums_comparisons

    @property
    def _each(self) -> GroupEstimator:
        cls: type[GroupEstimator] = find("advantage", self.estimator)
        return cls(scale="std" if self.normalize else "none", ddof=self.ddof)

    def check(self, chat: Any = None) -> None:
        """Checks that a part has a weight.

        Raises:
            ConfigError: None has.
        """
        if not any(self.weights.values()):
            raise ConfigError(
                f"advantage.weights is {self.weights!r}; expected a weight other than 0, such as "
                "--advantage.weights reward=1 tokens=-0.1"
            )

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        self.check()
        rows = [np.zeros(len(episode.turns)) for episode in episodes]
        for name in self.weights:
            for i, row in self._credit_of(name, episodes, score).items():
                rows[i] = rows[i] + row
        return rows

    def _credit_of(
        self, name: str, episodes: Sequence[Episode], score: Score
    ) -> dict[int, FloatArray]:
        """Returns the weighted advantages of a part, by the index of each episode that has it."""
        values = [part_of(episode, name, score) for episode in episodes]
        rated = {i: row for i, row in enumerate(values) if row is not None}
        if len(rated) < 2 or not self.weights[name]:
            return {}
        compared = [episodes[i] for i in rated]
        if name != REWARD:  # the score of a part is that of turns
            score = "turns"
            compared = [_paid(episodes[i], row) for i, row in rated.items()]
        rows = self._each.compare(compared, score)
        return {i: self.weights[name] * row for i, row in zip(rated, rows, strict=True)}

    def metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Returns the mean of each measured part, and the root mean square of each one's credit."""
        metrics: dict[str, float] = {}
        used = [[group.episodes[i] for i in usable(group)] for group in groups]
        for name in self.weights:
            totals = [part_of(episode, name, "turns") for row in used for episode in row]
            sums = [float(total.sum()) for total in totals if total is not None]
            if not sums:
                played = [turn for row in used for episode in row for turn in episode.turns]
                names = sorted({part for turn in played for part in turn.info.reward_parts})
                _warn_missing(name, ", ".join(names) or "none")
            elif name in MEASURED:
                metrics[f"rollout/reward/{name}"] = float(np.mean(sums))
            rows = [
                credit
                for row, group in zip(used, groups, strict=True)
                for credit in self._credit_of(name, row, group.score).values()
            ]
            flat = np.concatenate(rows) if rows else np.zeros(1)
            metrics[f"train/part_credit/{name}"] = float(np.sqrt(np.mean(flat**2)))
        return metrics


def part_of(episode: Episode, name: str, score: Score) -> FloatArray | None:
    """Returns the part of each turn (K,), 0 where a turn lacks it; None if all lack it."""
    if name == REWARD:
        return turn_rewards(episode, score)
    if name in MEASURED:
        return np.array([_measured(episode, k, name) for k in range(len(episode.turns))])
    parts = [turn.info.reward_parts for turn in episode.turns]
    if not any(name in row for row in parts):
        return None
    return np.array([row.get(name, 0.0) for row in parts], dtype=np.float64)


def _measured(episode: Episode, k: int, name: str) -> float:
    turn = episode.turns[k]
    if name == "tokens":
        return len(turn.action_ids)
    if name == "seconds":
        return turn.timing.generate + turn.timing.step
    return _calls(turn)


def _calls(turn: Turn) -> int:
    from gspo_env.tools.calls import parse_tool_calls

    return len(parse_tool_calls(turn.text, (), turn.message, in_reasoning=turn.in_reasoning))


def _paid(episode: Episode, rewards_K: FloatArray) -> Episode:
    """Returns an episode whose only reward is a part."""
    turns = [
        replace(turn, reward=float(reward))
        for turn, reward in zip(episode.turns, rewards_K, strict=True)
    ]
    return replace(episode, turns=tuple(turns), ending=replace(episode.ending, outcome=None))


@functools.cache
def _warn_missing(name: str, given: str) -> None:
    logger.warning(
        "advantage.weights names the part %r, which no episode of a step has; their parts: %s",
        *(name, given),
    )
