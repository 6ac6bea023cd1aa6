"""Control of entropy: the bonus, its adaptive weight, and the tokens of the highest entropy."""

import copy
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support import learners
from support.learners import adapted

from gspo_env.config import Config
from gspo_env.errors import ConfigError
from gspo_env.health.startup import check_player
from gspo_env.learner import GSPO, LearnerConfig
from gspo_env.learner.entropy import EntropyControl
from gspo_env.registry import BUILTIN, find

learner_of = partial(learners.learner_of, dtype=torch.float64)


def distributions(model, sample):
    """The log-probabilities (N, V) at the sampled tokens, without packing, and their ids."""
    places = np.flatnonzero(sample.mask)
    logits = model(torch.from_numpy(sample.token_ids)[None]).logits[0, places - 1]
    return torch.log_softmax(logits, -1), torch.from_numpy(sample.token_ids[places])


def expected(model, samples, coefficient, share=1.0):
    """The gradient of the mean over sequences of A log pi, and of the mean entropy, by autograd."""
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("sdpa")
    rows = [distributions(plain, sample) for sample in samples]
    entropies = [-(lp.exp() * lp).sum(-1) for lp, _ in rows]
    floor = torch.cat(entropies).detach().quantile(1 - share) - 1e-9
    chosen = [h.detach() >= floor for h in entropies]
    objective = 0
    for (lp_NV, ids), sample, keep in zip(rows, samples, chosen, strict=True):
        lp_N = lp_NV.gather(-1, ids[:, None])[:, 0]
        advantages = torch.from_numpy(sample.advantages.astype(np.float32)).double() * keep
        objective = objective + (advantages * lp_N).mean() / len(samples)
    mean = sum((h * keep).sum() for h, keep in zip(entropies, chosen, strict=True))
    mean = mean / sum(int(keep.sum()) for keep in chosen)
    (-objective - coefficient * mean).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


@pytest.mark.parametrize("tokens", [10_000, 60])
@pytest.mark.parametrize(("coefficient", "share"), [(0.3, 1.0), (0.0, 0.25), (0.3, 0.25)])
def test_the_gradient_is_that_of_the_definition_whatever_the_rows(
    model, samples, gradients, tokens, coefficient, share
):
    learner = learner_of(
        model, microbatch_tokens=tokens, entropy_coef=coefficient, entropy_share=share
    )
    found, _ = gradients(learner, samples)
    wanted = expected(model, samples, coefficient, share)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", sorted(BUILTIN["loss"]))
def test_every_loss_has_the_same_bonus(model, samples, gradients, name):
    loss = find("loss", name)()
    plain, _ = gradients(learner_of(model, loss), samples)
    found, _ = gradients(learner_of(model, loss, entropy_coef=0.3), samples)
    bonus = {key: found[key] - plain[key] for key in found}
    one, _ = gradients(learner_of(model, GSPO(), entropy_coef=0.3), samples)
    none, _ = gradients(learner_of(model, GSPO()), samples)
    torch.testing.assert_close(bonus, {k: one[k] - none[k] for k in one}, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["whole", "adapter", "bfloat16"])
def test_a_bonus_raises_the_entropy(model, samples, kind):
    given = adapted(model) if kind == "adapter" else model
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    flat = [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples]
    settings = {"entropy_coef": 1.0, "learning_rate": 1e-2}
    learner = learners.learner_of(given, GSPO(), dtype, **settings)
    before = learner.update(flat)["train/entropy"]
    for _ in range(4):
        learner.update(flat)
    assert learner.update(flat)["train/entropy"] > before + 1e-4


def test_the_weight_adapts_as_in_trl():
    """Up by 0.005 where the mean is at most the target, else down; added only after a low mean."""
    control = EntropyControl.of(LearnerConfig(entropy_coef=0.004, entropy_target=1.0))
    assert control.weight == 0.0
    weights = []
    for mean in (1.0, 0.5, 1.1, 2.0, 0.1):
        control.see(mean)
        weights.append(control.weight)
    assert weights == pytest.approx([0.009, 0.014, 0.0, 0.0, 0.009])
    control.coefficient = 0.999
    control.see(0.0)
    assert control.weight == 1.0
    constant = EntropyControl.of(LearnerConfig(entropy_coef=0.2))
    constant.see(9.0)
    assert constant.weight == 0.2


def test_a_resumed_learner_has_the_weight_of_the_one_before(model, samples):
    settings = {"entropy_coef": 0.01, "entropy_target": 9.0, "minibatches": 3, "entropy_share": 0.5}
    whole = learner_of(model, **settings)
    whole.update(samples)
    numbers, tensors = whole.state()
    again = learner_of(model, **settings)
    kept = [(name, tensor.clone()) for name, tensor in tensors]
    again.restore(kept, json.loads(json.dumps(numbers)))
    one, two = whole.update(samples, seed=1), again.update(samples, seed=1)
    assert one["train/entropy_coef"] == two["train/entropy_coef"] == pytest.approx(0.04)
    assert one["train/loss"] == two["train/loss"]
    assert "entropy" not in learner_of(model).state()[0]


def test_a_share_is_refused_with_several_ranks():
    config = Config(model="given", learner=LearnerConfig(entropy_share=0.2))
    with pytest.raises(ConfigError, match=r"entropy_share is 0\.2 and several ranks train"):
        check_player(config, ranks=True)
    check_player(config)
