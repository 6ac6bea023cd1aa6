"""Credit for the several agents of an environment: the estimator `by_agent`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from gspo_env.credit.estimators import GroupEstimator
from gspo_env.errors import ConfigError
from gspo_env.settings import settings
from gspo_env.types import Episode, FloatArray, Score


@settings
class ByAgent(GroupEstimator):
    """Each turn has the reward of the agent that took it, against those of the same role.

    A_ik = w_a (r_i(a) - mean of r_j(a)), where a is the agent of turn k, and r_i(a) its reward in
    episode i: the entry of its name in the last `reward_parts`. The mean is over all turns of the
    group that the agent took in the same state (`Turn.state_key`), or over all of its turns that
    have no state. So agents with opposed rewards, such as players, or a proposer and a solver,
    train one policy in one episode.

    Example:
        Two games of one turn each for x and y, which pay [x: 1, y: -1] and [x: 0, y: 0]: the turns
        have [1/2, -1/2] and [-1/2, 1/2].
    """

    weights: dict[str, Any] = field(default_factory=dict)
    """The weight of an agent by name, w: 1 if it has none, and 0 does not train the agent."""
    missing: float = 0.0
    """The reward of an agent without one, such as in a game that was cut."""
    uses_score: ClassVar[bool] = False
    credits_agents: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        for name, weight in self.weights.items():
            if type(weight) not in (int, float) or not math.isfinite(weight):
                raise ConfigError(f"weights has {name}={weight!r}; expected finite numbers")

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        visits: dict[Any, list[tuple[int, int, float]]] = defaultdict(list)
        for i, episode in enumerate(episodes):
            parts = episode.turns[-1].info.reward_parts
            agent = episode.reset.agent
            for k, turn in enumerate(episode.turns):
                reward = parts.get(agent or "", self.missing)
                visits[turn.state_key, agent].append((i, k, reward))
                agent = turn.info.agent if turn.kind == "action" else agent
        rows = [np.zeros(len(episode.turns)) for episode in episodes]
        for (_, agent), same in visits.items():
            credit = self._z(np.array([reward for *_, reward in same]))
            for (i, k, _), value in zip(same, self.weights.get(agent, 1.0) * credit, strict=True):
                rows[i][k] = value
        return rows
