"""Curricula: the tasks of a step follow from the results of the steps before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_env.errors import ConfigError, raised_as
from gspo_env.registry import name_of
from gspo_env.rollout.metrics import EpisodeStats
from gspo_env.settings import settings
from gspo_env.training.split import draw_tasks
from gspo_env.types import Group, Task


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the episodes of one training step were."""

    options: Mapping[str, Any]
    """The options of `reset`."""
    success: float
    """Share of the episodes that succeeded."""
    mean_return: float
    """Mean sum of the turns' rewards."""

    def metrics(self) -> dict[str, float]:
        """Returns the options that are numbers, by metric name."""
        numbers = {k: v for k, v in self.options.items() if isinstance(v, int | float)}
        return {f"rollout/option/{name}": float(value) for name, value in numbers.items()}


@settings
class Curriculum:
    """Base class of what chooses the tasks of a step by the results so far.

    Its defaults, the choice `none`, play new tasks without options.
    """

    def options(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the options of `reset` in the next step, which are JSON values.

        A function of its arguments alone, so that a resumed run continues in the same way.

        Args:
            state: See `record`.
        """
        return {}

    def record(
        self, state: Mapping[str, Any], results: Sequence[StepResult], groups: Sequence[Group]
    ) -> Mapping[str, Any]:
        """Returns the state after a step, as JSON; a checkpoint holds it, so it is to stay small.

        Args:
            state: The state before; empty at first.
            results: What the episodes of the step were, for each of the options that they had.
            groups: The groups that the step played.
        """
        return state

    def draw(self, tasks: Sequence[Task], state: Mapping[str, Any]) -> Sequence[Task]:
        """Returns the tasks of the next step.

        A function of its arguments alone, so that a resumed run draws the same.

        Args:
            tasks: New tasks, with the options of `options`.
            state: See `record`.
        """
        return tasks


@dataclass(slots=True)
class TaskSampler:
    """Draws the tasks of a run, and keeps what its curriculum has seen."""

    curriculum: Curriculum
    weights: Mapping[str, float]
    """The weight of each environment, by the `env_id` of its tasks."""
    seed: int
    tasks_per_step: int
    state: Mapping[str, Any] = field(default_factory=dict)
    """The curriculum's state; see `Curriculum.record`."""

    def draw(self, step: int) -> Sequence[Task]:
        """Returns the tasks of a step, counted from 1, as the curriculum chooses them now."""
        tasks = draw_tasks(
            self.weights,
            seed=self.seed,
            step=step,
            count=self.tasks_per_step,
            options=next_options(self.curriculum, self.state),
        )
        return self.curriculum.draw(tasks, self.state)

    def record(self, groups: Sequence[Group]) -> dict[str, float]:
        """Records the groups of a step; returns the metrics.

        There is one result for each of the options with which they were played.
        """
        by_options: dict[str, list[Group]] = {}
        played = [g for g in groups if not all(episode.failed for episode in g.episodes)]
        for group in played:
            key = json.dumps(group.task.options, sort_keys=True)
            by_options.setdefault(key, []).append(group)
        results: list[StepResult] = []
        metrics: dict[str, float] = {}
        for alike in by_options.values():
            stats = EpisodeStats.of([e for g in alike for e in g.episodes if not e.failed])
            options = dict(alike[0].task.options)
            results.append(StepResult(options, stats.success, stats.mean_return))
            metrics |= results[-1].metrics()
        if played:
            self.state = self.curriculum.record(self.state, results, played)
        return metrics


def next_options(curriculum: Curriculum, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a curriculum chooses.

    Raises:
        ConfigError: It raised, or what it returned is not a mapping of JSON values.
    """
    name = name_of("curriculum", curriculum)
    problem, mend = f"options of curriculum {name!r} failed", "; expected names and JSON values"
    with raised_as(ConfigError, problem, Exception, mend=mend):
        mapping = dict(curriculum.options(state))
        options: dict[str, Any] = json.loads(json.dumps(mapping))
    return options
