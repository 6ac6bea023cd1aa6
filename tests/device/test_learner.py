"""The learner on a GPU: the CPU's numbers, with no tensor on the wrong device."""

import copy

import numpy as np
import pytest
import torch
from support.device_cases import LOSSES, experts, hybrid, with_prefix
from support.learners import adapted, learner_of
from support.pretend_device import PretendTensor, pretend_gpu

from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model.check import check_model


def updated(model, loss, samples, **config):
    """Metrics of two updates, and the weights after them."""
    settings = LearnerConfig(**{"warmup_steps": 0, "minibatches": 3, **config})
    learner = Learner(model, loss, settings, total_steps=8)
    metrics = [learner.update(samples, seed) for seed in range(2)]
    return metrics, {n: p.detach().cpu() for n, p in learner.policy.named_parameters()}


def same_on_both(model, loss, samples, tolerance=0.0, **config):
    check_model(model)  # noted on both copies, which saves time
    metrics, weights = updated(copy.deepcopy(model), loss, samples, **config)
    with pretend_gpu():
        moved = copy.deepcopy(model).to("cuda")
        assert all(isinstance(p, PretendTensor) for p in moved.parameters())
        there, moved_weights = updated(moved, loss, samples, **config)
    for here, found in zip(metrics, there, strict=True):
        assert here.keys() == found.keys()
        for name, value in here.items():
            if not name.startswith("time/") and not name.endswith("_per_second"):
                assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    torch.testing.assert_close(moved_weights, weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["GSPO", "turns", "KL", "mask"])
def test_losses_have_the_numbers_of_the_cpu(model, samples, name):
    same_on_both(model.double(), LOSSES[name], samples, 1e-9, microbatch_tokens=100)


@pytest.mark.parametrize("name", ["GSPO", "KL"])
def test_adapters_and_checkpointing_have_the_numbers_of_the_cpu(model, samples, name):
    same_on_both(adapted(model.double()), LOSSES[name], samples, 1e-9, checkpointing=True)


def test_the_balance_of_the_routers_has_the_numbers_of_the_cpu(samples):
    same_on_both(experts(), GSPO(), samples, 1e-5)


def test_a_hybrid_model_has_the_numbers_of_the_cpu(samples):
    """It runs one sequence a row."""
    same_on_both(hybrid(), GSPO(), samples[:3])


@pytest.mark.parametrize("wide", [False, True])
def test_shared_prefixes_have_the_numbers_of_the_cpu(model, wide, gradients):
    """The two devices add in another order."""
    given, samples = model.double() if wide else model, with_prefix(np.random.default_rng(1))
    found, metrics = gradients(learner_of(given), samples)
    assert metrics["train/shared_fraction"] > 0.3
    with pretend_gpu():
        there, moved_metrics = gradients(learner_of(given.to("cuda")), samples)
    tolerance = 1e-9 if wide else 1e-4
    for name, value in found.items():
        torch.testing.assert_close(there[name].inner, value, rtol=tolerance, atol=tolerance)
    for name, value in metrics.items():
        assert moved_metrics[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("shared", [False, True])
def test_bfloat16_over_masters_has_the_numbers_of_the_cpu(model, samples, gradients, shared):
    """The kernels differ, so the results agree as far as bfloat16 does."""
    samples = with_prefix(np.random.default_rng(1)) if shared else samples
    model = model.bfloat16()
    found, metrics = gradients(learner_of(model), samples)
    with pretend_gpu() as gpu:
        learner = learner_of(model.to("cuda"), learning_rate=1e-2)
        masters = learner.masters.tensors.values()
        assert all(isinstance(m, PretendTensor) and m.dtype == torch.float32 for m in masters)
        gpu.clear()
        there, moved_metrics = gradients(learner, samples)
        before = [p.cpu() for p in learner.policy.parameters()]
        learner.update(samples)
        after = [p.cpu() for p in learner.policy.parameters()]
    assert {p.dtype for p in after} == {torch.bfloat16}
    assert not all(map(torch.equal, before, after))
    expected = "_flash_attention_backward" if shared else "torch_attn._varlen_attn_backward"
    assert f"{expected}.default" in gpu.kernels
    assert not any("scaled_dot_product" in name for name in gpu.kernels)
    assert moved_metrics["train/entropy"] == pytest.approx(metrics["train/entropy"], abs=0.05)
    a, b = (torch.cat([g[n].flatten() for n in found]) for g in (found, there))
    assert torch.nn.functional.cosine_similarity(a, b.inner, dim=0) > 0.97
