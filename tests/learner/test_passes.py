"""The learner's parts: prepare, score, backward, step; and dropout, which is off in all of them."""

import dataclasses
import logging
from functools import partial

import numpy as np
import pytest
import torch
from support import architectures
from support.learners import adapted, learner_of, sample_of

from gspo_env.batch import Sample, pack
from gspo_env.errors import BatchError, TrainingError
from gspo_env.learner import GSPO, Loss, ObjectiveOutput


def with_dropout(kind, model):
    """A model whose dropout is in its adapter's modules, or in its layers' own code."""
    if kind == "adapter":
        return adapted(model, lora_dropout=0.5)
    return architectures.build("OPT", vocab_size=200, dropout=0.5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["adapter", "layers"])
def test_dropout_is_off_in_every_pass(model, samples, gradients, kind, checkpointing):
    given = with_dropout(kind, model)
    learner = learner_of(given, checkpointing=checkpointing)
    learner.policy.train()  # as the user, or another library, left it
    batch = pack(samples)
    before = learner.logprobs(batch)
    torch.testing.assert_close(learner.scorer(batch)[0].logprobs_N, before, rtol=0, atol=1e-6)
    found, metrics = gradients(learner, samples)
    again, _ = gradients(learner, samples)
    assert metrics["train/ratio_min"] == metrics["train/ratio_max"] == 1.0
    plain, _ = gradients(learner_of(given), samples)
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    torch.testing.assert_close(plain, found, rtol=1e-4, atol=1e-6)


def test_the_parts_make_the_update(model, samples):
    whole, parts = (learner_of(model, minibatches=3, learning_rate=1e-3) for _ in range(2))
    whole.update(samples, 5)
    minibatches = parts.prepare(samples, 5)
    assert [m.first for m in minibatches] == [True, False, False]
    assert sum(m.episodes for m in minibatches) == len(samples)
    assert sum(m.tokens for m in minibatches) == sum(len(s.advantages) for s in samples)
    scored = parts.score(minibatches)
    assert minibatches[1].microbatches[0].trainer_logprobs_N is None  # nothing was written to
    assert scored[0].microbatches[0].trainer_logprobs_N is None
    assert scored[1].microbatches[0].trainer_logprobs_N is not None
    for minibatch in scored:
        parts.backward(minibatch)
        assert parts.step() > 0
    assert all(map(torch.equal, whole.policy.parameters(), parts.policy.parameters()))


@pytest.mark.parametrize("loss", [GSPO(), GSPO(kl_coef=0.1)])
def test_a_minibatch_that_was_not_scored_is_refused(model, samples, loss):
    learner = learner_of(model, loss, minibatches=2)
    first, second = learner.prepare(samples)
    learner.backward(first)
    learner.step()
    with pytest.raises(BatchError, match="expected a minibatch that `score` returned"):
        learner.backward(second)
    if loss.kl_coef:
        with pytest.raises(BatchError, match="expected a minibatch that `score` returned"):
            learner.backward(first)


def empty_sample():
    return Sample(token_ids=np.arange(1, 9), turn_ids=np.full(8, -1), advantages=np.empty(0))


