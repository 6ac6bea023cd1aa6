"""Models that the tests of the learner share."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


@pytest.fixture
def mixture():
    """A small mixture of experts with the auxiliary loss of its routers."""
    shape = Qwen3MoeConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.05,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(shape)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model
