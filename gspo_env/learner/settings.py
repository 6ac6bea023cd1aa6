"""The learner's settings, its optimiser, and what the training loop asks of it.

PyTorch is imported when an optimiser is made, so that configs and `--help` stay fast.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from annotated_types import Ge, Gt, Le

from gspo_env.errors import ConfigError
from gspo_env.registry import load_function, require
from gspo_env.settings import settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gspo_env.batch.sample import PackedBatch, Sample
    from gspo_env.learner.stats import TokenValues

OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
"""Optimisers by name."""


@settings
class LearnerConfig:
    """The optimiser, and how a rollout batch is split."""

    learning_rate: Annotated[float, Gt(0)] = 1e-6
    """Learning rate of AdamW. A LoRA adapter needs about ten times that of a whole model."""
    warmup_steps: Annotated[int, Ge(0)] = 5
    """Optimiser steps of linear learning-rate warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Weight decay of AdamW. Embeddings, norms and biases have none."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Gradients are clipped to this norm; 0 does not clip."""
    max_skipped_steps: Annotated[int, Ge(1)] = 3
    """Optimiser steps in a row without a finite gradient after which training stops."""
    minibatches: Annotated[int, Ge(1)] = 4
    """Optimiser steps for each rollout batch."""
    microbatch_tokens: Annotated[int, Ge(0)] = 0
    """Maximum tokens of one forward and backward pass. 0 takes 2,048 on a CPU for a model of 5
    million parameters or more, and 16,384 otherwise."""
    observation_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the cross-entropy on tokens of observations, which the policy loss leaves out; 0
    computes none. See `gspo_env.learner.observations`."""
    entropy_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the mean entropy of the tokens, which is added to the objective; with an
    `entropy_target` the first value of a weight that adapts. See `gspo_env.learner.entropy`."""
    entropy_target: Annotated[float, Ge(0)] = 0.0
    """Mean entropy (nats per token) up to which the weight grows and the bonus is added; 0 keeps
    the weight as it is."""
    entropy_share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the tokens, those of the highest entropy, on which the policy is trained."""
    imitation: Literal["none", "expert", "kept"] = "none"
    """Whose episodes are imitated in each optimiser step: those of the environment's expert on
    tasks of the update, or the policy's own successes. See `gspo_env.training.interleaved`."""
    imitation_coef: Annotated[float, Gt(0)] = 0.1
    """Weight of the mean negative log-probability of the imitated tokens."""
    imitation_episodes: Annotated[int, Ge(1)] = 8
    """Episodes of an update that are imitated, at most one of a group."""
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

    def require(self) -> None:
        """Checks that the optimiser can be imported.

        Raises:
            ConfigError: The user's function is not found.
            MissingExtraError: bitsandbytes is not installed.
        """
        if ":" in self.optimizer:
            load_function(self.optimizer, "optimizer")
        elif self.optimizer != "adamw":
            require("bitsandbytes", f"optimizer {self.optimizer!r}", "bitsandbytes")


def rate_factor(step: int, config: LearnerConfig, total_steps: int) -> float:
    """Returns the share of the learning rate at an optimiser step, counted from 0.

    The warm-up ends with the whole rate at its last step, and no step before `total_steps` has the
    rate 0.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    remaining = max(0.0, (total_steps - step) / max(1, total_steps - config.warmup_steps))
    return remaining if config.schedule == "linear" else (1 - math.cos(math.pi * remaining)) / 2


def undecayed(model: nn.Module) -> set[str]:
    """Returns the names of the weights without weight decay: embeddings, norms and biases."""
    from torch import nn

    embeddings = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
    }
    return {
        name
        for name, weight in model.named_parameters()
        if weight.ndim < 2 or id(weight) in embeddings
    }


def make_optimizer(
    config: LearnerConfig, named: Mapping[str, nn.Parameter], undecayed: Collection[str] = ()
) -> torch.optim.Optimizer:
    """Makes the optimiser that the config names.

    Args:
        config: The settings.
        named: The weights to train, by name.
        undecayed: Names of weights without weight decay; a user's function decides that itself.

    Raises:
        ConfigError: The user's function did not return an optimiser of all weights.
        MissingExtraError: The optimiser needs bitsandbytes, which is not installed.
    """
    import torch

    config.require()
    name, weights = config.optimizer, list(named.values())
    settings: Any = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    groups: Any = weights
    if config.weight_decay:
        decays = {key: key not in undecayed for key in named}
        groups = [
            {"params": params, "weight_decay": config.weight_decay * decay}
            for decay in (True, False)
            if (params := [weight for key, weight in named.items() if decays[key] == decay])
        ]
    if name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **settings)
    if ":" not in name:
        from bitsandbytes import optim

        kind = optim.AdamW8bit if name == "adamw_8bit" else optim.PagedAdamW8bit
        return kind(groups, **settings)  # type: ignore[no-any-return]
    optimizer = load_function(name, "optimizer")(weights, **settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is {name!r}, which returned {type(optimizer).__name__}; expected a "
            "torch.optim.Optimizer"
        )
    optimized = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if missing := [weight for weight in weights if id(weight) not in optimized]:
        raise ConfigError(
            f"optimizer is {name!r}, which leaves out {len(missing)} of {len(weights)} weights; "
            "expected all of them"
        )
    return optimizer


class Trainer(Protocol):
    """Trains a model; see `Learner`."""

    @property
    def policy(self) -> Any:
        """The model with its whole weights, as they are after the last update."""

    @property
    def tokens(self) -> Mapping[tuple[int, int], TokenValues]:
        """The values of the tokens of the last update, for the episodes to keep."""

    def update(
        self, samples: Sequence[Sample], seed: int = 0, keep: Collection[int] = ()
    ) -> dict[str, float]:
        """Takes one optimiser step for each minibatch; returns the metrics."""

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """Packs samples into one row on the device of `policy`."""

    def logprobs(self, row: PackedBatch) -> Tensor:
        """Computes the log-probabilities of the model tokens without gradient, (N,)."""

    def state(self) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
        """Returns everything that the next step depends on: JSON, and whole tensors."""

    def restore(self, named: Iterable[tuple[str, Tensor]], saved: Mapping[str, Any]) -> None:
        """Loads the `state` of another learner."""
