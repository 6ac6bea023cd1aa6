"""Branched groups against plain ones at equal sampled turns, exactly, on tabular problems.

    python studies/credit/branching.py

For each problem and policy it prints the bias of the expected update and its noise: the standard
deviation of an update from the same number of sampled turns, divided by the length of its mean.

    python studies/credit/branching.py comparisons/branching_lookup comparisons/branching_dialogue

This records the curves of comparisons in `studies/data/branching.json` and prints their table.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from gspo_env.compare.stats import holm, paired_interval, paired_permutation_test
from gspo_env.credit import GiGPO, GroupGAE, Outcome, ReturnsToGo
from gspo_env.credit.estimators import Estimator
from gspo_env.runs import Run
from gspo_env.types import Episode, Group

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.branches import BranchBaseline, BranchedEpisode
from studies.credit.enumeration import Enumeration, direction, episode_kinds, policy_at
from studies.credit.exact import TASK, Problem, all_right, key_and_door, may_stop

BUDGET = 64
"""Sampled turns of an update."""
DATA = Path(__file__).resolve().parents[1] / "data" / "branching.json"
"""Curves of `eval/return` over episodes and sampled tokens, by problem, arm and seed."""


def decided_early(turns: int) -> Problem:
    """Makes a problem whose first turn decides most of a reward that comes at the end.

    Action 0 of the first turn earns 1 on the last turn, whatever follows. Action 0 of each other
    turn earns 0.2 at once.
    """
    states = 1 + 2 * (turns - 1)  # 0, then (1, without), (1, with), (2, without), ...
    after = np.full((states, 4), -1)
    reward = np.zeros((states, 4))
    after[0] = [2, 1, 1, 1]
    after[1:-2] = np.arange(3, states)[:, None]
    reward[1:, 0] = 0.2
    reward[-1] += 1.0
    return Problem(after=after, reward=reward)


PROBLEMS = {
    "key and door, 12 turns": key_and_door(12),
    "all right, 3 turns": all_right(3),
    "decided early, 2 turns": decided_early(2),
    "may stop, 2 turns": may_stop(2),
}
"""In the last one the policy decides the length, so the mean over an episode's tokens is a bias."""


class BranchedEnumeration(Enumeration):
    """All branched groups of a problem.

    Args:
        problem: See `Enumeration`.
        estimator: See `Enumeration`.
        trunks: Episodes of a group that share no turn.
        points: Turns at which each of them branches.
        continuations: Times that each of these turns is played again.
        options: Further arguments of `Enumeration`.
    """

    def __init__(
        self,
        problem: Problem,
        estimator: Estimator,
        trunks: int,
        points: Sequence[int],
        continuations: int = 1,
        **options: Any,
    ) -> None:
        self.points = sorted([*points] * continuations)
        self.trees: list[list[tuple[int, list[int]]]] = []
        super().__init__(problem, estimator, trunks, **options)

    def _kinds(self) -> Iterator[list[int]]:
        for trunk in episode_kinds(self.problem, self.edges, 0):
            points = [k for k in self.points if k < len(trunk)]
            states = [self.edges[trunk[k]][0] for k in points]
            parts = [list(episode_kinds(self.problem, self.edges, state)) for state in states]
            for branches in itertools.product(*parts):
                self.trees.append([(0, trunk), *zip(points, branches, strict=True)])
                yield [edge for _, part in self.trees[-1] for edge in part]

    def _weigh(self, estimator: Estimator, size: int) -> None:
        shape = len(self.groups_MG), len(self.edges)
        self.weight_ME, self.square_ME = np.zeros(shape), np.zeros(shape)
        for m, members in enumerate(self.groups_MG):
            episodes: list[Episode] = []
            parts = []
            for tree in (self.trees[i] for i in members):
                origin = len(episodes)
                for shared, part in tree:
                    whole = self._episode(tree[0][1][:shared] + part)
                    values = {f.name: getattr(whole, f.name) for f in fields(Episode)}
                    lineage = {"origin": origin if shared else None, "shared": shared}
                    episodes.append(BranchedEpisode(**values, number=len(episodes), **lineage))
                    parts.append((shared, part))
            rows = estimator.advantages(Group(task=TASK, episodes=tuple(episodes)))
            for (shared, part), row in zip(parts, rows, strict=True):
                turns = len(part) if self.aggregation == "sequence_mean" else 1
                share = row[shared:] / (size * turns * self.problem.tokens)
                np.add.at(self.weight_ME[m], part, share)
                np.add.at(self.square_ME[m], part, share**2)


