"""Bias of the clip with stale episodes: the range by age, and advantages above 0 without a bound.

    python studies/credit/stale_exact.py            # exact bias and progress
    python studies/credit/stale_exact.py --train    # 12 updates with sampled groups

The problems, groups and numbers are those of `losses_exact.py`. The engine's weights are 1 to 4
updates old: its logits are those of the policy less a random walk of so many steps of 0.15. The
ratio of a token is to the engine, so that the clip acts on the staleness, and every loss has the
sum over tokens, which has no bias of its own. An entry is bias, progress: means over the three
problems and 5 walks.

With `--train`, each update has 16 groups that the policy of 1 to 4 updates before has sampled, and
Adam has the rate 0.15. An entry is the return at the end as a share of the best, less that of
`clipped` with the same seeds, in percentage points, with twice the standard error over 14 seeds;
each seed is the mean of the three problems.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo_env.credit.estimators import Outcome
from gspo_env.learner.losses import GRPO, Loss
from gspo_env.registry import find
from gspo_env.types import FloatArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.enumeration import policy_at
from studies.credit.exact import best_return, true_gradient
from studies.credit.losses_exact import GROUPS, PROBLEMS, AllGroups, all_groups

AGES, STEP, SEEDS = (1, 2, 3, 4), 0.15, 5
UPDATES, TRAININGS, SHARE = 12, 14, 0.3
"""Updates of a training, seeds, and the share of the best return with which it begins."""


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


def drawn(groups: AllGroups, engine: FloatArray, generator: np.random.Generator) -> AllGroups:
    """Returns groups that a policy has sampled."""
    part = copy.copy(groups)
    picks = generator.choice(len(groups.groups_MG), GROUPS, p=groups.chances(engine))
    m_N, rest_N = groups.tokens_6N[0], groups.tokens_6N[1] % groups.size
    places = [np.flatnonzero(m_N == m) for m in picks]
    new_N = np.repeat(np.arange(GROUPS), [len(place) for place in places])
    flat = np.concatenate(places)
    part.groups_MG, part.orders_M = groups.groups_MG[picks], groups.orders_M[picks]
    part.tokens_6N = np.stack(
        [new_N, new_N * groups.size + rest_N[flat], *groups.tokens_6N[2:, flat]]
    )
    part.advantages_N = groups.advantages_N[flat]
    return part


def train(loss: Loss, age: int, seed: int) -> float:
    """Returns the mean share of the best return after a training on each problem."""
    shares = []
    for name, problem in PROBLEMS.items():
        groups = all_groups(name, Outcome(baseline="leave_one_out"))
        generator = np.random.default_rng([seed, age])
        logits = torch.tensor(policy_at(problem, SHARE, seed))
        optimizer = torch.optim.Adam([logits], lr=STEP)
        policies: list[FloatArray] = []
        for _ in range(UPDATES):
            policies.append(logits.numpy().copy())
            engine = policies[max(0, len(policies) - 1 - age)]
            now = min(age, len(policies) - 1)
            part = drawn(groups, engine, generator)
            _, updates = part.updates(loss, policies[-1], policies[-1], engine, now)
            logits.grad = -torch.tensor(updates.mean(0)).view_as(logits)
            optimizer.step()
        shares.append(true_gradient(problem, logits.numpy())[1] / best_return(problem))
    return float(np.mean(shares))


def print_trainings() -> None:
    """Prints the table of the trainings."""
    base: dict[int, FloatArray] = {}
    for name, loss in arms().items():
        cells = []
        for age in AGES:
            share_S = 100 * np.array([train(loss, age, seed) for seed in range(TRAININGS)])
            base.setdefault(age, share_S)
            gain_S = share_S - base[age]
            error = 2 * gain_S.std(ddof=1) / np.sqrt(TRAININGS)
            own = f"{gain_S.mean():+.1f} ± {error:.1f}"
            cells.append(f"{share_S.mean():.1f}" if share_S is base[age] else own)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints the table."""
    print(f"| loss | {' | '.join(f'age {age}' for age in AGES)} |\n|---|{'---|' * len(AGES)}")
    if sys.argv[1:] == ["--train"]:
        print_trainings()
        return
    for name, loss in arms().items():
        cells = ("{:.2f}, {:.2f}".format(*measure(loss, age)) for age in AGES)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
