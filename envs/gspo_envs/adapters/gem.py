"""GEM's environments: `gym.make("gspo/GEM-v0", task="game:GuessTheNumber-v0-easy")`."""

from __future__ import annotations

from typing import Any

from gspo_env.env.base import ResetResult, StepResult
from gspo_envs.adapters.foreign import ForeignEnv, check_name, load, making, snapshot

_END = "TERMINAL_STATE"


class GEMEnv(ForeignEnv):
    r"""An environment of GEM (`gem-llm`); actions are written as `\boxed{action}`.

    GEM's `info["prefix"]` and `info["suffix"]` are part of the observation. An episode succeeds if
    its last turn has a reward of 1.

    Args:
        task: GEM's id, such as "game:GuessTheNumber-v0-easy" or "rg:chain_sum".
        max_turns: Turns before truncation; GEM's games have their own limits.
        kwargs: Arguments of the environment, such as `max_number=20`.

    Raises:
        ConfigError: The task is unknown or does not accept the arguments.
        MissingExtraError: GEM, or what the task needs, is not installed.
    """

    def __init__(
        self,
        task: str = "game:GuessTheNumber-v0-easy",
        *,
        max_turns: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes the environment."""
        super().__init__(max_turns)
        self._gem = load("gem", "GEM", "gem")
        registry = load("gem.envs.registration", "GEM", "gem").ENV_REGISTRY
        check_name("GEM", task, registry)
        self.task, self._kwargs = task, kwargs
        with making(task, f"made with {kwargs}", TypeError, AssertionError):
            self._inner = self._gem.make(task, **kwargs)

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Resets GEM's environment; a game is made anew, so that no state remains."""
        if self.task.startswith("game:"):
            self._inner = self._gem.make(self.task, **self._kwargs)
        elif hasattr(self._inner, "idx"):
            self._inner.idx = 0  # the number of past episodes decides when it draws new data
        observation, info = self._inner.reset(seed=seed)
        # the observation also draws an example of an action, which is no part of the task
        return _with_frame(observation, info), {"task_key": snapshot(vars(self._inner))}

    def act(self, action: str) -> StepResult:
        """Takes an action."""
        observation, reward, terminated, truncated, info = self._inner.step(action)
        reward = float(reward)
        if not (terminated or truncated):
            return _with_frame(observation, info), reward, False, False, {}
        observation = "" if _END in str(observation) else str(observation)
        return observation, reward, terminated, truncated, {"success": reward >= 1.0}

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns GEM's own random action, which demonstrates only the format.

        Raises:
            NotImplementedError: This task has none.
        """
        with self._privately():
            return str(self._inner.sample_random_action())


def _with_frame(observation: Any, info: dict[str, Any]) -> str:
    parts = (info.get("prefix"), observation, info.get("suffix"))
    return "\n".join(str(part).strip("\n") for part in parts if part)
