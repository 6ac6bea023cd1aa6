"""The task of a group, drawn again while it is held out for evaluation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gspo_env.errors import EnvironmentContractError, RolloutError
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.types import Episode, Group, ResetInfo, Task

_MOST_DRAWS = 100
"""Maximum tasks that are drawn for one group."""


class TaskRedraw:
    """The task of a group, drawn again while its key is held out.

    The next seed follows from the last one, so that all episodes of a group find the same task in
    any order. Only the first episode that meets a held-out task draws; the others follow.
    """

    def __init__(self, task: Task, held_out: Collection[str]) -> None:
        self.task, self._held_out, self._count = task, held_out, 0

    def __call__(self, task: Task, reset: ResetInfo) -> Task | None:
        """See `gspo_env.rollout.play.Redraw`."""
        if reset.task_key not in self._held_out:
            return None
        if task == self.task:
            self._count += 1
            if self._count >= _MOST_DRAWS:
                options = f" with options {dict(task.options)}" if task.options else ""
                raise RolloutError(
                    f"{task.env_id}: the last {_MOST_DRAWS} tasks drawn{options} are held out for "
                    "evaluation; expected a task to train on, so lower eval_tasks or add tasks"
                )
            self.task = replace(task, seed=derive_seed("redraw", task.seed) % HELD_OUT)
        return self.task

    def group(self, episodes: Sequence[Episode], size: int) -> Group:
        """Returns the group of a number of episodes, of which some may have been left out.

        Raises:
            EnvironmentContractError: Episodes of the task have different keys.
        """
        for episode in episodes:
            if episode.turns and episode.task != self.task:
                raise EnvironmentContractError(
                    f"{self.task.env_id}: two resets with seed {episode.task.seed} had different "
                    "task keys; expected one task_key for each seed and options."
                )
        redrawn = self._count if self._held_out else None
        return Group(
            task=self.task, episodes=tuple(episodes), redrawn=redrawn, left_out=size - len(episodes)
        )