def test_samples_without_a_model_token_change_nothing(model, samples, gradients):
    found, metrics = gradients(learner_of(model), [empty_sample(), *samples])
    wanted, wanted_metrics = gradients(learner_of(model), samples)
    assert metrics["train/loss"] == wanted_metrics["train/loss"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert np.isfinite([*learner_of(model).update([empty_sample(), *samples]).values()]).all()
    with pytest.raises(BatchError, match="no sample has a model token"):
        learner_of(model).update([empty_sample()])
    with pytest.raises(BatchError, match="no sample has a model token"):
        learner_of(model).update([])


def test_unknown_engine_logprobs_of_some_samples_leave_the_others_measured(model, samples):
    mixed = [
        dataclasses.replace(s, engine_logprobs=None) if n == 0 else s for n, s in enumerate(samples)
    ]
    metrics = learner_of(model, microbatch_tokens=1).update(mixed)  # a row for each sample
    assert metrics["train/logprob_diff_max"] > 0
    metrics = learner_of(model).update(mixed)  # one row
    assert not any("logprob_diff" in name or "outside" in name for name in metrics)


def test_the_mismatch_is_measured_by_turn_and_by_the_age_of_the_weights(model, samples):
    learner, drifted = learner_of(model, minibatches=2), []
    for n, sample in enumerate(samples):
        logprobs = learner.logprobs(pack([sample])).numpy()
        turn_N = sample.turn_ids[sample.mask]
        ages = np.full(len(turn_N), n % 2)
        shift = 0.25 * (turn_N > 0) + 0.5 * ages
        drifted.append(dataclasses.replace(sample, engine_logprobs=logprobs - shift, ages=ages))
    metrics = learner_of(model, minibatches=2).update(drifted[::2])
    assert metrics["train/logprob_diff_turn_1"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["train/logprob_diff_turn_2"] == pytest.approx(0.25, abs=1e-5)
    assert "train/logprob_diff_age_0" not in metrics
    metrics = learner_of(model, minibatches=2).update(drifted)
    gap = metrics["train/logprob_diff_age_1"] - metrics["train/logprob_diff_age_0"]
    assert gap == pytest.approx(0.5, abs=0.1)
    first = [dataclasses.replace(s, turn_ids=np.minimum(s.turn_ids, 0)) for s in drifted]
    assert not any("_turn_" in name for name in learner_of(model).update(first))


clipping_learner = partial(learner_of, warmup_steps=4, learning_rate=1e-3, max_grad_norm=1.0)


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
    clean, learner = (clipping_learner(model, dtype=dtype, max_grad_norm=limit) for _ in range(2))
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
    learner = clipping_learner(model, loss, max_skipped_steps=2)
    given = spoiled(samples) if broken else samples
    before = state(learner)
    with caplog.at_level(logging.WARNING):
        learner.update(given)
    assert caplog.messages == [f"skipped an optimiser step: {seen}"]
    with pytest.raises(TrainingError, match=f"^the last 2 optimiser steps were skipped: .*{seen}"):
        learner.update(given)
    assert all(map(torch.equal, before, state(learner)))


def test_a_good_step_ends_the_row(model, samples):
    learner = clipping_learner(model, max_skipped_steps=2)
    for _ in range(3):
        learner.update(spoiled(samples))
        learner.update(samples)


@pytest.mark.parametrize("kind", ["model", "mixture"])
def test_only_the_minibatch_that_is_not_finite_is_skipped(kind, samples, request):
    model, loss, given = request.getfixturevalue(kind), GSPO(kl_coef=0.1), spoiled(samples)
    learner, parts = (clipping_learner(model, loss, minibatches=3) for _ in range(2))
    for seed in range(2):
        metrics = learner.update(given, seed)
        assert metrics["train/skipped_steps"] == 1
        assert np.isfinite([*metrics.values()]).all()
        for minibatch in parts.score(parts.prepare(given, seed)):
            if all(m.row.advantages_N.isfinite().all() for m in minibatch.microbatches):
                parts.backward(minibatch)
                parts.step()
    assert all(map(torch.equal, state(learner), state(parts)))


@pytest.mark.parametrize(("vocabulary", "most"), [(200, 2600), (100_000, 1300)])
def test_a_pass_of_a_model_that_is_not_small_has_few_tokens_on_a_cpu(vocabulary, most):
    learner = learner_of(architectures.build("Qwen3", vocab_size=vocabulary))
    turns = np.repeat([-1, 0], [1, 1299])
    samples = [
        sample_of(np.random.default_rng(n), np.arange(n, n + 1300) % 199, turns) for n in range(4)
    ]
    (minibatch,) = learner.prepare(samples)
    assert max(len(part.row.input_ids_T) for part in minibatch.microbatches) == most
