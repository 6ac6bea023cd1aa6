"""Two rows of a minibatch at the same time: the same sums as one after another."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from runs import timeless

from gspo_env.batch.packing import LEAST_TOKENS, microbatches
from gspo_env.batch.sample import Sample
from gspo_env.learner import GSPO, Learner, LearnerConfig, lanes
from gspo_env.learner.lanes import Lanes
from gspo_env.model.load import add_adapter


def samples(count=24, seed=0, prompt=40):
    """Groups of four episodes with a prompt of their own, of two turns each."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(count):
        start = np.random.default_rng(n // 4).integers(3, 200, prompt)
        rest = rng.integers(3, 200, int(rng.integers(40, 90)))
        turns = np.r_[np.full(prompt, -1), np.zeros(20), np.full(10, -1), np.ones(len(rest) - 30)]
        made.append(
            Sample(
                token_ids=np.r_[start, rest],
                turn_ids=turns.astype(np.int64),
                advantages=rng.normal(size=len(rest) - 10),
                engine_logprobs=np.full(len(rest) - 10, -5.0),
                episode=n,
            )
        )
    return made


def learner(model, cores, monkeypatch, **settings):
    monkeypatch.setattr(lanes, "_has_cores", lambda: cores)
    given = {"learning_rate": 1e-2, "warmup_steps": 0, "minibatches": 2, **settings}
    return Learner(copy.deepcopy(model), GSPO(), LearnerConfig(**given), total_steps=9)


def weights(learner):
    return {n: p.detach().clone() for n, p in learner.policy.named_parameters()}


@pytest.mark.parametrize("adapter", [False, True])
def test_two_threads_give_the_bits_of_one_and_the_weights_of_rows_without_lanes(
    model, adapter, monkeypatch
):
    model = add_adapter(copy.deepcopy(model), 4) if adapter else model
    found, metrics = [], []
    for cores, lane in [(True, True), (False, True), (False, False)]:
        trained = learner(model, cores, monkeypatch)
        assert trained._lanes is not None
        if not lane:
            trained._lanes = None
        imitated = [trained.imitate(samples(seed=n)) for n in range(2)]
        updates = [trained.update(samples(seed=n)) for n in range(2)]
        metrics.append((imitated, timeless(enumerate(updates))))
        found.append(weights(trained))
    threads, one, plain = found
    assert all(torch.equal(threads[name], one[name]) for name in one)
    assert repr(metrics[0]) == repr(metrics[1])
    for name in plain:
        torch.testing.assert_close(one[name], plain[name], rtol=0, atol=2e-4)
    assert metrics[1][0] == pytest.approx(metrics[2][0], abs=1e-4)


def test_the_gradient_is_that_of_one_row(model, monkeypatch):
    model = copy.deepcopy(model).double().float()
    gradients = []
    for lane in (True, False):
        trained = learner(model, True, monkeypatch, minibatches=1)
        if not lane:
            trained._lanes = None
        (minibatch,) = trained.score(trained.prepare(samples()))
        assert len(minibatch.microbatches) == (2 if lane else 1)
        trained.backward(minibatch)
        trained.backward(minibatch)  # adds to what is there
        gradients.append({n: p.grad for n, p in trained.policy.named_parameters()})
    for name, grad in gradients[1].items():
        scale = grad.abs().max()
        assert (gradients[0][name] - grad).abs().max() < 1e-5 * scale, name


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("cores", [True, False])
def test_a_row_that_does_not_fit_is_tried_alone_then_split_and_the_gradient_is_the_same(
    model, place, cores, monkeypatch
):
    trained = learner(model, cores, monkeypatch, minibatches=1)
    (minibatch,) = trained.score(trained.prepare(samples()))
    trained.backward(minibatch)
    expected = {n: p.grad.clone() for n, p in trained.policy.named_parameters()}
    trained.optimizer.zero_grad()
    lane = trained.scorer if place == 0 else trained._lanes._scorer
    run, left = lane._run, [MemoryError("full")]

    def fails(batch, options):
        if left:
            raise left.pop()
        return run(batch, options)

    lane._run = fails
    passes = trained.backward(minibatch)
    assert len(passes) == (2 if cores else 3)
    assert not trained._lanes.at_once
    for name, parameter in trained.policy.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_in_one_row_is_raised_after_the_other_has_ended(model, place, monkeypatch):
    trained = learner(model, True, monkeypatch, minibatches=1)
    (minibatch,) = trained.score(trained.prepare(samples()))
    running = set()

    def work(n, scorer):
        running.add(n)
        if n == place:
            raise ValueError("row")
        scorer(minibatch.microbatches[n].row)
        running.discard(n)

    with pytest.raises(ValueError, match="row"):
        trained._lanes.run(2, work, trained.scorer)
    assert running == {place}


def test_restored_weights_reach_the_copy(model, monkeypatch):
    trained, other = (learner(model, True, monkeypatch) for _ in range(2))
    trained.update(samples())
    numbers, tensors = trained.state()
    other.restore([(name, tensor.clone()) for name, tensor in tensors], numbers)
    metrics = [each.update(samples(seed=1)) for each in (other, trained)]
    assert metrics[0]["train/loss"] == metrics[1]["train/loss"]
    same = weights(other)
    assert all(torch.equal(same[name], tensor) for name, tensor in weights(trained).items())


def test_models_that_are_large_or_half_precise_or_recompute_have_no_copy(model, monkeypatch):
    assert Lanes.suits(model)
    assert not Lanes.suits(copy.deepcopy(model).bfloat16())
    assert learner(model, True, monkeypatch, checkpointing=True)._lanes is None
    monkeypatch.setattr("gspo_env.model.threads.SMALL", 1000)
    assert not Lanes.suits(model)


def test_rows_are_at_least_as_many_as_asked_and_alike_unless_they_are_small():
    many = samples()
    for share in (True, False):
        whole = microbatches(many, 10**6, share=share)
        assert len(whole) == 1
        rows = microbatches(many, 10**6, share=share, least=2)
        assert sorted(s.episode for row in rows for s in row) == list(range(24))
        sizes = [sum(len(s.token_ids) for s in row) for row in rows]
        assert len(sizes) == 2
        assert max(sizes) < 1.2 * min(sizes)
    few = many[: LEAST_TOKENS // 100]
    assert len(microbatches(few, 10**6, least=2)) == 1
