"""Learners and losses that tests of several files compute with."""

import copy
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from gspo_env.batch.sample import Sample
from gspo_env.learner import GSPO, Learner, LearnerConfig, Loss, LossInput, policy_loss


def learner_of(
    model: Any,
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
    temperature: float = 1.0,
    total_steps: int = 8,
    **config: Any,
) -> Learner:
    """A learner of a copy of the model: one minibatch and no clip of gradients by default."""
    settings = LearnerConfig(**{"minibatches": 1, "warmup_steps": 0, "max_grad_norm": 0, **config})
    model = copy.deepcopy(model).to(dtype)
    return Learner(
        model, loss or GSPO(), settings, total_steps=total_steps, temperature=temperature
    )


def adapted(model: Any, **settings: Any) -> Any:
    """A copy of the model with an adapter on all linear layers, which is not zero."""
    settings = {"target_modules": "all-linear", "init_lora_weights": False, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(copy.deepcopy(model), LoraConfig(r=2, **settings))


def sample_of(rng: np.random.Generator, tokens: Any, turns: Any, **fields: Any) -> Sample:
    """A sample with random credit, but for the fields that are given."""
    turns = np.asarray(turns, dtype=np.int64)
    count = int((turns >= 0).sum())
    fields = {"advantages": rng.normal(size=count), "engine_logprobs": -rng.random(count)} | fields
    fields = {"ages": np.arange(count) % 3} | fields
    return Sample(token_ids=np.asarray(tokens), turn_ids=turns, **fields)


def loss_input(
    log_ratios: Any, advantages: Any, episodes: Any, turns: Any = None, old: float = 0.0
) -> LossInput:
    """Tokens with these log-ratios to pi_old, whose log-probabilities are all `old`."""
    old_N = torch.full((len(episodes),), old, dtype=torch.float64)
    turn_N = torch.zeros(len(episodes), dtype=torch.int64) if turns is None else torch.tensor(turns)
    count = max(episodes) + 1
    return LossInput(
        logprobs_N=(old_N + torch.as_tensor(log_ratios)).requires_grad_(),
        old_logprobs_N=old_N,
        advantages_N=torch.as_tensor(advantages, dtype=torch.float64).expand(len(episodes)),
        episode_N=torch.tensor(episodes),
        turn_N=turn_N,
        reference_logprobs_N=None,
        engine_logprobs_N=None,
        num_episodes=count,
        num_turns=int(turn_N.max()) + 1,
        episodes=count,
        tokens=len(episodes),
    )


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
