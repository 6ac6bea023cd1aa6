"""SkyRL-Gym's environments: `gym.make("gspo/SkyRL-v0", task="gsm8k", data="train.parquet")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gspo_env.env.base import StepResult
from gspo_env.errors import ConfigError
from gspo_env.importing import load_function
from gspo_envs.foreign import RowEnv, check_name, load
from gspo_envs.rows import TaskRows


class SkyRLEnv(RowEnv):
    """An environment of SkyRL-Gym over the rows of a dataset in SkyRL's form.

    A row holds `prompt`, a chat, and what the environment asks for, such as `reward_spec`. As in
    SkyRL each episode makes the environment anew, with the row as its `extras`. SkyRL-Gym knows
    no seed: ours picks the row, and `extras["seed"]` has one for environments that want it.

    Args:
        task: SkyRL-Gym's id, or `module:Class` or `file.py:Class`.
        data: Rows, as `gspo_envs.dataset.DatasetEnv` takes them.
        config: The environment's `env_config`.
        split: Split of a Hugging Face dataset.
        subset: Configuration of a Hugging Face dataset.
        held_out: What only evaluation sees; see `DatasetEnv`.
        max_turns: Steps before truncation; the environment is told too.

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
        """Find the environment and open the dataset."""
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
        self._game: Any = None

    def open(self, row: Any, index: int, seed: int) -> Any:
        """Make the environment of a row."""
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
        """Take a step; what SkyRL-Gym says to several roles is read as one text."""
        result = self._game.step(action)
        said = "\n".join(str(message["content"]) for message in result["observations"])
        info = {
            "skyrl_metadata": result.get("metadata") or {},
            "skyrl_metrics": self._game.get_metrics(),
        }
        return said, float(result["reward"]), bool(result["done"]), False, info

    def close(self) -> None:
        """Close the running environment."""
        if self._game is not None:
            self._game.close()
            self._game = None
