"""Learners and losses that tests of several files compute with."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.sample import Sample
from gspo_env.learner import GSPO, Learner, LearnerConfig, Loss, policy_loss


def learner_of(
    model: Any,
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    **config: Any,
) -> Learner:
    """A learner of a copy of the model: one minibatch and no clip of gradients by default."""
    settings = LearnerConfig(**{"minibatches": 1, "warmup_steps": 0, "max_grad_norm": 0, **config})
    model = copy.deepcopy(model).to(dtype)
    return Learner(model, loss or GSPO(), settings, total_steps=8, temperature=temperature)


def sample_of(rng: np.random.Generator, tokens: Any, turns: Any, **fields: Any) -> Sample:
    """A sample with random credit, but for the fields that are given."""
    turns = np.asarray(turns, dtype=np.int64)
    count = int((turns >= 0).sum())
    fields = {"advantages": rng.normal(size=count), "engine_logprobs": -rng.random(count)} | fields
    return Sample(token_ids=np.asarray(tokens), turn_ids=turns, **fields)


def evaluate(inputs: dict[str, Tensor], **options: Any) -> tuple[Any, Tensor]:
    """The output of `policy_loss`, and its gradient for the log-probabilities."""
    logprobs = inputs["logprobs"].clone().requires_grad_()
    arguments: dict[str, Any] = {**inputs, "logprobs": logprobs, **options}
    output = policy_loss(**arguments)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, gradient


def batch(seed: int, rows: int, length: int, spread: float) -> dict[str, Tensor]:
    """Random padded arguments of `policy_loss` in float64, whose log-ratios have this spread."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, length)) < 0.6
    mask[:, 0] = True
    turns = np.sort(rng.integers(0, 3, (rows, length)), axis=1)
    old = -rng.exponential(1.0, (rows, length))
    return {
        "logprobs": torch.tensor(old + spread * rng.standard_normal((rows, length))),
        "old_logprobs": torch.tensor(old),
        "advantages": torch.tensor(rng.standard_normal((rows, length))),
        "mask": torch.tensor(mask),
        "turn_ids": torch.tensor(np.where(mask, turns, -1)),
    }
