"""The settings of the learner; imports little, so that configs and `--help` stay fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gspo_env.errors import ConfigError

OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
"""Optimisers by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The optimiser, and how a rollout batch is split."""

    learning_rate: float = 1e-6
    """Learning rate of AdamW. A LoRA adapter needs about ten times that of a whole model."""
    warmup_steps: int = 5
    """Optimiser steps of linear learning-rate warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 does not clip."""
    max_skipped_steps: int = 3
    """Optimiser steps in a row without a finite gradient after which training stops."""
    minibatches: int = 4
    """Optimiser steps for each rollout batch."""
    microbatch_tokens: int = 16384
    """Maximum tokens of one forward and backward pass."""
    lora_rank: int = 0
    """Rank of a LoRA adapter; 0 trains every weight."""
    lora_alpha: float = 0.0
    """The adapter's output is multiplied by alpha / rank; 0 is twice the rank."""
    lora_targets: str = "all-linear"
    """Names of the layers that get an adapter, separated by commas, such as `q_proj,v_proj`;
    `all-linear` is every linear layer but routers and the output head."""
    checkpointing: bool = False
    """Activation checkpointing: stores only each layer's input and recomputes the rest."""
    optimizer: str = "adamw"
    """`adamw`; `adamw_8bit` or `paged_adamw_8bit` from bitsandbytes; or `module:function` or
    `file.py:function`, which takes the weights, `lr` and `weight_decay`."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"learning_rate is {self.learning_rate!r}; expected a number above 0")
        positive = {"minibatches": 1, "microbatch_tokens": 1, "max_skipped_steps": 1}
        for name in (*positive, "warmup_steps", "weight_decay", "max_grad_norm", "lora_rank"):
            if not getattr(self, name) >= (least := positive.get(name, 0)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected at least {least}")
        if self.optimizer not in OPTIMIZERS and ":" not in self.optimizer:
            raise ConfigError(
                f"optimizer is {self.optimizer!r}; expected one of {', '.join(OPTIMIZERS)}, or "
                "module:function, or file.py:function"
            )
        if not 0 <= self.lora_alpha < math.inf:
            raise ConfigError(f"lora_alpha is {self.lora_alpha!r}; expected a number of at least 0")
        if not all(name.strip() for name in self.lora_targets.split(",")):
            raise ConfigError(
                f"lora_targets is {self.lora_targets!r}; expected names separated by commas, such "
                "as q_proj,v_proj"
            )
