"""Bias of the clip with stale episodes: the range by age, and advantages above 0 without a bound.

    python studies/credit/stale_exact.py

The problems, groups and numbers are those of `losses_exact.py`. The engine's weights are 1 to 4
updates old: its logits are those of the policy less a random walk of so many steps of 0.15. The
ratio of a token is to the engine, so that the clip acts on the staleness, and every loss has the
sum over tokens, which has no bias of its own. An entry is bias, progress: means over the three
problems and 5 walks.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gspo_env.credit.estimators import Outcome
from gspo_env.learner.losses import GRPO, Loss
from gspo_env.registry import find

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.enumeration import policy_at
from studies.credit.losses_exact import PROBLEMS, all_groups

AGES, STEP, SEEDS = (1, 2, 3, 4), 0.15, 5


def arms() -> dict[str, Loss]:
    """Returns the losses of the table by name."""
    common: dict[str, Any] = {"old_logprobs": "engine", "aggregation": "token_sum"}
    plain = {
        "clipped": {},
        "clip_staleness -1": {"clip_staleness": -1.0},
        "clip_staleness 1": {"clip_staleness": 1.0},
        "positives unclipped": {"positives": "unclipped"},
        "positives unweighted": {"positives": "unweighted"},
    }
    named: dict[str, Loss] = {name: GRPO(**common, **own) for name, own in plain.items()}
    return named | {"cispo": find("loss", "cispo")(aggregation="token_sum")}


def measure(loss: Loss, age: int) -> tuple[float, float]:
    """Returns the mean bias and progress over problems and walks."""
    found = []
    for name, seed in itertools.product(PROBLEMS, range(SEEDS)):
        groups = all_groups(name, Outcome(baseline="leave_one_out"))
        policy = policy_at(groups.problem, 0.5)
        steps = np.random.default_rng(seed).standard_normal((max(AGES), *policy.shape))
        engine = policy - STEP * steps[:age].sum(0)
        row = groups.direction(loss, policy, policy, engine, age)
        found.append((row.bias, row.progress))
    bias, progress = np.mean(found, axis=0)
    return float(bias), float(progress)


def main() -> None:
    """Prints the table."""
    print(f"| loss | {' | '.join(f'age {age}' for age in AGES)} |\n|---|{'---|' * len(AGES)}")
    for name, loss in arms().items():
        cells = ("{:.2f}, {:.2f}".format(*measure(loss, age)) for age in AGES)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
