"""The settings of the learner; imports little, so that configs and `--help` stay fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from gspo_env.errors import ConfigError
from gspo_env.registry import check_values

OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
"""Optimisers by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The optimiser, and how a rollout batch is split."""

    learning_rate: Annotated[float, Gt(0)] = 1e-6
    """Learning rate of AdamW. A LoRA adapter needs about ten times that of a whole model."""
    warmup_steps: Annotated[int, Ge(0)] = 5
    """Optimiser steps of linear learning-rate warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Gradients are clipped to this norm; 0 does not clip."""
    max_skipped_steps: Annotated[int, Ge(1)] = 3
    """Optimiser steps in a row without a finite gradient after which training stops."""
    minibatches: Annotated[int, Ge(1)] = 4
    """Optimiser steps for each rollout batch."""
    microbatch_tokens: Annotated[int, Ge(1)] = 16384
    """Maximum tokens of one forward and backward pass."""
    lora_rank: Annotated[int, Ge(0)] = 0
    """Rank of a LoRA adapter; 0 trains every weight."""
    lora_alpha: Annotated[float, Ge(0)] = 0.0
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
        check_values(self)
        if self.optimizer not in OPTIMIZERS and ":" not in self.optimizer:
            raise ConfigError(
                f"optimizer is {self.optimizer!r}; expected one of {', '.join(OPTIMIZERS)}, or "
                "module:function, or file.py:function"
            )
        if not all(name.strip() for name in self.lora_targets.split(",")):
            raise ConfigError(
                f"lora_targets is {self.lora_targets!r}; expected names separated by commas, such "
                "as q_proj,v_proj"
            )
