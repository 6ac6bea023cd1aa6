"""What `gspo-env whatif` predicts from one batch, against the truth on problems that are listed.

    python studies/credit/whatif_exact.py

A batch has 16 groups of 4 episodes of a problem of two turns, by a policy at half of the best
return. Each arm takes one update with it, of length 0.3 in the logits. Predicted is the column
`outcome` of `whatif`, from the batch alone; exact is the change of the expected return. For each of
ten pairs of arms, the table has the means of the differences over 400 batches, how often the
predicted one has the sign of the exact one, and their correlation over the batches. The second
table has the changes of each arm.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np

from gspo_agents.whatif import predicted
from gspo_env.credit import Estimator, Outcome
from gspo_env.registry import find
from gspo_env.types import FloatArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.exact import probabilities, true_gradient
from studies.credit.losses_exact import GROUPS, PROBLEMS, AllGroups, logits_of

LENGTH, BATCHES = 0.3, 400
ARMS: dict[str, tuple[Estimator, str, dict[str, str]]] = {
    "outcome": (Outcome(), "gspo", {}),
    "outcome, std": (Outcome(scale="std"), "gspo", {}),
    "token_sum": (Outcome(), "gspo", {"aggregation": "token_sum"}),
    **{n: (find("advantage", n)(), "gspo", {}) for n in ("returns_to_go", "gigpo", "group_gae")},
    "turn_plus_outcome": (find("advantage", "turn_plus_outcome")(), "gspo", {}),
}
PAIRS = (
    *(("additive", name, "outcome") for name in ("returns_to_go", "outcome, std", "gigpo")),
    ("key and door", "returns_to_go", "outcome"),
    ("key and door", "turn_plus_outcome", "outcome"),
    ("key and door", "outcome, std", "outcome"),
    ("key and door", "group_gae", "gigpo"),
    ("may stop", "token_sum", "outcome"),
    ("may stop", "turn_plus_outcome", "outcome"),
    ("may stop", "returns_to_go", "outcome"),
)


@cache
def changes(problem: str, arm: str, batches: int = BATCHES) -> tuple[FloatArray, FloatArray]:
    """Returns the predicted and the exact change of the return, for each batch.

    Args:
        problem: Its name.
        arm: Its name.
        batches: Their number; all arms have the same ones.
    """
    estimator, loss, settings = ARMS[arm]
    groups, logits = (
        AllGroups(PROBLEMS[problem], estimator),
        logits_of(PROBLEMS[problem], "on policy", 0),
    )
    chance_M, updates_MD = groups.updates(find("loss", loss)(**settings), *logits)
    rewards_W = np.array([sum(groups.problem.reward[s] for s in walk) for walk in groups.walks])
    drawn = np.random.default_rng(0).choice(
        len(chance_M), (batches, GROUPS), p=chance_M / chance_M.sum()
    )
    before_W, value = _log_chance(groups, logits[0]), true_gradient(groups.problem, logits[0])[1]
    rows = []
    for batch_P in drawn:
        step = updates_MD[batch_P].mean(0)
        step *= LENGTH / max(float(np.linalg.norm(step)), 1e-12)
        moved = logits[0] + step.reshape(logits[0].shape)
        change_W = _log_chance(groups, moved) - before_W
        members_PG = groups.groups_MG[batch_P]
        ours = predicted(rewards_W[members_PG], change_W[members_PG])
        rows.append((ours, true_gradient(groups.problem, moved)[1] - value))
    ours_B, exact_B = np.array(rows).T
    return ours_B, exact_B


def _log_chance(groups: AllGroups, logits: FloatArray) -> FloatArray:
    """Returns the log-probability of each episode."""
    chance = np.log(probabilities(groups.problem, logits)[1])
    return np.array([sum(chance[pair] for pair in walk) for walk in groups.walks])


def main() -> None:
    """Prints the table."""
    print("| problem | arms | predicted | exact | same sign | correlation |")
    print("|---|---|---|---|---|---|")
    for problem, one, other in PAIRS:
        pairs = zip(changes(problem, one), changes(problem, other), strict=True)
        ours_B, exact_B = (a - b for a, b in pairs)
        same = np.mean(np.sign(ours_B) == np.sign(exact_B))
        linear = np.corrcoef(ours_B, exact_B)[0, 1]
        print(
            f"| {problem} | {one}, not {other} | {ours_B.mean():+.4f} | {exact_B.mean():+.4f} "
            f"| {same:.0%} | {linear:.2f} |"
        )
    print("\n| problem | arm | predicted | exact | correlation |\n|---|---|---|---|---|")
    for problem, arm in sorted({(p, a) for p, *pair in PAIRS for a in pair}):
        ours_B, exact_B = changes(problem, arm)
        linear = np.corrcoef(ours_B, exact_B)[0, 1]
        print(
            f"| {problem} | {arm} | {ours_B.mean():+.4f} | {exact_B.mean():+.4f} | {linear:.2f} |"
        )


if __name__ == "__main__":
    main()
