"""Log-probabilities by a plain forward pass, which those of an engine have to equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def plain_logprobs(model: Any, prompt: Any, done: Any, temperature: float = 1.0) -> Tensor:
    """The log-probabilities of a completion by a pass over the whole sequence."""
    attention = model.config._attn_implementation
    ids = torch.tensor([[*prompt, *done.token_ids]])
    try:
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    finally:
        model.set_attn_implementation(attention)
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def difference(model: Any, prompt: Any, done: Any, temperature: float = 1.0) -> float:
    """The largest difference of a completion's log-probabilities from those of a plain pass."""
    expected = plain_logprobs(model, prompt, done, temperature)
    return float((torch.tensor(done.logprobs) - expected).abs().max())
