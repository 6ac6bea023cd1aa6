"""What an update makes of two rewards of different units: added first, or each on its own scale.

    python studies/credit/parts_exact.py

One turn has four actions: right or wrong, and in the format or not. Being right pays 1, the format
pays a unit; a rare one is right. All groups of 8 are listed, so nothing has an error of sampling.
An entry is the cosine of the expected update with the gradient of the chance to be right, and with
that of the chance of the format: where both should count alike, both should be alike.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from gspo_env.batch.padded import bare_episode
from gspo_env.credit.estimators import Estimator, Outcome
from gspo_env.credit.parts import Parts
from gspo_env.types import FloatArray, Group, StepInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.exact import TASK

SIZE, UNITS = 8, (0.1, 1.0, 10.0)
CHANCES = {"right 0.5": (0.5, 0.5), "right 0.1": (0.1, 0.5), "format 0.9": (0.5, 0.9)}
"""The chances to be right and in the format, which are independent at first."""


def arms() -> dict[str, Estimator]:
    """Returns the estimators of the table by name."""
    alike = {"right": 1.0, "format": 1.0}
    return {
        "sum, no divisor": Outcome(),
        "sum, divided by the group's deviation": Outcome(scale="std"),
        "`parts`": Parts(weights=alike, estimator="outcome"),
    }


def cosines(estimator: Estimator, right: float, form: float, unit: float) -> tuple[float, float]:
    """Returns the cosines of the expected update with the gradients of both chances."""
    both_A2 = np.array(list(itertools.product((1.0, 0.0), repeat=2)))
    chance_A = np.array(
        [(right if r else 1 - right) * (form if f else 1 - form) for r, f in both_A2]
    )
    update_A = np.zeros(4)
    episodes = []
    for r, f in both_A2:
        bare = bare_episode(TASK, [1], [r + unit * f])
        info = StepInfo(reward_parts={"right": r, "format": unit * f})
        episodes.append(replace(bare, turns=(replace(bare.turns[0], info=info),)))
    for members in itertools.combinations_with_replacement(range(4), SIZE):
        orders = math.factorial(SIZE) / math.prod(map(math.factorial, np.bincount(members)))
        group = Group(task=TASK, episodes=tuple(episodes[i] for i in members))
        for i, row in zip(members, estimator.advantages(group), strict=True):
            score_A = (np.arange(4) == i) - chance_A
            update_A += orders * chance_A[list(members)].prod() * row[0] * score_A
    return tuple(_cosine(update_A, chance_A * (part - chance_A @ part)) for part in both_A2.T)


def _cosine(a: FloatArray, b: FloatArray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def main() -> None:
    """Prints the table."""
    heads = [f"{chances}, unit {unit:g}" for chances in CHANCES for unit in UNITS]
    print(f"| credit | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name, estimator in arms().items():
        cells = (
            "{:.2f}, {:.2f}".format(*cosines(estimator, *CHANCES[chances], unit))
            for chances in CHANCES
            for unit in UNITS
        )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
