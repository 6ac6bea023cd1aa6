"""Expectations over all groups of a tabular problem: no sampling, so no error of sampling.

An estimator sees the rewards and the states of an episode, not its actions. Episodes with equal
rewards and states are one kind, and a group is a multiset of kinds, so that all groups can be
listed. Given the kinds, the actions are independent, with a known mean and variance of the gradient
of their log-probability. The gradient is that of the loss on policy, with the mean over episodes of
the mean over tokens (GSPO) or of the sum over tokens (Dr. GRPO).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspo_env.batch.padded import bare_episode
from gspo_env.credit.estimators import Estimator
from gspo_env.credit.statistics import MIN_SCALE
from gspo_env.errors import ConfigError
from gspo_env.learner.losses import Aggregation
from gspo_env.types import Episode, FloatArray, Group, IntArray
from studies.credit.exact import (
    TASK,
    Problem,
    action_name,
    best_return,
    probabilities,
    true_gradient,
)

MOST_GROUPS = 200_000
"""The most groups to list."""

Edge = tuple[int, float, int]
"""A state, a reward and the next state: the actions that an estimator cannot tell apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """How the update of an estimator compares with the true gradient."""

    cosine: float
    """Cosine of the expected update and the true gradient: below 1 is a bias in direction."""
    bias: float
    """Norm of (best-scaled expected update - true gradient), over the norm of the true gradient."""
    progress: float
    """Expected component of an update along the true gradient, over the root mean square length of
    an update: bias and noise together, from 1 (the true gradient) to 0; the scale cancels."""
    length: float
    """Root mean square length of an update."""


