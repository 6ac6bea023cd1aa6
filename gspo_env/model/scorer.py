"""What a model says of a packed row: one forward pass, only model tokens reach the head."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from gspo_env.batch.sample import PackedBatch
from gspo_env.model.attention import PackedAttention
from gspo_env.model.experts import Balance, balance, router_coefficient
from gspo_env.model.head import Predictions, predict, predict_from_logits, without_head
from gspo_env.model.tree_attention import TreeAttention


class Scorer:
    """Runs a causal LM that has ragged attention on packed rows.

    Args:
        model: The model, or what wraps it for training.
        policy: The model itself.
        temperature: What logits are divided by.
        bf16: Computes in bfloat16, whatever the dtype of the weights.
        head: The layer that makes the model's logits; None where they are more than that.
    """

    def __init__(
        self, model: Any, policy: Any, temperature: float, bf16: bool, head: nn.Linear | None
    ) -> None:
        self.model, self.temperature, self.bf16, self.head = model, temperature, bf16, head
        self.router_coefficient = router_coefficient(policy)
        self._chosen = getattr(policy.config.get_text_config(), "num_experts_per_tok", 0)

    def __call__(
        self, batch: PackedBatch, routers: bool = False
    ) -> tuple[Predictions, Balance | None]:
        """Predictions of the model tokens, and the routers' balance where it is asked for."""
        source_M, target_M = batch.source_N, batch.target_N
        if batch.distinct_M is not None:
            source_M, target_M = source_M[batch.distinct_M], target_M[batch.distinct_M]
        device = batch.input_ids_T.device
        lower = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)
        with lower, nullcontext() if self.head is None else without_head(self.head):
            output = self.model(
                input_ids=batch.input_ids_T[None],
                position_ids=batch.positions_T[None],
                use_cache=False,
                logits_to_keep=source_M,
                ragged=_attention(batch),
                **({"output_router_logits": True} if routers else {}),
            )
        states = output.logits[0].bfloat16() if self.bf16 else output.logits[0]
        if self.head is None:
            said = predict_from_logits(states, target_M, self.temperature)
        else:
            said = predict(states, self.head.weight, self.head.bias, target_M, self.temperature)
        even = balance(output.router_logits, self._chosen, batch.uses_T) if routers else None
        return said if batch.expand_N is None else said.at(batch.expand_N), even


def _attention(batch: PackedBatch) -> PackedAttention:
    device = batch.input_ids_T.device
    if batch.runs:
        return TreeAttention(batch.runs, device)
    return PackedAttention(batch.lengths_B, device)
