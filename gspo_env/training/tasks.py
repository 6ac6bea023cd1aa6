"""Draws the tasks of a training step from the run's seed."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from gspo_env.seeding import HELD_OUT, SEEDS, derive_seed
from gspo_env.types import Task


def draw_tasks(
    weights: Mapping[str, float],
    *,
    seed: int,
    step: int,
    count: int,
    options: Mapping[str, Any] | None = None,
) -> list[Task]:
    """Returns the tasks of a step; each one's environment and seed follow from its place.

    Args:
        weights: The weight of each environment, by the `env_id` of its tasks.
        seed: Seed of the run.
        step: Number of the step.
        count: Number of tasks, P.
        options: Options of every `reset`.
    """
    names, limits = list(weights), list(accumulate(weights.values()))
    tasks = []
    for p in range(count):
        drawn = derive_seed("env", seed, step, p) % SEEDS / SEEDS * limits[-1]
        place = min(bisect(limits, drawn), len(names) - 1)
        task_seed = derive_seed("task", seed, step, p) % HELD_OUT
        tasks.append(Task(env_id=names[place], seed=task_seed, options=options or {}))
    return tasks
