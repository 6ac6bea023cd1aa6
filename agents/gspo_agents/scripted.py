"""The scripted agent: plays an environment's own `expert_action`, as an upper bound."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from gspo_env.env.base import attribute, num_eval_tasks
from gspo_env.env.registration import make_env, resolve_env
from gspo_env.errors import ConfigError
from gspo_env.recipes.teacher import training_tasks
from gspo_env.rollout.failures import FaultLog, close_quietly, lose_unscored, refuse_failures
from gspo_env.rollout.play import Policy, demonstrator, look
from gspo_env.rollout.pool import play_alone
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runtime.loops import settle
from gspo_env.runtime.threads import in_thread, wrong_actions
from gspo_env.training.split import Split, hold_out, reset_of
from gspo_env.types import Episode, Group, Task


class ScriptedAgent:
    """Acts as the environment's demonstrator would.

    Args:
        env: Environment id or `file.py:Class`.
        noise: Probability that an action is wrong.
    """

    def __init__(self, env: str, noise: float = 0.0, **env_kwargs: Any) -> None:
        self.env_id = resolve_env(env)
        self.noise = noise
        # each call of the environment has the time that an episode of a training has by default
        limit = RolloutConfig().episode_timeout
        self._guard = partial(in_thread(self).guard, self.env_id, limit)
        self._env = self._guard(make_env, self.env_id, **env_kwargs)
        self._faults = FaultLog()

    def split(self, tasks: int | Literal["all"] = 256) -> Split:
        """Returns the tasks of an evaluation, which are those of a training run too."""
        if tasks == "all":
            tasks = num_eval_tasks(self.env_id, self._env)
        return hold_out(
            self.env_id,
            tasks,
            lambda drawn: [reset_of(self._play(task, look)) for task in drawn],
            attribute(self._env, "num_tasks", None),
        )

    def training_tasks(self, count: int, seed: int) -> list[Task]:
        """Draws tasks that training does not hold out for its evaluation."""
        envs, held_out = {self.env_id: self._env}, self.split().held_out
        drawn: list[Task] = self._guard(training_tasks, seed, envs, held_out, count)
        return drawn

    def evaluate(
        self, tasks: int | Literal["all"] | Sequence[Task] = 256, samples: int = 1
    ) -> list[Group]:
        """Plays tasks, or as many of an evaluation, `samples` episodes each.

        Raises:
            ConfigError: The environment has no `expert_action`.
            EnvironmentHangError: A call of the environment did not return in time.
            RolloutError: More than half of the episodes failed in their environment.
        """
        expert = demonstrator(self.noise)
        try:
            groups = [
                self._guard(
                    self._scored,
                    Group(task=t, episodes=tuple(self._play(t, expert) for _ in range(samples))),
                )
                for t in (self.split(tasks).tasks if isinstance(tasks, int | str) else tasks)
            ]
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.env_id} has no expert_action, so there is no scripted agent for it"
            ) from error
        finally:
            self._guard(close_quietly, self._env)
        refuse_failures([episode for group in groups for episode in group.episodes])
        self._faults.summarise()
        return groups

    def _scored(self, group: Group) -> Group:
        """Adds the rewards of the group, as a rollout does."""
        if reward := attribute(self._env, "group_reward", None):
            group = settle(reward(group), "group_reward()")
        return lose_unscored(group, self._faults)

    def _play(self, task: Task, policy: Policy) -> Episode:
        play = wrong_actions()(play_alone) if self.noise else play_alone
        played: Episode = self._guard(play, self._env, task, policy, self._faults)
        return played
