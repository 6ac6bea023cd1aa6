"""The update: packed rows give the loss of padded tensors, for every split into microbatches."""

from __future__ import annotations

from functools import partial

import learners
import torch

from gspo_env.batch.packing import pack

learner_of = partial(learners.learner_of, dtype=torch.float64)


def test_pi_old_stays_that_of_the_rollout_through_every_minibatch(model, samples):
    learner = learner_of(model, minibatches=3, learning_rate=1e-2)
    before = learner.logprobs(pack(samples))
    metrics = learner.update(samples)
    after = learner.logprobs(pack(samples))
    assert (before - after).abs().max() > 1e-2
    assert metrics["train/ratio_max"] > 1.0 + 1e-4
    assert metrics["train/clipped_fraction"] > 0.0


def test_nothing_that_is_packed_is_float64(samples):
    """Apple's GPU refuses float64."""
    row = pack(samples)
    kinds = {
        value.dtype for value in map(partial(getattr, row), row.__slots__) if torch.is_tensor(value)
    }
    assert kinds == {torch.int64, torch.float32}
