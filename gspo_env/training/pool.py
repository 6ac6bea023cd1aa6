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
from gspo_env.training.curriculum import Curriculum, StepResult
from gspo_env.types import Group, Task


@settings
class Pool(Curriculum):
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

    def record(
        self, state: Mapping[str, Any], results: Sequence[StepResult], groups: Sequence[Group]
    ) -> Mapping[str, Any]:
        """Returns the largest group, and the seed, the successes and the failures by task key.

        A task without a key has its seed for one. Episodes that failed don't count.
        """
        size, decay = state.get("group_size", 2), self.decay
        tasks = state.get("tasks", {}).items()
        counts = {key: [seed, s * decay, f * decay] for key, (seed, s, f) in tasks}
        for group in groups:
            if played := [e for e in group.episodes if not e.failed]:
                seed = played[0].task.seed
                key = played[0].reset.task_key or str(seed)
                successes = sum(bool(e.success) for e in played)
                _, s, f = counts.get(key, (seed, 0.0, 0.0))
                counts[key] = [seed, s + successes, f + len(played) - successes]
                size = max(size, len(played))
        return {"group_size": size, "tasks": counts}

    def draw(self, tasks: Sequence[Task], state: Mapping[str, Any]) -> list[Task]:
        """Replaces some tasks of a step by tasks of the pool; see `Curriculum.draw`."""
        counts_by_key = dict(state.get("tasks", {}))
        drawn = []
        for task in tasks:
            rng = np.random.default_rng(derive_seed("pool", task.seed))
            if counts_by_key and rng.random() < self.share:
                counts_K2 = np.array([counts for _, *counts in counts_by_key.values()])
                rates = rng.beta(*(1 + counts_K2).T)
                size = state["group_size"]
                differs = 1 - rates**size - (1 - rates) ** size
                key = list(counts_by_key)[int(differs.argmax())]
                task = replace(task, seed=counts_by_key.pop(key)[0])
            drawn.append(task)
        return drawn


@settings
class Ladder(Curriculum):
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

    def options(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the option with its present value."""
        return {self.option: self.values[state.get("level", 0)]}

    def record(
        self, state: Mapping[str, Any], results: Sequence[StepResult], groups: Sequence[Group]
    ) -> Mapping[str, Any]:
        """Returns the index of the present value, and the successes of the last steps with it."""
        level, recent = state.get("level", 0), state.get("recent", [])
        for result in results:
            if result.options.get(self.option, self.values[level]) != self.values[level]:
                continue  # of groups that were drawn before the last change
            recent = [*recent, result.success][-self.window :]
            enough = len(recent) == self.window and sum(recent) / self.window >= self.success
            if enough and level + 1 < len(self.values):
                level, recent = level + 1, []
        return {"level": level, "recent": recent}
