"""A gradient that is not finite changes nothing; several in a row stop training."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial

import learners
import numpy as np
import pytest
import torch

from gspo_env.errors import TrainingError
from gspo_env.learner import GSPO, Loss, ObjectiveOutput

learner_of = partial(learners.learner_of, warmup_steps=4, learning_rate=1e-3, max_grad_norm=1.0)


def spoiled(samples, value=np.nan):
    """The samples with an advantage that is not finite."""
    first = dataclasses.replace(samples[0], advantages=np.full_like(samples[0].advantages, value))
    return [first, *samples[1:]]


def state(learner):
    """Everything that a step changes."""
    moments = [t for s in learner.optimizer.state.values() for t in s.values()]
    tensors = [*learner.policy.parameters(), *learner.masters.tensors.values(), *moments]
    rate = torch.tensor(learner.scheduler.get_last_lr())
    return [t.detach().clone() for t in [*tensors, rate]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steep(Loss):
    """A finite loss whose gradient is infinite."""

    def compute(self, inputs):
        """Computes the root of 0."""
        zero_N = inputs.logprobs_N - inputs.logprobs_N.detach()
        return ObjectiveOutput(loss=1 + zero_N.sum().sqrt())


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_skipped_step_leaves_no_trace(model, samples, dtype, limit):
    clean, learner = (learner_of(model, dtype=dtype, max_grad_norm=limit) for _ in range(2))
    for each in (clean, learner):
        each.update(samples)
    before = state(learner)
    for value in (np.nan, np.inf):
        metrics = learner.update(spoiled(samples, value))
        assert metrics["train/skipped_steps"] == 1
        assert all(map(torch.equal, before, state(learner)))
        assert all(p.grad is None for p in learner.policy.parameters())
        assert np.isfinite([*metrics.values()]).all()
    clean.update(samples)
    assert learner.update(samples)["train/skipped_steps"] == 0
    assert all(map(torch.equal, state(clean), state(learner)))


@pytest.mark.parametrize(
    ("loss", "broken", "seen"),
    [
        (GSPO(), True, "the loss is nan and the norm of its gradient is nan"),
        (Steep(), False, "the loss is 1 and the norm of its gradient is nan"),
    ],
)
def test_skipped_steps_in_a_row_stop_training(model, samples, caplog, loss, broken, seen):
    learner = learner_of(model, loss, max_skipped_steps=2)
    given = spoiled(samples) if broken else samples
    before = state(learner)
    with caplog.at_level(logging.WARNING):
        learner.update(given)
    assert caplog.messages == [f"skipped an optimiser step: {seen}"]
    with pytest.raises(TrainingError, match=f"^the last 2 optimiser steps were skipped: .*{seen}"):
        learner.update(given)
    assert all(map(torch.equal, before, state(learner)))


def test_a_good_step_ends_the_row(model, samples):
    learner = learner_of(model, max_skipped_steps=2)
    for _ in range(3):
        learner.update(spoiled(samples))
        learner.update(samples)


@pytest.mark.parametrize("kind", ["model", "mixture"])
def test_only_the_minibatch_that_is_not_finite_is_skipped(kind, samples, request):
    model, loss, given = request.getfixturevalue(kind), GSPO(kl_coef=0.1), spoiled(samples)
    learner, parts = (learner_of(model, loss, minibatches=3) for _ in range(2))
    for seed in range(2):
        metrics = learner.update(given, seed)
        assert metrics["train/skipped_steps"] == 1
        assert np.isfinite([*metrics.values()]).all()
        for minibatch in parts.score(parts.prepare(given, seed)):
            if all(m.row.advantages_N.isfinite().all() for m in minibatch.microbatches):
                parts.backward(minibatch)
                parts.step()
    assert all(map(torch.equal, state(learner), state(parts)))
