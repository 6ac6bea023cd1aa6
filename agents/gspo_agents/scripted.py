"""The scripted agent: plays an environment's own `expert_action`; the ceiling to compare with."""

from __future__ import annotations

from typing import Any

from gspo_env.env.registration import make_env, resolve_env
from gspo_env.errors import ConfigError
from gspo_env.training.loop import held_out_tasks
from gspo_env.types import Episode, Group, StopReason, Task, Turn


class ScriptedAgent:
    """Acts as the environment's demonstrator would.

    Args:
        env: Environment id or `file.py:Class`.
        noise: Probability of a slip in each action.
    """

    def __init__(self, env: str, noise: float = 0.0, **env_kwargs: Any) -> None:
        self.env_id = resolve_env(env)
        self.noise = noise
        self._env = make_env(self.env_id, **env_kwargs)

    def evaluate(self, tasks: int = 256, samples: int = 1) -> list[Group]:
        """Plays held-out tasks, `samples` episodes each.

        Raises:
            ConfigError: The environment has no `expert_action`.
        """
        return [
            Group(task=task, episodes=tuple(self._play(task) for _ in range(samples)))
            for task in held_out_tasks(self.env_id, tasks)
        ]

    def _play(self, task: Task) -> Episode:
        observation, info = self._env.reset(seed=task.seed, options=dict(task.options))
        turns: list[Turn] = []
        terminated = truncated = False
        while not (terminated or truncated):
            action = self._act()
            before = observation
            observation, reward, terminated, truncated, info = self._env.step(action)
            turns.append(
                Turn(
                    prompt_ids=(),
                    action_ids=(),
                    logprobs=(),
                    text=action,
                    observation=before,
                    reward=float(reward),
                    info=info,
                )
            )
        total = float(sum(t.reward for t in turns))
        outcome = float(info.get("episodic_reward", total))
        return Episode(
            task=task,
            turns=tuple(turns),
            outcome=outcome,
            stop_reason=StopReason.TERMINATED if terminated else StopReason.TRUNCATED,
            terminated=terminated,
            truncated=truncated,
            success=bool(info.get("success", outcome > 0)),
            final_observation=observation,
        )

    def _act(self) -> str:
        try:
            return str(self._env.get_wrapper_attr("expert_action")(self.noise))
        except (AttributeError, NotImplementedError) as error:
            raise ConfigError(
                f"{self.env_id} has no expert_action, so there is no scripted agent for it"
            ) from error
