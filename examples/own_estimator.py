"""Trains on the best episodes of a group only.

gspo-env train --advantage examples/own_estimator.py:BestOfGroup --margin 0.1
"""

from dataclasses import dataclass

import numpy as np

from gspo_env.credit import Estimator, turn_rewards


@dataclass(frozen=True, kw_only=True)
class BestOfGroup(Estimator):
    """Advantage 1 for the turns of an episode whose return is close to the best, else 0."""

    margin: float = 0.0
    """How far a return may be below the best."""

    def advantages(self, group):
        """Gives one array of K numbers, one for each turn, for each episode."""
        returns = np.array([turn_rewards(e, group.score).sum() for e in group.episodes])
        best = (returns >= returns.max() - self.margin) & (returns > returns.min())
        turns = [len(episode.turns) for episode in group.episodes]
        return [np.full(k, float(good)) for k, good in zip(turns, best, strict=True)]
