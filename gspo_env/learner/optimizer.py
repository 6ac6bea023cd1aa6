"""Makes the optimiser of a learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gspo_env.errors import MissingExtraError
from gspo_env.learner.settings import LearnerConfig


def make_optimizer(config: LearnerConfig, weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes the optimiser that the config names.

    Raises:
        MissingExtraError: The optimiser needs bitsandbytes, which is not installed.
    """
    settings: Any = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(weights, fused=True, **settings)
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
