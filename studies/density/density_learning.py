"""The parts of `density.py` that train: noise of the tiny model's updates, and learning curves.

What has a result is not computed again. All results go to one folder, from which `density.py write`
makes the page.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

DENSITIES = tuple(Fraction(1, n) for n in (16, 8, 4, 2, 1))
GROUP, DECISIONS, TURNS, NOISE = 8, 2, 16, 0.5
MARGIN = 0.05
"""Two arms are equivalent if the areas under their curves differ by less than this."""
LATE = "late rewards"
"""The problem with delayed rewards, which credit for the immediate reward cannot learn."""
ARMS: dict[str, dict[str, Any]] = {
    "outcome": {"advantage": "outcome"},
    "returns_to_go": {"advantage": "returns_to_go"},
    "immediate": {"advantage": "returns_to_go", "gamma": 0.0},
}
STEPS, SEEDS, MODELS = 30, 14, 8
FIRST_SEED = 100
"""The settings were picked on a seed below, and the first study had the seeds 0 to 13."""
BASE: dict[str, Any] = {
    "env": f"{Path(__file__).parents[1] / 'diagnostics.py'}:DensityEnv",
    "steps": STEPS,
    "tasks_per_step": 2,
    "eval_every": 0,
    "eval_tasks": 2,
    "advantage": {"name": "outcome"},
    "recipe": {
        "hidden_size": 64,
        "layers": 1,
        "demonstrations": 512,
        "imitation_steps": 100,
        "imitation_learning_rate": 0.005,
        "initializer_range": 0.02,  # measured with this
    },
    "rollout": {"max_turn_tokens": 4, "max_turns": 64, "max_context": 1024, "group_size": GROUP},
    "learner": {
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "schedule": "constant",
        "minibatches": 1,  # all ratios are 1, so that the clip range decides nothing
        "max_grad_norm": 1.0,
    },
    "credit": {"rms": 1.0},
    "tracker": "none",
}
LENGTHS = "policy decides the length"
LENGTH_ARMS: dict[str, dict[str, Any]] = {
    f"{name}, {how}": {"advantage": name, "aggregation": how}
    for name in ("outcome", "returns_to_go", "normalize_then_accumulate")
    for how in ("sequence_mean", "token_sum")
}


def settings(density: Fraction, **rest: Any) -> dict[str, Any]:
    """Returns the arguments of the environment in the sweep with a fixed number of decisions."""
    turns = int(DECISIONS / density)
    return {"turns": turns, "density": float(density), "noise": NOISE, "cues": 1, **rest}


def sweep() -> Any:
    """Returns the comparison of credit by density."""
    from gspo_env.compare import Arm, Comparison
    from gspo_env.config import from_dict

    found = {f"density {rho}": settings(rho) for rho in DENSITIES}
    found[LATE] = {"turns": TURNS, "density": 0.25, "noise": NOISE, "cues": 1, "delay": 4}
    return Comparison(
        problems={n: from_dict({**BASE, "env_kwargs": k}) for n, k in found.items()},
        arms=tuple(Arm(name=name, changes=changes) for name, changes in ARMS.items()),
        seeds=SEEDS,
        first_seed=FIRST_SEED,
        metric="rollout/reward/right",
    )


def lengths() -> Any:
    """Returns the comparison of aggregations where the policy decides the length."""
    from gspo_env.compare import Arm, Comparison
    from gspo_env.config import from_dict

    config = {**BASE, "env": "gspo/VariableLength-v0", "env_kwargs": {"turns": 8}}
    return Comparison(
        problems={LENGTHS: from_dict({**config, "tasks_per_step": 8})},
        arms=tuple(Arm(name=name, changes=changes) for name, changes in LENGTH_ARMS.items()),
        seeds=SEEDS,
        first_seed=FIRST_SEED,
        metric="rollout/return",
    )


def noise_of(density: Fraction, seed: int, groups: int) -> dict[str, dict[str, float]]:
    """Measures the update from one group at the start of a training, for each arm.

    The signal is the mean update along the direction of the mean update by `immediate` in the other
    half of the groups, so that noise is not counted as signal. The noise is the root of the
    variance of the update, summed over parameters.

    Args:
        density: The share of turns that are decisions.
        seed: Seed of the model and of its warm-up.
        groups: Groups to play.

    Returns:
        `signal` and `noise` by arm.
    """
    import torch

    from gspo_agents.gspo import GSPOAgent, make_learner
    from gspo_env.batch.sample import to_samples
    from gspo_env.config import from_dict
    from gspo_env.credit import Outcome, ReturnsToGo, estimate
    from gspo_env.types import Task

    estimators = {
        "outcome": Outcome(),
        "returns_to_go": ReturnsToGo(),
        "immediate": ReturnsToGo(gamma=0.0),
    }
    config = from_dict({**BASE, "seed": seed, "env_kwargs": settings(density)})
    agent = GSPOAgent(config=config)
    agent.warm_up()
    tasks = [Task(env_id=agent.env_id, seed=n) for n in range(groups)]
    learner = make_learner(agent.model, config)
    parameters = [p for p in agent.model.parameters() if p.requires_grad]
    sums = {name: [0.0, 0.0] for name in estimators}
    squares = dict.fromkeys(estimators, 0.0)
    parts = (agent.evaluate(tasks[n : n + 64], samples=GROUP) for n in range(0, groups, 64))
    for n, group in enumerate(group for part in parts for group in part):
        for name, estimator in estimators.items():
            (advantages,) = estimate([group], estimator).advantages
            samples = to_samples(group.episodes, advantages)
            (minibatch,) = learner.prepare([s for s in samples if s.mask.any()])
            for parameter in parameters:
                parameter.grad = None
            learner.backward(minibatch)
            update = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            sums[name][n % 2] = sums[name][n % 2] + update.double()
            squares[name] += float(update.double() @ update.double())
    agent.close()
    found = {}
    for name, halves in sums.items():
        signal = 0.0
        for half in (0, 1):
            along = sums["immediate"][1 - half]
            signal += float(halves[half] @ along / along.norm()) / groups
        whole = (halves[0] + halves[1]) / groups
        variance = (squares[name] / groups - float(whole @ whole)) * groups / (groups - 1)
        found[name] = {"signal": signal, "noise": math.sqrt(variance)}
    return found


def measure(folder: Path) -> None:
    """Measures the noise for each model and density that has no result in a folder."""
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = folder / "noise"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(FIRST_SEED, FIRST_SEED + MODELS):
        for rho in DENSITIES:
            path = folder / f"{rho.denominator}-{seed}.json"
            if not path.exists():
                print(f"noise of model {seed}, density {rho}", flush=True)
                # the fewer decisions, the more noise
                path.write_text(json.dumps(noise_of(rho, seed, int(32 / rho))))


def train(comparison: Any, folder: Path, workers: int) -> None:
    """Plays the runs that have no result; `workers` at a time, 0 is one a core."""
    from gspo_env.compare import compare

    problem = next(iter(comparison.problems.values()))
    compare(dataclasses.replace(comparison, workers=workers), folder, problem.tracker)


def results(comparison: Any, folder: Path) -> list[Any]:
    """Returns the results of all runs of a comparison."""
    from gspo_env.compare import planned, read

    return [read(run) for run in planned(comparison, folder)]


def to_rows(found: Sequence[Any], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Returns one row for each point of each curve."""
    return [
        {
            "problem": result.run.problem,
            "arm": result.run.arm.name,
            "seed": result.run.seed,
            "step": step,
            "metric": metric,
            "value": value,
        }
        for result in found
        for metric in metrics
        if (series := result.recorded.series.get(metric))
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True)
    ]
