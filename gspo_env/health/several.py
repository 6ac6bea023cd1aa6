"""Checks of the settings of several ranks, and of workers in Ray."""

from __future__ import annotations

from gspo_env.config import Config
from gspo_env.errors import ConfigError
from gspo_env.registry import name_of


def check_several(config: Config, *, ranks: bool) -> None:
    """Refuses settings that do not go with several ranks or with workers.

    Raises:
        ConfigError: The estimator, the engine, the ranks and the workers do not go together.
    """
    limits, engine = config.rollout, name_of("engine", config.engine)
    if ranks and config.learner.entropy_share < 1:
        raise ConfigError(
            f"learner.entropy_share is {config.learner.entropy_share!r} and several ranks train, "
            "which do not compare their tokens; expected 1, or one process"
        )
    if ranks and config.learner.imitation != "none":
        raise ConfigError(
            f"learner.imitation is {config.learner.imitation!r} and several ranks train, of which "
            "none has the whole gradient; expected 'none', or one process"
        )
    if ranks and engine == "vllm":
        raise ConfigError(
            f"the engine is {engine!r} and several ranks train: vLLM in the process of a rank "
            "takes the others for its own; expected --engine vllm-server or transformers"
        )
    addresses = getattr(config.engine, "addresses", None)
    if limits.ray_workers and addresses is None:
        raise ConfigError(
            f"workers is {limits.workers!r} and the engine is {engine!r}; expected --engine "
            "vllm-server, on whose servers the workers sample"
        )
    if limits.ray_workers and limits.ray_address and not addresses:
        raise ConfigError(
            f"ray_address is {limits.ray_address!r} and the engine has no addresses; expected "
            "--addresses of servers that all machines reach: those that a run starts listen on "
            "this machine only"
        )
