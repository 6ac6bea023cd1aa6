"""SkyRL-Gym's environments: `gym.make("gspo/SkyRL-v0", task="gsm8k", data="train.parquet")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gspo_env.env.base import StepResult
from gspo_env.errors import ConfigError
from gspo_env.registry import load_function
from gspo_envs.adapters.foreign import RowEnv, check_name, load
from gspo_envs.data.rows import TaskRows


class SkyRLEnv(RowEnv):
    """An environment of SkyRL-Gym over the rows of a dataset in SkyRL's format.

    A row has `prompt`, a chat, and the columns that the environment needs, such as `reward_spec`.
    As in SkyRL, each episode makes a new environment with the row as its `extras`. SkyRL-Gym has no
    seeds: ours picks the row, and `extras["seed"]` has one for environments that use it.

    Args:
        task: SkyRL-Gym's id, or `module:Class` or `file.py:Class`.
        data: Rows, as `gspo_envs.data.dataset.DatasetEnv` takes them.
        config: The `env_config` of the environment.
        split: Split of a Hugging Face dataset.
        subset: Configuration of a Hugging Face dataset.
        held_out: Rows reserved for evaluation; see `DatasetEnv`.
        max_turns: Turns before truncation; also passed to the environment.

    Raises:
        ConfigError: The task is unknown.
        MissingExtraError: SkyRL-Gym is not installed.
    """

    def __init__(
        self,
        task: str = "gsm8k",
        data: Any = (),
        *,
        config: Mapping[str, Any] | None = None,
        split: str = "train",
        subset: str | None = None,
        held_out: Any = 0.1,
        max_turns: int | None = None,
    ) -> None:
        """Finds the environment and opens the dataset."""
        super().__init__(max_turns)
        package = load("skyrl_gym", "SkyRL-Gym", "skyrl-gym")
        self.task = task
        if ":" in task:
            self._make: Callable[..., Any] = load_function(task, "task")
        else:
            check_name("SkyRL-Gym", task, package.registry)
            self._make = partial(package.make, task)
        omegaconf = load("omegaconf", "SkyRL-Gym", "skyrl-gym")
        self._config = omegaconf.OmegaConf.create(dict(config or {}))
        self._rows = TaskRows(data, split=split, subset=subset, held_out=held_out)
        self.num_tasks = len(self._rows)
        self._game: Any = None

    def open(self, row: Any, index: int, seed: int) -> Any:
        """Makes the environment of a row."""
        extras = {"seed": seed, **row}
        if self.max_turns is not None:
            extras["max_turns"] = self.max_turns
        prompt = extras.pop("prompt", None)
        try:
            self._game = self._make(env_config=self._config, extras=extras)
            return self._game.init(prompt)[0]
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            raise ConfigError(
                f"SkyRL-Gym: {self.task} cannot be made of row {index} with the columns "
                f"{', '.join(row)}: {type(error).__name__}: {error}"
            ) from error

    def act(self, action: str) -> StepResult:
        """Takes an action; messages of several roles are joined into one observation."""
        result = self._game.step(action)
        observation = "\n".join(str(message["content"]) for message in result["observations"])
        info = {
            "skyrl_metadata": result.get("metadata") or {},
            "skyrl_metrics": self._game.get_metrics(),
        }
        return observation, float(result["reward"]), bool(result["done"]), False, info

    def close(self) -> None:
        """Closes the running environment."""
        if self._game is not None:
            self._game.close()
            self._game = None
