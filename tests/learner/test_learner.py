"""The update: packed rows give the loss of padded tensors, for every split into microbatches."""

from __future__ import annotations

import copy
from functools import partial

import learners
import torch

from gspo_env.batch.packing import pack
from gspo_env.learner import GSPO, Learner, LearnerConfig

learner_of = partial(learners.learner_of, dtype=torch.float64)


def test_pi_old_stays_that_of_the_rollout_through_every_minibatch(model, samples):
    learner = learner_of(model, minibatches=3, learning_rate=1e-2)
    before = learner.logprobs(pack(samples))
    metrics = learner.update(samples)
    after = learner.logprobs(pack(samples))
    assert (before - after).abs().max() > 1e-2
    assert metrics["train/ratio_max"] > 1.0 + 1e-4
    assert metrics["train/clipped_fraction"] > 0.0


def test_a_lora_adapter_is_all_that_an_update_changes(model, samples):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    learner = Learner(
        adapted, GSPO(), LearnerConfig(learning_rate=1e-2, warmup_steps=0), total_steps=4
    )
    before = {n: p.detach().clone() for n, p in learner.policy.named_parameters()}
    learner.update(samples)
    changed = {n for n, p in learner.policy.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_nothing_that_is_packed_is_float64(samples):
    """Apple's GPU refuses float64."""
    row = pack(samples)
    kinds = {
        value.dtype for value in map(partial(getattr, row), row.__slots__) if torch.is_tensor(value)
    }
    assert kinds == {torch.int64, torch.float32}
