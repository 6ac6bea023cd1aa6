"""Two rows of a minibatch at the same time: the same sums as one after another."""

import copy
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.learners import sample_of
from support.runs import timeless

from gspo_env.batch.packing import LEAST_TOKENS, microbatches, pack
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.learner.parallel import ParallelRows
from gspo_env.model.adapters import add_adapter
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.scorer import Scorer


def make_samples(count=24, seed=0, prompt=40):
    """Groups of four episodes with a prompt of their own, of two turns each."""
    rng = np.random.default_rng(seed)
    samples = []
    for n in range(count):
        start = np.random.default_rng(n // 4).integers(3, 200, prompt)
        rest = rng.integers(3, 200, int(rng.integers(40, 90)))
        turns = np.r_[np.full(prompt, -1), np.zeros(20), np.full(10, -1), np.ones(len(rest) - 30)]
        tokens, logprobs = np.r_[start, rest], np.full(len(rest) - 10, -5.0)
        samples.append(sample_of(rng, tokens, turns, engine_logprobs=logprobs, episode=n))
    return samples


@pytest.fixture
def make_learner(model, monkeypatch):
    def make(cores=2, parallel=True, model=model, loss=None, **settings):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        with monkeypatch.context() as patch:
            if not parallel:
                patch.setattr(ParallelRows, "suits", lambda model: False)
            config = {"learning_rate": 1e-2, "warmup_steps": 0, "minibatches": 2, **settings}
            return Learner(
                copy.deepcopy(model), loss or GSPO(), LearnerConfig(**config), total_steps=9
            )

    return make


def weights(learner):
    return {n: p.detach().clone() for n, p in learner.policy.named_parameters()}


@pytest.mark.parametrize("adapter", [False, True])
def test_two_threads_give_the_bits_of_one_and_the_weights_of_one_row(model, adapter, make_learner):
    model = add_adapter(copy.deepcopy(model), 4) if adapter else model
    results = []
    for cores, parallel in [(2, True), (1, True), (1, False)]:
        learner = make_learner(cores, parallel, model)
        losses = [learner.imitate(make_samples(seed=n)) for n in range(2)]
        updates = [learner.update(make_samples(seed=n)) for n in range(2)]
        results.append((weights(learner), losses, timeless(enumerate(updates))))
    (threads, *two), (one, *alone), (plain, losses, _) = results
    assert all(torch.equal(threads[name], one[name]) for name in one)
    assert repr(two) == repr(alone)
    for name in plain:
        torch.testing.assert_close(one[name], plain[name], rtol=0, atol=2e-4)
    assert alone[0] == pytest.approx(losses, abs=1e-4)


def test_a_row_that_does_not_fit_is_split_and_the_gradient_is_the_same(make_learner):
    learner = make_learner(minibatches=1)
    (minibatch,) = learner.score(learner.prepare(make_samples()))
    learner.backward(minibatch)
    expected = {n: p.grad.clone() for n, p in learner.policy.named_parameters()}
    learner.optimizer.zero_grad()
    scorer, errors = learner.scorer, [MemoryError("full")]

    def fails_once(row, **options):
        if errors:
            raise errors.pop()
        return scorer(row, **options)

    fails_once.router_coefficient = 0.0
    learner.scorer = fails_once
    assert len(learner.backward(minibatch)) == 3
    for name, parameter in learner.policy.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("index", [0, 1])
def test_an_error_in_one_row_is_raised_after_the_other_has_ended(model, index):
    rows, running = ParallelRows(model, lambda copied: Scorer(copied, 1.0)), set()

    def compute(n, scorer):
        running.add(n)
        if n == index:
            raise ValueError("row")
        running.discard(n)

    with pytest.raises(ValueError, match="row"):
        rows.run(2, compute, Scorer(model, 1.0))
    assert running == {index}


def test_restored_weights_reach_the_copy(make_learner):
    trained, other = make_learner(), make_learner()
    trained.update(make_samples())
    numbers, tensors = trained.state()
    other.restore([(name, tensor.clone()) for name, tensor in tensors], numbers)
    metrics = [each.update(make_samples(seed=1)) for each in (other, trained)]
    assert metrics[0]["train/loss"] == metrics[1]["train/loss"]
    same = weights(other)
    assert all(torch.equal(same[name], tensor) for name, tensor in weights(trained).items())


def test_models_that_are_large_or_half_precise_or_recompute_have_no_copy(model, monkeypatch):
    assert ParallelRows.suits(model)
    assert not ParallelRows.suits(copy.deepcopy(model).bfloat16())
    recomputed = copy.deepcopy(model)
    recomputed.gradient_checkpointing_enable()
    assert not ParallelRows.suits(recomputed)
    monkeypatch.setattr("gspo_env.model.threads.SMALL", 1000)
    assert not ParallelRows.suits(model)


def test_rows_are_at_least_as_many_as_asked_and_alike_unless_they_are_small():
    many = make_samples()
    for share in (True, False):
        assert len(microbatches(many, 10**6, share=share)) == 1
        rows = microbatches(many, 10**6, share=share, least=2)
        assert sorted(s.episode for row in rows for s in row) == list(range(24))
        sizes = [sum(len(s.token_ids) for s in row) for row in rows]
        assert len(sizes) == 2
        assert max(sizes) < 1.2 * min(sizes)
    few = many[: LEAST_TOKENS // 100]
    assert len(microbatches(few, 10**6, least=2)) == 1


@pytest.mark.parametrize("adapter", [False, True])
def test_both_threads_score_with_one_reference(model, adapter, make_learner):
    model = add_adapter(copy.deepcopy(model), 4) if adapter else model
    results = []
    for cores in (2, 1):
        learner = make_learner(cores, True, model, loss=GSPO(kl_coef=0.1))
        updates = [learner.update(make_samples(seed=n)) for n in range(3)]
        results.append((weights(learner), timeless(enumerate(updates))))
    (threads, metrics), (one, alone) = results
    assert all(torch.equal(threads[name], one[name]) for name in one)
    assert repr(metrics) == repr(alone)
    assert all(update["train/kl"] > 0 for _, update in metrics[1:])


def test_threads_share_a_scorer(model):
    use_ragged_attention(model)
    scorer, batches = Scorer(model, 1.0), [pack(make_samples(4, seed)) for seed in range(2)]

    def score(n):
        with torch.no_grad():
            return scorer(batches[n % 2])[0].logprobs_N

    with ThreadPoolExecutor(2) as threads:
        scores = list(threads.map(score, range(60)))
    for n, score_N in enumerate(scores):
        assert torch.equal(score_N, score(n))
