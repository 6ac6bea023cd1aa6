"""Compares the divisors of advantages: the group's deviation, the batch's, and none.

    python studies/credit/credit_scale.py

All groups of each problem are listed, so the figures have no error of sampling (those of the scale
`batch` come from 4,000 drawn batches of 16 groups). For policies that reach 10, 50 and 90 % of the
best return it prints

- the cosine between the expected update and the true gradient: below 1 is a bias,
- the progress: the expected component of an update of 16 groups along the true gradient, over the
  root mean square length of an update. It counts bias and noise; the size of an update cancels.

The last table has the length of an update, relative to its length at 10 % of the best return.

The mixed column has two tasks in equal numbers, one at 10 % and one at 90 % of its best return.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from gspo_env.registry import BUILTIN, find

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.enumeration import Direction, Enumeration, direction, policy_at
from studies.credit.exact import additive, all_right, key_and_door, look_up, may_stop

PROBLEMS = {
    "key and door, 4 turns": key_and_door(4),
    "look-up, 1 hop": look_up(1, 3),
    "all right, 3 turns": all_right(3),
    "additive, 3 turns": additive(3),
    "may stop, 3 turns": may_stop(3),
}
SCALES = ("std", "none", "batch")
SHARES = (0.1, 0.5, 0.9)
SIZES = (2, 4, 8)


def directions(problem: str, name: str, scale: str, size: int) -> list[Direction]:
    """Returns the direction at each stage of learning, then that of the mixed tasks."""
    groups = Enumeration(PROBLEMS[problem], find("advantage", name)(scale=scale), size)
    policies = [policy_at(PROBLEMS[problem], share) for share in SHARES]
    single = [direction([(groups, policy)]) for policy in policies]
    return [*single, direction([(groups, policies[0]), (groups, policies[-1])])]


def show(label: str, results: list[Direction]) -> None:
    cells = "   ".join(f"{d.cosine:5.3f} {d.progress:5.3f}" for d in results)
    print(f"  {label:34} {cells}", flush=True)


def main() -> None:
    """Prints both tables."""
    heads = [f"{share:.0%} of best" for share in SHARES] + ["mixed"]
    print("cosine and progress, groups of 4\n" + " " * 37 + "   ".join(f"{h:11}" for h in heads))
    found: dict[tuple[str, str], list[Direction]] = {}
    for problem in PROBLEMS:
        print(problem)
        for name in sorted({*BUILTIN["advantage"]} - {"by_agent", "distillation", "parts"}):
            for scale in SCALES:
                results = directions(problem, name, scale, 4)
                found.setdefault((name, scale), []).extend(results)
                show(f"{name}, {scale}", results)
    print("\nover all problems and policies: lowest cosine, mean cosine, lowest and mean progress")
    for (name, scale), results in found.items():
        cosines, progress = ([getattr(d, f) for d in results] for f in ("cosine", "progress"))
        values = min(cosines), np.mean(cosines), min(progress), np.mean(progress)
        print(f"  {name + ', ' + scale:34} " + "   ".join(f"{value:5.3f}" for value in values))
    print("\nreturns_to_go by the size of a group, columns as above")
    for problem in PROBLEMS:
        print(problem)
        for size in SIZES:
            for scale in SCALES:
                results = directions(problem, "returns_to_go", scale, size)
                show(f"groups of {size}, {scale}", results)
    print("\nlength of an update of returns_to_go at 50 and 90 %, relative to that at 10 %")
    for problem in PROBLEMS:
        for scale in SCALES:
            first, *others, _ = (d.length for d in directions(problem, "returns_to_go", scale, 4))
            cells = "   ".join(f"{length / first:5.2f}" for length in others)
            print(f"  {problem + ', ' + scale:34} {cells}", flush=True)


if __name__ == "__main__":
    main()