def at_equal_turns(groups: Enumeration, share: float) -> tuple[float, float]:
    """Returns bias and noise of an update at the policy with this share of the best return."""
    logits = policy_at(groups.problem, share)
    turns = float(groups.under(logits)[0] @ groups.turns_M)
    result = direction([(groups, logits)], groups=BUDGET / turns)  # type: ignore[arg-type]
    return result.bias, float(np.sqrt((result.cosine / result.progress) ** 2 - 1))


def arms(problem: Problem) -> dict[str, Enumeration]:
    """Returns plain groups of 8 with each estimator, and groups of 4 that branch."""
    plain = {
        "outcome": Outcome(),
        "returns_to_go": ReturnsToGo(),
        "group_gae": GroupGAE(),
        "gigpo": GiGPO(),
    }
    last = max(map(len, Enumeration(problem, Outcome(), 1).kinds)) - 1
    kinds: dict[str, Enumeration] = {
        name: Enumeration(problem, estimator, 8) for name, estimator in plain.items()
    }
    for name, points, n in (
        ("branch at turn 1, 1 more", [1], 1),
        ("branch at the last turn, 1 more", [last], 1),
        ("branch at the last turn, 2 more", [last], 2),
    ):
        kinds[name] = BranchedEnumeration(problem, BranchBaseline(), 4, points, n)
    kinds["returns_to_go, branched at turn 1"] = BranchedEnumeration(
        problem, ReturnsToGo(), 4, [1], 1
    )
    return kinds


def record(folders: Sequence[str]) -> None:
    """Writes the curves of finished comparisons to `DATA`."""
    problems: dict[str, Any] = {}
    for path in sorted(p for each in folders for p in Path(each).glob("runs/*/*/*/metrics.jsonl")):
        problem, arm, seed = (part.rsplit("-", 1)[0] for part in path.parts[-4:-1])
        run = Run.open(path.parent)
        returns, success = (run.series[f"eval/{name}"].values for name in ("return", "success"))
        problems.setdefault(problem, {}).setdefault(arm, {})[seed] = {
            "episodes": run.series["eval/episodes_before"].values.tolist(),
            "return": returns.round(6).tolist(),
            "success": success.tolist(),
            "tokens": run.total("rollout/tokens"),
        }
    DATA.write_text(json.dumps(problems) + "\n")


def table() -> list[str]:
    """Returns a row for each arm of `DATA`; the differences are from `returns_to_go`."""
    rows, tests = [], []
    for problem, arms in json.loads(DATA.read_text()).items():
        last = min(max(r["episodes"][-1] for r in runs.values()) for runs in arms.values())
        plain = next(iter(arms["returns_to_go"].values()))["episodes"]
        grid = sorted({*(x for x in plain if x < last), last})  # what all arms have
        curves = {
            arm: np.array([np.interp(grid, r["episodes"], r["return"]) for r in runs.values()])
            for arm, runs in arms.items()
        }
        areas = {a: np.trapezoid(c, grid, axis=1) / grid[-1] for a, c in curves.items()}
        for arm in ("returns_to_go", "outcome", "branch_baseline"):
            runs = arms[arm].values()
            end, success = np.mean(
                [[r[n][-1] for r in runs] for n in ("return", "success")], axis=1
            )
            tokens = np.mean([run["tokens"] for run in runs])
            row = f"| {problem} | `{arm}` | {areas[arm].mean():.3f} | {end:.2f} | {success:.0%} "
            row += f"| {tokens:,.0f} |"
            if arm != "returns_to_go":
                change = areas[arm] - areas["returns_to_go"]
                low, high = paired_interval(change)
                row += f" {change.mean():.3f} ({low:.3f} to {high:.3f}) |"
                tests.append(paired_permutation_test(areas[arm], areas["returns_to_go"]))
            rows.append(row)
    ps = iter(holm(tests))
    return [row + (f" {next(ps):.4f} |" if " to " in row else "  |  |") for row in rows]


if __name__ == "__main__" and sys.argv[1:]:
    record(sys.argv[1:])
    print("\n".join(table()))
elif __name__ == "__main__":
    for title, problem in PROBLEMS.items():
        print(f"\n{title}: bias and noise of {BUDGET} turns at 30 % and 90 % of the best return")
        for name, groups in arms(problem).items():
            cells = [
                f"{b:9.1e} {n:6.2f}" for b, n in (at_equal_turns(groups, s) for s in (0.3, 0.9))
            ]
            print(f"  {name:36} {'   '.join(cells)}")
