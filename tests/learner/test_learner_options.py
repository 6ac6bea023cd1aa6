"""KL, memory options and mixture of experts: each gives the expected numbers."""

import copy
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import architectures
from support.learners import adapted, learner_of
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from gspo_env.batch.packing import pack
from gspo_env.errors import ConfigError, MissingExtraError
from gspo_env.learner import GSPO, LearnerConfig
from gspo_env.learner.settings import rate_factor
from gspo_env.model.head import body_of
from gspo_env.model.router import balance_router


@pytest.mark.parametrize("lora", [False, True])
def test_the_kl_is_that_to_the_model_as_it_was_given(model, samples, lora):
    given = adapted(model, init_lora_weights=True) if lora else model
    learner = learner_of(given, GSPO(kl_coef=0.1), learning_rate=1e-2)
    reference = learner.logprobs(pack(samples))
    learner.update(samples)
    moved = learner.logprobs(pack(samples))
    torch.testing.assert_close(
        learner.reference_logprobs(pack(samples)), reference, rtol=0, atol=1e-5
    )
    metrics = learner.update(samples)
    log_r = reference - moved
    assert metrics["train/kl"] == pytest.approx(float((log_r.exp() - 1 - log_r).mean()), rel=1e-3)
    assert metrics["train/kl"] > 1e-4


def test_no_pass_is_made_that_nothing_needs(model, samples):
    def counted(model, loss, minibatches, updates=1):
        learner = learner_of(model, loss, minibatches=minibatches)
        for _ in range(updates - 1):
            learner.update(samples)
        passes = Counter()
        for scorer in filter(None, (learner.scorer, learner._reference)):
            body_of(scorer.model).register_forward_pre_hook(
                lambda *_: passes.update([torch.is_grad_enabled()])
            )
        learner.update(samples)
        return passes[True], passes[False]

    kl = GSPO(kl_coef=0.1)
    assert counted(model, GSPO(), 1) == (1, 0)
    assert counted(model, GSPO(), 4) == (4, 3)
    # before the first step the reference is the policy, so the passes for pi_old compute both
    assert counted(model, kl, 1) == (1, 0)
    assert counted(model, kl, 4) == (4, 3)
    assert counted(adapted(model, init_lora_weights=True), kl, 4) == (4, 3)
    assert counted(model, kl, 4, updates=2) == (4, 7)
    # a nonzero adapter differs from its base at once
    assert counted(adapted(model), kl, 4) == (4, 7)


@pytest.mark.parametrize("lora", [False, True])
def test_checkpointing_changes_no_gradient(model, samples, gradients, lora):
    given = adapted(model) if lora else model
    shared = [*samples, *samples]  # over a tree

    def found(checkpointing):
        learner = learner_of(given.double(), checkpointing=checkpointing)
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t) or t, lambda t: t
        )
        with hooks:
            learner.scorer(pack(shared))
        return gradients(learner, shared)[0], sum(t.numel() for t in saved)

    (kept, much), (again, little) = found(False), found(True)
    assert little < 0.5 * much
    torch.testing.assert_close(again, kept, rtol=0, atol=1e-10)


def test_an_8_bit_optimiser_without_its_library_says_how_to_install_it(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match="pip install bitsandbytes"):
        learner_of(model, optimizer="adamw_8bit")


OWN = """
import torch

def sgd(weights, lr, weight_decay):
    return torch.optim.SGD(weights, lr=lr, momentum=0.5, weight_decay=weight_decay)

def half(weights, lr, weight_decay):
    return torch.optim.SGD(weights[1:], lr=lr)
"""


