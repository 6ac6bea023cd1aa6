"""Log-probabilities by a plain forward pass, which those of an engine have to equal."""

import copy
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


def other_weights(model: Any, seed: int, scale: float) -> Any:
    """The same architecture with other weights."""
    other = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + scale * torch.randn(parameter.shape, generator=rng))
    return other


def difference(model: Any, prompt: Any, done: Any, temperature: float = 1.0) -> float:
    """The largest difference of a completion's log-probabilities from those of a plain pass."""
    expected = plain_logprobs(model, prompt, done, temperature)
    return float((torch.tensor(done.logprobs) - expected).abs().max())


def versions_of(done: Any) -> Tensor:
    """The version of the weights that sampled each token."""
    runs = done.weights_versions or ((done.weights_version, len(done.token_ids)),)
    return torch.tensor([v for v, tokens in runs for _ in range(tokens)])


def difference_by_version(models: Any, prompt: Any, done: Any) -> float:
    """The largest difference of each token's log-probability from that by its version's model."""
    by_version = torch.stack([plain_logprobs(m, prompt, done) for m in models])
    expected = by_version[versions_of(done), torch.arange(len(done.token_ids))]
    return float((torch.tensor(done.logprobs) - expected).abs().max())
