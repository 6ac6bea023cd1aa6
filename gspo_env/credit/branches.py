"""Credit in groups whose episodes branch: a turn is compared with siblings that share its past.

The episodes of a group form a forest. Its nodes are the turns: a turn that several episodes share
is one node, and its children are the turns that were sampled after it. Notation: c(x) is the set of
children of node x, r_x its reward, and p(x) the set of x and its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Interval

from gspo_env.credit.estimators import Estimator
from gspo_env.credit.scores import turn_rewards
from gspo_env.credit.statistics import divided
from gspo_env.settings import settings
from gspo_env.types import Episode, FloatArray, Score, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchedEpisode(Episode):
    """An episode of a branched group, which may begin with turns of another one.

    The shared turns are copies. Their `StepInfo.token_mask` is False throughout, so each token is
    trained once, in the episode that sampled it.

    Example:
        Number 4 continues number 0 from its turn 2: `number=4, origin=0, shared=2`. Its turns 0 and
        1 are those of number 0, and it sampled turn 2 and all later ones.
    """

    number: int
    """Names the episode in its group."""
    origin: int | None = None
    """The episode with which it begins, which comes before it in the group; None if it shares no
    turn."""
    shared: int = 0
    """Number of turns that it shares with its origin."""


@dataclass(slots=True, eq=False)
class _Node:
    """A turn of the forest, or its root, which is no turn."""

    parent: _Node | None
    depth: int
    reward: float
    tokens: int
    """Trained tokens of the turn and of all before it."""
    children: list[_Node] = field(default_factory=list)
    value: float = 0.0
    """Return-to-go: r_x + gamma * mean of the values of c(x)."""
    weight: float = 1.0
    """Probability of reaching it from the root, with equal chances for all children of a node."""
    token_weight: float = 0.0
    """Sum of weight / trained tokens over the episodes that end below it."""
    levels: dict[int, FloatArray] = field(default_factory=dict)
    """(3,) for each depth below it: number of nodes, sum of weights, weighted sum of values."""


@settings
class BranchBaseline(Estimator):
    """Each branch's return against the mean of its siblings', which share its past.

    Q_x = r_x + gamma * mean of Q over c(x), and A_x = Q_x - mean of Q over p(x) without x. A turn
    without siblings is compared with the turns of its number under its closest ancestor that has
    others, weighted as below; if there are none, with all turns of other first turns. In a group
    without branches these are `returns_to_go`, where at least 3 episodes have the turn.

    A turn with n siblings is one of n + 1 samples, so A_x is multiplied by the weight of x: 1 for
    the whole group, divided equally among the children of each node. This has no bias where the
    turns to branch at depend on their past alone and all episodes have equal length.

    Source:
        Leave-one-out values of continuations: VinePPO, arXiv 2410.01679.

    Example:
        Two first turns; the first continues twice, with the rewards 1 and 0, and the second once,
        with 0. Q is 1/2 and 0 for the first turns, so A is 1/2 and -1/2. The two continuations get
        1 and -1, times their weight: each is half of one of two episodes.
    """

    gamma: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Discount per turn."""
    aggregation: Literal["sequence_mean", "token_mean", "token_sum"] = "sequence_mean"
    """The `aggregation` of the loss. `sequence_mean` divides by the tokens that an episode sampled
    itself, which the advantages undo: they count a branch as part of the whole episode."""
    uses_score: ClassVar[bool] = True
    compares_branches: ClassVar[bool] = True
    """See `gspo_env.rollout.branching.Branching.check`."""

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `Estimator.compare`."""
        root = _Node(None, -1, 0.0, 0)
        nodes, paths = _grow(root, episodes, score)
        _evaluate(root, nodes, self.gamma)
        trunks, rows, values = len(root.children), [], []
        for episode, path in zip(episodes, paths, strict=True):
            shared = shared_turns(episode)
            past = path[shared - 1].tokens if shared else 0
            row_K = np.zeros(len(path))
            for k in range(shared, len(path)):
                node = path[k]
                advantage = _advantage(node)
                values.append(advantage)
                if self.aggregation == "sequence_mean":
                    row_K[k] = advantage * node.token_weight * (path[-1].tokens - past) * trunks
                else:
                    row_K[k] = advantage * node.weight * trunks
            rows.append(row_K)
        deviations = np.array(values)
        return divided(rows, deviations - deviations.mean(), self.scale, self.ddof)


def shared_turns(episode: Episode) -> int:
    """Returns the number of turns that another episode of the group sampled."""
    return episode.shared if isinstance(episode, BranchedEpisode) else 0


def mask_turn(turn: Turn) -> tuple[bool, ...]:
    """Returns which sampled tokens of a turn are trained on."""
    mask = turn.info.token_mask
    return (True,) * max(1, len(turn.action_ids)) if mask is None else mask


def _grow(
    root: _Node, episodes: Sequence[Episode], score: Score
) -> tuple[list[_Node], list[list[_Node]]]:
    """Returns the nodes, parents first, and the path of each episode."""
    nodes: list[_Node] = []
    paths: list[list[_Node]] = []
    numbered: dict[int, list[_Node]] = {}
    for episode in episodes:
        path: list[_Node] = []
        if isinstance(episode, BranchedEpisode):
            if episode.origin is not None:
                path = numbered[episode.origin][: episode.shared]
            numbered[episode.number] = path
        rewards_K = turn_rewards(episode, score)
        for k in range(len(path), len(rewards_K)):
            parent = path[-1] if path else root
            tokens = parent.tokens + sum(mask_turn(episode.turns[k]))
            node = _Node(parent, k, float(rewards_K[k]), tokens)
            parent.children.append(node)
            path.append(node)
            nodes.append(node)
        paths.append(path)
    return nodes, paths


def _evaluate(root: _Node, nodes: Sequence[_Node], gamma: float) -> None:
    """Computes weights from the root down, and then values from the leaves up."""
    for node in nodes:
        assert node.parent is not None
        node.weight = node.parent.weight / len(node.parent.children)
    for node in [*reversed(nodes), root]:
        below = [child.value for child in node.children]
        node.value = node.reward + (gamma * sum(below) / len(below) if below else 0.0)
        if below:
            node.token_weight = sum(child.token_weight for child in node.children)
        else:
            node.token_weight = node.weight / max(1, node.tokens)
        node.levels[node.depth] = np.array([1.0, node.weight, node.weight * node.value])
        for child in node.children:
            for depth, sums in child.levels.items():
                node.levels[depth] = node.levels.get(depth, 0.0) + sums


def _advantage(node: _Node) -> float:
    """Returns Q_x minus its baseline; 0 if nothing can be compared with it."""
    child, ancestor = node, node.parent
    while ancestor is not None:
        others = ancestor.levels[node.depth] - child.levels[node.depth]
        if others[0] > 0.5:
            return float(node.value - others[2] / others[1])
        child, ancestor, top = ancestor, ancestor.parent, child
    everything = np.sum([sums for depth, sums in child.levels.items() if depth >= 0], axis=0)
    others = everything - np.sum([*top.levels.values()], axis=0)
    return float(node.value - others[2] / others[1]) if others[0] > 0.5 else 0.0
