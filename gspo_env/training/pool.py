"""Curricula: a pool of tasks whose groups are expected to differ, and a ladder of one option.

The ladder takes a harder value of its option as the success with the present one grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Interval

from gspo_env.errors import ConfigError
from gspo_env.seeding import derive_seed
from gspo_env.settings import settings
from gspo_env.training.curriculum import StepResult
from gspo_env.types import Group, Task


@settings
class Pool:
    """A share of each step's tasks are tasks of earlier steps, drawn where groups should differ.

    Each task key has the posterior Beta(1 + successes, 1 + failures) of its pass rate p. Its counts
    are multiplied by `decay` after each step, because the policy changes. For each draw, a p is
    sampled for every key, and the key is played whose group of G is the most likely to have both
    successes and failures: the largest 1 - p^G - (1 - p)^G. So a key that was seen seldom, or long
    ago, is tried too. A key is played at most once a step. The other tasks are new.
    """

    share: Annotated[float, Interval(ge=0, le=1)] = 0.5
    """Share of the tasks that are drawn from the pool."""
    decay: Annotated[float, Interval(gt=0, le=1)] = 0.9
    """What the counts of a task are multiplied by after each step."""

    def options(self, results: Sequence[StepResult]) -> Mapping[str, Any]:
        """Returns no options."""
        return {}

    def record(self, groups: Sequence[Group]) -> list[tuple[int, str, int, int]]:
        """Returns the seed, the task key, the successes and the episodes of each group.

        A task without a key has its seed for one. Episodes that failed don't count.
        """
        rows = []
        for group in groups:
            if played := [e for e in group.episodes if not e.failed]:
                seed, key = played[0].task.seed, played[0].reset.task_key
                successes = sum(bool(e.success) for e in played)
                rows.append((seed, key or str(seed), successes, len(played)))
        return rows

    def draw(self, tasks: Sequence[Task], results: Sequence[StepResult]) -> list[Task]:
        """Replaces some tasks of a step by tasks of the pool.

        A function of the tasks and the results alone, so that a resumed run draws the same.

        Args:
            tasks: The new tasks of the step.
            results: All steps before, the last one last.
        """
        seeds: dict[str, int] = {}
        counts: dict[str, tuple[float, float]] = {}
        group_size = 2
        for result in results:
            counts = {key: (s * self.decay, f * self.decay) for key, (s, f) in counts.items()}
            for seed, key, successes, size in result.tasks:
                s, f = counts.get(key, (0.0, 0.0))
                seeds[key], counts[key] = seed, (s + successes, f + size - successes)
                group_size = max(group_size, size)
        drawn = []
        for task in tasks:
            rng = np.random.default_rng(derive_seed("pool", task.seed))
            if counts and rng.random() < self.share:
                rates = rng.beta(*(1 + np.array(list(counts.values()))).T)
                differs = 1 - rates**group_size - (1 - rates) ** group_size
                key = list(counts)[int(differs.argmax())]
                task = replace(task, seed=seeds[key])
                del counts[key]
            drawn.append(task)
        return drawn


@settings
class Ladder:
    """One option takes the next value once the mean success with the present one is high enough."""

    option: str = "hops"
    """Name of the option; the default environment has `hops`."""
    values: tuple[int | float | str, ...] = (1, 2, 3)
    """Its values, from easy to hard."""
    success: Annotated[float, Interval(ge=0, le=1)] = 0.8
    """Mean success that leads to the next value."""
    window: Annotated[int, Ge(1)] = 2
    """Steps over which the mean is taken."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if not self.option or not self.values:
            raise ConfigError(
                f"curriculum ladder has option {self.option!r} and values {list(self.values)}; "
                "expected both, such as --option hops --values 1 2 3"
            )

    def options(self, results: Sequence[StepResult]) -> Mapping[str, Any]:
        """Returns the option with its present value."""
        level = 0
        recent: list[float] = []
        for result in results:
            if result.options.get(self.option, self.values[level]) != self.values[level]:
                continue  # of groups that were drawn before the last change
            recent = [*recent, result.success][-self.window :]
            enough = len(recent) == self.window and sum(recent) / self.window >= self.success
            if enough and level + 1 < len(self.values):
                level, recent = level + 1, []
        return {self.option: self.values[level]}
