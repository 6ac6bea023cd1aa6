"""Half-precision weights train as float32 weights do: their masters keep what rounding loses."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from support.learners import adapted

from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.learner import masters as masters_module
from gspo_env.model.export import named_weights

HALF = [torch.bfloat16, torch.float16]


def learner_on(model, loss=None, **config):
    settings = LearnerConfig(**{"minibatches": 1, "warmup_steps": 0, **config})
    return Learner(model, loss or GSPO(), settings, total_steps=400)


def learner_of(model, dtype, loss=None, **config):
    return learner_on(copy.deepcopy(model).to(dtype), loss, **config)


def trained(learner):
    """What the optimiser works on."""
    return torch.cat([p.detach().flatten().float() for p in learner.masters.tensors.values()])


def gradient(learner, samples):
    """The gradient by name, which is that of the masters."""
    for minibatch in learner.score(learner.prepare(samples)):
        learner.backward(minibatch)
    return {name: p.grad for name, p in learner.masters.tensors.items()}


def assert_rounded(learner):
    """Each weight is its master rounded, and the masters are float32."""
    weights = {n: p for n, p in learner.policy.named_parameters() if p.requires_grad}
    assert weights.keys() == learner.masters.tensors.keys()
    for name, master in learner.masters.tensors.items():
        assert master.dtype == torch.float32
        assert torch.equal(weights[name], master.to(weights[name].dtype))


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_weights_move_as_far_as_float32_weights(model, samples, dtype):
    start = model.to(dtype).float()  # all begin at the same weights

    def movement(dtype):
        learner = learner_of(start, dtype, learning_rate=1e-6)
        before = trained(learner)
        for _ in range(10):
            learner.update(samples)
        return float((trained(learner) - before).norm())

    assert movement(dtype) == pytest.approx(movement(torch.float32), rel=0.05)


@pytest.mark.parametrize("dtype", HALF)
def test_the_weights_are_the_masters_rounded(model, samples, dtype):
    """With tied embeddings, a frozen layer, a float32 layer and several minibatches."""
    half = copy.deepcopy(model).to(dtype)
    half.model.norm.float()
    half.model.norm.register_forward_hook(lambda m, _, output: output.to(dtype))
    half.model.layers[0].requires_grad_(False)
    assert half.lm_head.weight is half.model.embed_tokens.weight
    frozen = [p.clone() for p in half.model.layers[0].parameters()]
    learner = learner_on(half, minibatches=3, learning_rate=1e-3)
    before = trained(learner)
    for _ in range(2):
        learner.update(samples)
    assert_rounded(learner)
    assert (trained(learner) != before).float().mean() > 0.9
    assert learner.masters.tensors["model.norm.weight"] is half.model.norm.weight
    assert all(map(torch.equal, frozen, half.model.layers[0].parameters()))
    engine = dict(named_weights(learner.policy))
    assert {t.dtype for n, t in engine.items() if n != "model.norm.weight"} == {dtype}


def test_gradients_of_rows_add_up_in_float32(model, samples):
    parts = []
    whole = learner_of(model, torch.bfloat16, microbatch_tokens=40)
    (minibatch,) = whole.score(whole.prepare(samples))
    assert len(minibatch.microbatches) > 4
    one = learner_of(model, torch.bfloat16)
    for microbatch in minibatch.microbatches:
        one.backward(dataclasses.replace(minibatch, microbatches=(microbatch,)))
        assert all(p.grad is None for p in one.policy.parameters())  # freed
        parts.append({n: p.grad.clone() for n, p in one.masters.tensors.items()})
        one.optimizer.zero_grad()
    for name, value in gradient(whole, samples).items():
        assert all(torch.equal(p[name], p[name].bfloat16().float()) for p in parts)
        total = sum(p[name] for p in parts)
        torch.testing.assert_close(value, total, rtol=1e-5, atol=1e-9)
        assert not torch.equal(value, value.bfloat16().float())


@pytest.mark.parametrize("lora", [False, True])
def test_float16_loses_no_small_gradient(model, samples, lora):
    half = model.half()
    given = adapted(half) if lora else half
    small = [dataclasses.replace(s, advantages=1e-4 * s.advantages) for s in samples]
    exact, learner = learner_of(given, torch.float32), learner_on(given)
    for each in (exact, learner):
        for _ in range(2):  # the gradient of two backward passes before a step
            found = gradient(each, small)
    for name, master in exact.masters.tensors.items():
        error = (found[name] - master.grad).norm()
        assert error < 0.1 * master.grad.norm()


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_an_adapter_is_its_own_master_and_all_that_an_update_changes(model, samples, dtype):
    policy = adapted(model.to(dtype))
    learner = learner_on(policy, learning_rate=1e-3)
    weights = dict(policy.named_parameters())
    assert set(learner.masters.tensors) == {n for n in weights if "lora_" in n}
    assert all(p is weights[name] for name, p in learner.masters.tensors.items())
    base = [p.clone() for n, p in policy.named_parameters() if "lora_" not in n]
    before = trained(learner)
    learner.update(samples)
    assert not torch.equal(trained(learner), before)
    after = [p for n, p in policy.named_parameters() if "lora_" not in n]
    assert all(map(torch.equal, base, after))
    assert_rounded(learner)


def test_an_overflow_lowers_the_loss_scale_and_many_good_steps_raise_it(
    model, samples, monkeypatch
):
    monkeypatch.setattr(masters_module, "_GROWTH_INTERVAL", 2)
    learner = learner_of(model, torch.float16, max_skipped_steps=1)
    assert "train/loss_scale" not in learner_of(model, torch.float32).update(samples)
    learner.masters.loss_scale = 2.0**60
    before = trained(learner)
    metrics = learner.update(samples)
    assert metrics["train/skipped_steps"] == 1
    assert metrics["train/loss_scale"] == 2.0**59
    assert torch.equal(trained(learner), before)
    learner.masters.loss_scale = 2.0**9
    scales = [learner.update(samples)["train/loss_scale"] for _ in range(4)]
    assert scales == [2.0**9, 2.0**10, 2.0**10, 2.0**11]
    assert np.isfinite([*learner.update(samples).values()]).all()