class Enumeration:
    """All groups of a problem, with the advantages that an estimator gives them.

    Args:
        problem: The problem.
        estimator: The estimator; the scale `batch` divides by the deviation of a batch of groups.
        group_size: Episodes of a group, G.
        aggregation: How the loss reduces the tokens of an episode; not `token_mean`, whose
            denominator is the number of tokens of a whole minibatch. `turn_mean` is
            `sequence_mean`, since all turns have as many tokens.

    Raises:
        ConfigError: The aggregation is `token_mean`, or there are more than `MOST_GROUPS` groups.
    """

    def __init__(
        self,
        problem: Problem,
        estimator: Estimator,
        group_size: int,
        aggregation: Aggregation = "sequence_mean",
    ) -> None:
        if aggregation == "token_mean":
            raise ConfigError("aggregation is 'token_mean'; expected sequence_mean or token_sum")
        self.problem, self.estimator, self.aggregation = problem, estimator, aggregation
        self.edges = _edges(problem)
        kinds = list(self._kinds())
        count = math.comb(len(kinds) + group_size - 1, group_size)
        if count > MOST_GROUPS:
            raise ConfigError(
                f"{len(kinds)} kinds of episodes make {count} groups of {group_size}; "
                f"expected at most {MOST_GROUPS}"
            )
        listed = itertools.combinations_with_replacement(range(len(kinds)), group_size)
        self.groups_MG: IntArray = np.array(list(listed))
        self.kinds = kinds
        plain = replace(estimator, scale="none") if estimator.scale == "batch" else estimator
        self._weigh(plain, group_size)

    @property
    def turns_M(self) -> IntArray:
        """(M,) the turns that are sampled for each group."""
        lengths: IntArray = np.array([len(kind) for kind in self.kinds])
        turns_M: IntArray = lengths[self.groups_MG].sum(1)
        return turns_M

    def _kinds(self) -> Iterator[list[int]]:
        """Yields the edges that each kind of episode samples."""
        return episode_kinds(self.problem, self.edges, 0)

    def _weigh(self, estimator: Estimator, size: int) -> None:
        """Computes the weight of each edge in the update of each group."""
        shape = len(self.groups_MG), len(self.edges)
        self.weight_ME, self.square_ME = np.zeros(shape), np.zeros(shape)
        self.sums_M3 = np.zeros((shape[0], 3))  # number, sum and sum of squares of advantages
        episodes = [self._episode(kind) for kind in self.kinds]
        for m, members in enumerate(self.groups_MG):
            group = Group(task=TASK, episodes=tuple(episodes[i] for i in members))
            for i, row in zip(members, estimator.advantages(group), strict=True):
                # the advantage of a turn weighs each of its tokens, and 1/|y| is 1 / (K tokens)
                turns = 1 if self.aggregation == "token_sum" else len(row)
                share = row / (size * turns * self.problem.tokens)
                np.add.at(self.weight_ME[m], self.kinds[i], share)
                np.add.at(self.square_ME[m], self.kinds[i], share**2)
                self.sums_M3[m] += len(row), row.sum(), (row**2).sum()

    def _episode(self, kind: list[int]) -> Episode:
        states, rewards, after = zip(*(self.edges[e] for e in kind), strict=True)
        lengths, acts = [self.problem.tokens] * len(kind), map(action_name, rewards, after)
        return bare_episode(TASK, lengths, rewards, list(map(str, states)), list(acts))

    def under(self, logits: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Computes what a policy makes of the groups.

        Returns:
            (M,) the probability of each group; (M, D) the mean of its gradient; (M,) the variance
            of its gradient, summed over all logits.
        """
        log_token, chance = probabilities(self.problem, logits)
        scores, spread, odds = [], [], []
        for state, reward, after in self.edges:
            same = (self.problem.reward[state] == reward) & (self.problem.after[state] == after)
            actions = np.flatnonzero(same)
            given = np.array([self._score(log_token, state, int(a)) for a in actions])
            share = chance[state, actions] / chance[state, actions].sum()
            mean = share @ given
            scores.append(mean)
            spread.append(float(share @ ((given - mean) ** 2).sum(1)))
            odds.append(float(chance[state, actions].sum()))
        log_kind = np.array([np.log([odds[e] for e in kind]).sum() for kind in self.kinds])
        size = self.groups_MG.shape[1]
        orders = [
            math.lgamma(size + 1) - sum(math.lgamma(n + 1) for n in np.bincount(members))
            for members in self.groups_MG
        ]
        chance_M = np.exp(log_kind[self.groups_MG].sum(1) + np.array(orders))
        gradient_MD = self.weight_ME @ np.array(scores)
        return chance_M / chance_M.sum(), gradient_MD, self.square_ME @ np.array(spread)

    def _score(self, log_token: FloatArray, state: int, action: int) -> FloatArray:
        """Returns the gradient of an action's log-probability for all logits, flat."""
        gradient = np.zeros(self.problem.shape)
        for node, token in self.problem.path(action):
            gradient[state, node] -= np.exp(log_token[state, node])
            gradient[state, node, token] += 1.0
        return gradient.ravel()


def direction(
    tasks: Sequence[tuple[Enumeration, FloatArray]],
    *,
    groups: int = 16,
    draws: int = 4000,
    seed: int = 0,
) -> Direction:
    """Compares the update from a batch of groups with the true gradient.

    Args:
        tasks: Each task with its policy, whose logits are its own. All have the same estimator.
        groups: Groups of an update, P; each task has the same number.
        draws: Updates to draw where the scale is `batch`; all else is a sum over all groups.
        seed: Seed of the draws.
    """
    true = [true_gradient(task.problem, logits)[0].ravel() for task, logits in tasks]
    parts = [task.under(logits) for task, logits in tasks]
    if tasks[0][0].estimator.scale != "batch":
        mean = np.concatenate([chance_M @ gradient_MD for chance_M, gradient_MD, _ in parts])
        noise = sum(
            float(chance_M @ ((gradient_MD - chance_M @ gradient_MD) ** 2).sum(1))
            + float(chance_M @ inside_M)
            for chance_M, gradient_MD, inside_M in parts
        )
        square = float(mean @ mean) + noise * len(tasks) / groups
        return direction_of(mean, square, np.concatenate(true))
    rng = np.random.default_rng(seed)
    each = groups // len(tasks)
    drawn = [rng.choice(len(part[0]), (draws, each), p=part[0]) for part in parts]
    sums = [t.sums_M3[d].sum(1) for (t, _), d in zip(tasks, drawn, strict=True)]
    factor = _factors(np.sum(sums, axis=0), tasks[0][0].estimator.ddof) / each
    pairs = list(zip(parts, drawn, strict=True))
    updates = np.hstack([part[1][d].sum(1) for part, d in pairs]) * factor[:, None]
    inside = sum(part[2][d].sum(1) for part, d in pairs) * factor**2
    square = float(((updates**2).sum(1) + inside).mean())
    return direction_of(updates.mean(0), square, np.concatenate(true))


def _factors(sums_B3: FloatArray, ddof: int) -> FloatArray:
    """Returns 1 / standard deviation of the advantages of each batch."""
    count, total, square = sums_B3.T
    deviation = np.sqrt(np.maximum(square - total**2 / count, 0.0) / (count - ddof))
    factors: FloatArray = np.where(deviation < MIN_SCALE, 0.0, 1 / np.maximum(deviation, MIN_SCALE))
    return factors


def policy_at(problem: Problem, share: float, seed: int = 0) -> FloatArray:
    """Follows the true gradient from random logits to a share of the best return.

    Args:
        problem: The problem.
        share: Where to stop, as a share of the best return above 0 and below 1.
        seed: Seed of the first logits.
    """
    logits = 0.5 * np.random.default_rng(seed).standard_normal(problem.shape)
    wanted = share * best_return(problem)
    while True:
        gradient, value = true_gradient(problem, logits)
        if value >= wanted:
            return logits
        logits = logits + 0.05 * gradient / max(float(np.linalg.norm(gradient)), 1e-12)


def direction_of(mean: FloatArray, square: float, true: FloatArray) -> Direction:
    """Compares an update, given its mean and its mean square length, with the true gradient."""
    length, size = float(np.linalg.norm(mean)), float(np.linalg.norm(true))
    along = float(mean @ true) / size
    best = along / max(length, 1e-300) ** 2 * size
    return Direction(
        cosine=along / max(length, 1e-300),
        bias=float(np.linalg.norm(best * mean - true)) / size,
        progress=along / math.sqrt(max(square, 1e-300)),
        length=math.sqrt(square),
    )


def _edges(problem: Problem) -> list[Edge]:
    return sorted(
        {
            (state, float(reward), int(after))
            for state in range(len(problem.after))
            for reward, after in zip(problem.reward[state], problem.after[state], strict=True)
        }
    )


def episode_kinds(problem: Problem, edges: list[Edge], state: int) -> Iterator[list[int]]:
    """Yields the edges of every kind of episode from a state on."""
    for number, (at, _, after) in enumerate(edges):
        if at == state and after < 0:
            yield [number]
        elif at == state:
            for rest in episode_kinds(problem, edges, after):
                yield [number, *rest]
