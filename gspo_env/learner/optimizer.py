"""Makes the optimiser of a learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gspo_env.errors import ConfigError, MissingExtraError
from gspo_env.learner.settings import LearnerConfig
from gspo_env.registry import load_function


def make_optimizer(config: LearnerConfig, weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes the optimiser that the config names.

    Raises:
        ConfigError: The user's function raised, or did not return an optimiser.
        MissingExtraError: The optimiser needs bitsandbytes, which is not installed.
    """
    settings: Any = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(weights, fused=True, **settings)
    if ":" in config.optimizer:
        return _users_own(config.optimizer, weights, settings)
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise MissingExtraError(
            f"optimizer is {config.optimizer!r} and bitsandbytes is not installed: "
            "pip install bitsandbytes"
        ) from error
    kind = optim.AdamW8bit if config.optimizer == "adamw_8bit" else optim.PagedAdamW8bit
    made: torch.optim.Optimizer = kind(weights, **settings)
    return made


def _users_own(
    name: str, weights: Sequence[nn.Parameter], settings: dict[str, float]
) -> torch.optim.Optimizer:
    make = load_function(name, "optimizer")
    try:
        made = make(weights, **settings)
    except Exception as error:
        raise ConfigError(
            f"optimizer is {name!r}, which raised {type(error).__name__}: {error}; expected a "
            "class or function that takes the weights, lr and weight_decay"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is {name!r}, which returned {type(made).__name__}; expected a "
            "torch.optim.Optimizer"
        )
    trained = {id(p) for group in made.param_groups for p in group["params"]}
    if missing := [w for w in weights if id(w) not in trained]:
        raise ConfigError(
            f"optimizer is {name!r}, which leaves out {len(missing)} of {len(weights)} weights; "
            "expected all of them"
        )
    return made
