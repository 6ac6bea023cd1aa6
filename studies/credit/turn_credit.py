"""Three published ways to credit turns, exactly: RTPO, TCPO and DRACO.

    python studies/credit/turn_credit.py

Bias and progress of the expected update as in `losses_exact.py`: on policy, at half of the best
return, for as many sampled turns as 16 groups of 4 whole episodes have.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gspo_env.credit import Outcome, ReturnsToGo
from gspo_env.credit.estimators import Estimator, GroupEstimator
from gspo_env.credit.scores import turn_rewards
from gspo_env.credit.turn_estimators import z_by_turn
from gspo_env.settings import settings
from gspo_env.types import Episode, FloatArray, Score

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.branches import BranchBaseline
from studies.credit.branching import BranchedEnumeration
from studies.credit.enumeration import Enumeration, direction, episode_kinds, policy_at
from studies.credit.exact import Problem, action_name
from studies.credit.losses_exact import GROUPS, PROBLEMS, SIZE


class ReverseTurns(Enumeration):
    """RTPO's groups: from each turn of one episode, siblings whose returns are compared.

    A sibling trains the turn at which it begins and nothing else; the episode itself trains no
    turn. Its advantage is its return less the mean of the siblings' at this turn. The order of the
    updates, from the last turn to the first, changes nothing on policy.

    Source:
        arXiv 2608.18682, equations 6 and 7.
    """

    siblings = SIZE - 1

    def _kinds(self) -> Iterator[list[int]]:
        self.trees: list[list[list[int]]] = []
        for trunk in episode_kinds(self.problem, self.edges, 0):
            states = [self.edges[edge][0] for edge in trunk]
            parts = [list(episode_kinds(self.problem, self.edges, state)) for state in states]
            for branches in itertools.product(*(p for p in parts for _ in range(self.siblings))):
                self.trees.append([*branches])
                yield [*trunk, *itertools.chain(*branches)]

    def _weigh(self, estimator: Estimator, size: int) -> None:
        shape = len(self.groups_MG), len(self.edges)
        self.weight_ME, self.square_ME = np.zeros(shape), np.zeros(shape)
        for m, (kind,) in enumerate(self.groups_MG):
            for begin in range(0, len(self.trees[kind]), self.siblings):
                parts = self.trees[kind][begin : begin + self.siblings]
                returns = np.array([sum(self.edges[edge][1] for edge in part) for part in parts])
                share_J = (returns - returns.mean()) / (self.siblings * self.problem.tokens)
                np.add.at(self.weight_ME[m], [part[0] for part in parts], share_J)
                np.add.at(self.square_ME[m], [part[0] for part in parts], share_J**2)


@settings
class VerifierCredit(GroupEstimator):
    """TCPO: gains over the best score so far, and what followed turns that gained nothing.

    With the score c_k after turn k, here the sum of the rewards, and the best score b_k before it,
    a turn gets max(0, c_k - b_k). Once b_k has reached `success`, it gets 1 if it keeps the score
    and -(b_k - c_k) if it loses some. Before, a turn without a gain gets the best score from it on,
    less the mean of those of the other episodes without a gain at this turn. The credit is compared
    within a turn. Turns with surprising tokens are branched at, too.

    Source:
        arXiv 2608.01667; the equations of a summary and of a public implementation.
    """

    success: float = 1.0

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        scores = [np.cumsum(turn_rewards(e, score)) for e in episodes]
        best = [np.maximum.accumulate(np.append(0.0, c))[:-1] for c in scores]
        later = [np.maximum.accumulate(c[::-1])[::-1] for c in scores]
        rows = [np.maximum(c - b, 0.0) for c, b in zip(scores, best, strict=True)]
        waits = [(row == 0) & (b < self.success) for row, b in zip(rows, best, strict=True)]
        for i, (row, wait, b) in enumerate(zip(rows, waits, best, strict=True)):
            done = (b >= self.success) & (row == 0)
            row[done] = np.where(scores[i] >= b, 1.0, scores[i] - b)[done]
            for k in np.flatnonzero(wait):
                peers = [
                    later[j][k]
                    for j, other in enumerate(waits)
                    if j != i and len(other) > k and other[k]
                ]
                row[k] = later[i][k] - np.mean(peers) if peers else 0.0
        return z_by_turn(rows, self.scale, self.ddof)


@settings
class JudgedTurns(GroupEstimator):
    """DRACO's credit: the outcome's advantage, moved to the turns that a judge says earned it.

    The judge is perfect: it knows which actions are the best in their state. With Q_k = 1 for such
    a turn and else 0, w_k is Q_k if the advantage is at least 0 and else 1 - Q_k, and a turn of K
    gets A K w_k / (sum of w), or A if the sum is 0.

    Source:
        arXiv 2609.04094, equations 5 and 6, for turns of equal length. Its advantage comes from
        the judge, too, since it is for tasks without a reward.
    """

    best: frozenset[tuple[str, str]]
    """The states and the actions."""

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        whole = Outcome(baseline="leave_one_out").compare(episodes, score)
        rows = []
        for episode, row in zip(episodes, whole, strict=True):
            right = np.array([(turn.state_key, turn.text) in self.best for turn in episode.turns])
            weights = (right if row[0] >= 0 else ~right).astype(float)
            total = weights.sum()
            rows.append(row * len(row) * weights / total if total else row)
        return rows


def best_actions(problem: Problem) -> frozenset[tuple[str, str]]:
    """Returns the best actions of each state, by their names."""
    value, best = np.zeros(len(problem.after) + 1), set()
    for state in reversed(range(len(problem.after))):
        quality = problem.reward[state] + value[problem.after[state]]
        value[state] = quality.max()
        for action in np.flatnonzero(quality == value[state]):
            name = action_name(problem.reward[state, action], problem.after[state, action])
            best.add((str(state), name))
    return frozenset(best)


def arms(problem: Problem) -> dict[str, Enumeration]:
    """Returns the groups of each way."""
    return {
        "`outcome`": Enumeration(problem, Outcome(), SIZE),
        "`returns_to_go`": Enumeration(problem, ReturnsToGo(), SIZE),
        "`BranchBaseline`": BranchedEnumeration(problem, BranchBaseline(), SIZE, [1]),
        "RTPO": ReverseTurns(problem, ReturnsToGo(), 1),
        "TCPO": Enumeration(problem, VerifierCredit(), SIZE),
        "DRACO": Enumeration(problem, JudgedTurns(best=best_actions(problem)), SIZE),
    }


def measure(groups: Enumeration) -> tuple[float, float]:
    """Returns bias and progress at equal sampled turns."""
    logits = policy_at(groups.problem, 0.5)
    whole = Enumeration(groups.problem, Outcome(), 1)
    turns = float(whole.under(logits)[0] @ whole.turns_M) * SIZE * GROUPS
    count = turns / float(groups.under(logits)[0] @ groups.turns_M)
    result = direction([(groups, logits)], groups=count)  # type: ignore[arg-type]
    return result.bias, result.progress


if __name__ == "__main__":
    rows: dict[str, list[str]] = {}
    for problem in PROBLEMS.values():
        for name, groups in arms(problem).items():
            bias, progress = measure(groups)
            rows.setdefault(name, []).append(f"{bias:.3f}, {progress:.2f}")
    print(f"| credit | {' | '.join(PROBLEMS)} |\n|---|{'---|' * len(PROBLEMS)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")