def test_an_optimiser_of_ones_own_is_a_function_in_a_file(model, samples, gradients, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    learner = learner_of(model, optimizer=f"{tmp_path}/mine.py:sgd", learning_rate=0.5)
    found, _ = gradients(learner, samples)
    before = {n: p.detach().clone() for n, p in learner.policy.named_parameters()}
    learner.update(samples)
    for name, weight in learner.policy.named_parameters():
        torch.testing.assert_close(weight, before[name] - 0.5 * found[name])


def test_an_optimiser_of_ones_own_that_leaves_weights_out_is_refused(model, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError, match="leaves out 1 of "):
        learner_of(model, optimizer=f"{tmp_path}/mine.py:half")


@pytest.mark.parametrize("wrong", [{"optimizer": "adam"}, {"lora_targets": "q_proj,,"}])
def test_an_invalid_setting_is_named_with_its_value(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; expected"):
        LearnerConfig(**wrong)


@pytest.mark.parametrize("weights", [[1] * 7, [3, 1, 1, 2, 1, 1, 8]])
def test_the_balance_is_that_of_transformers(weights):
    uses = torch.tensor(weights)
    logits = tuple(torch.randn(7, 4, requires_grad=True) for _ in range(3))
    ours = balance_router(logits, 2, uses)
    # counted once for each sequence that uses it, without a weight
    repeated = tuple(layer.repeat_interleave(uses, 0) for layer in logits)
    torch.testing.assert_close(ours.loss, load_balancing_loss_func(repeated, 4, 2))
    assert float(ours.load.sum()) == pytest.approx(4.0)
    ours.loss.backward()
    assert logits[0].grad.abs().max() > 0


def test_a_mixture_trains_with_its_routers_loss(mixture, samples, gradients):
    found, metrics = gradients(learner_of(mixture), samples)
    without = copy.deepcopy(mixture)
    without.config.router_aux_loss_coef = 0.0
    plain, plain_metrics = gradients(learner_of(without), samples)
    batch = pack(samples)
    again = copy.deepcopy(mixture)
    learner = learner_of(again)
    _, router_balance = learner.scorer(batch, routers=True)
    (0.05 * router_balance.loss).backward()
    for name, parameter in learner.policy.named_parameters():
        extra = torch.zeros_like(found[name]) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], plain[name] + extra, rtol=1e-3, atol=1e-6)
    assert metrics["train/router_loss"] > 1.0
    assert metrics["train/expert_load_max"] > 1.0 > metrics["train/expert_load_min"]
    assert "train/router_loss" not in plain_metrics


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_every_optimiser_step_has_a_rate_and_the_metric_is_that_of_the_step(
    model, samples, schedule, warmup
):
    learner = learner_of(
        model, schedule=schedule, warmup_steps=warmup, learning_rate=0.1, minibatches=1
    )
    rates = []
    learner.optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    logged = [learner.update(samples)["train/learning_rate"] for _ in range(6)]
    assert logged == rates
    assert min(rates) > 0
    np.testing.assert_allclose(rates[:warmup], [0.1 * (n + 1) / warmup for n in range(warmup)])
    assert rates[warmup] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_resume_with_more_steps_has_their_schedule_from_its_first_step(model, samples, schedule):
    settings = {"schedule": schedule, "warmup_steps": 1, "learning_rate": 0.1, "minibatches": 1}
    done = learner_of(copy.deepcopy(model), total_steps=3, **settings)
    for _ in range(3):
        done.update(samples)
    numbers, tensors = done.state()
    more = learner_of(model, total_steps=7, **settings)
    more.restore(list(tensors), numbers)
    rates = [more.update(samples)["train/learning_rate"] for _ in range(4)]
    config = LearnerConfig(**settings)
    assert rates == [0.1 * rate_factor(step, config, 7) for step in range(3, 7)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay_acts_on_matrices_only(samples, tied, dtype):
    shape = {"vocab_size": 200, "num_hidden_layers": 1, "attention_bias": True}
    model = architectures.build("Qwen3", tie_word_embeddings=tied, **shape).to(dtype)
    learner = learner_of(model, weight_decay=0.5, learning_rate=0.1)
    before = {name: w.detach().clone() for name, w in learner.masters.tensors.items()}
    flat = [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples]
    learner.update(flat)
    shrunk = {n for n, w in learner.masters.tensors.items() if not torch.equal(w, before[n])}
    matrices = {n for n in before if "proj.weight" in n or n == "lm_head.weight"}
    assert shrunk == matrices


def test_the_smallest_share_of_credited_episodes_of_a_minibatch_is_logged(model, samples):
    flat = [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples]
    learner = learner_of(model, minibatches=2)
    assert learner.update(samples)["train/advantage_share_min"] == 1.0
    assert learner.update(flat)["train/advantage_share_min"] == 0.0
    mixed = [samples[0], *flat[1:]]
    learner = learner_of(model, minibatches=1)
    assert learner.update(mixed)["train/advantage_share_min"] == pytest.approx(1 / len(samples))
