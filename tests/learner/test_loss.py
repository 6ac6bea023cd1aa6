"""Losses: their settings, how the learner uses them, and custom losses."""

import dataclasses
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support.objective_reference as reference
import torch
from support.learners import learner_of, loss_input

from gspo_env import registry
from gspo_env.batch import pack
from gspo_env.errors import BatchError, ConfigError
from gspo_env.learner import GRPO, GSPO, DrGRPO, Loss, LossInput, ObjectiveOutput
from gspo_env.learner.more_losses import CISPO, LUSPO, SAPO, VESPO, IcePop
from gspo_env.registry import BUILTIN, find
from studies.credit.dppo import DPPO

OWN = f"{Path(__file__).parents[2] / 'examples' / 'own_loss.py'}:SquashedRatio"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dual_clip": 1.0}, "dual_clip is 1.0; expected 0 or above 1.0004"),
        ({"ratio_mean": 0.5, "ratio_level": "token"}, "with ratio_level 'token'; expected 0"),
        ({"correction_cap": 0.5}, "correction_cap is 0.5"),
        ({"correction": "mask", "old_logprobs": "engine"}, "already holds"),
    ],
)
def test_an_impossible_value_is_named(values, message):
    with pytest.raises(ConfigError, match=message):
        GSPO(**values)


def test_the_defaults_are_those_of_the_papers():
    assert (GSPO().ratio_level, GSPO().clip_range) == ("sequence", (1 - 3e-4, 1 + 4e-4))
    assert (GRPO().ratio_level, GRPO().clip_range) == ("token", (0.8, 1.27))
    assert GRPO().aggregation == "sequence_mean"
    assert (DrGRPO().ratio_level, DrGRPO().aggregation) == ("token", "token_sum")


def inputs_of(seed=0):
    """Two sequences of a minibatch of five with 40 tokens."""
    rng = np.random.default_rng(seed)
    old = torch.tensor(-rng.exponential(1.0, 7))
    return LossInput(
        logprobs_N=(old + torch.tensor(0.3 * rng.standard_normal(7))).requires_grad_(),
        old_logprobs_N=old,
        advantages_N=torch.tensor(rng.standard_normal(7)),
        episode_N=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        turn_N=torch.tensor([0, 0, 1, 1, 0, 1, 1]),
        reference_logprobs_N=old - 0.1,
        engine_logprobs_N=old + 0.2,
        num_episodes=2,
        num_turns=2,
        episodes=5,
        tokens=40,
    )


@pytest.mark.parametrize(
    "loss",
    [
        GSPO(clip_low=0.1, clip_high=0.2, dual_clip=1.5, kl_coef=0.1),
        GSPO(ratio_level="turn", ratio_mean=1.0, correction="truncated", correction_cap=1.1),
        GRPO(aggregation="token_mean"),
        DrGRPO(max_tokens=11),
    ],
)
def test_every_setting_reaches_the_loss_and_sums_are_divided_by_the_minibatch(loss):
    inputs = inputs_of()
    output = loss.compute(inputs)
    settings = dataclasses.asdict(loss)
    names = ("ratio_level", "clip_low", "clip_high", "aggregation", "max_tokens", "ratio_mean")
    options: dict[str, Any] = {name: settings[name] for name in names}
    rho = reference.truncated_importance_weights(
        inputs.old_logprobs_N, inputs.engine_logprobs_N, cap=loss.correction_cap
    )
    rows = {
        "old_logprobs": inputs.old_logprobs_N,
        "advantages": inputs.advantages_N,
        "turn_ids": inputs.turn_N,
        "reference_logprobs": inputs.reference_logprobs_N,
        "importance_weights": rho if loss.correction == "truncated" else np.ones(7),
    }

    def padded(values):
        values = np.asarray(values)
        return np.stack([values[:4], np.append(values[4:], 0)])

    expected = reference.policy_loss(
        padded(inputs.logprobs_N.detach()),
        **{name: padded(values) for name, values in rows.items()},
        mask=[[True] * 4, [True, True, True, False]],
        dual_clip=loss.dual_clip,
        kl_coef=loss.kl_coef,
        **options,
    )
    share = 7 / 40 if loss.aggregation == "token_mean" else 2 / 5
    assert output.loss.item() == pytest.approx(share * expected.loss, abs=1e-12)


def test_a_loss_of_ones_own_trains(model, samples):
    squashed = registry.find("loss", OWN)
    learner = learner_of(model, squashed(bound=0.2), minibatches=3, learning_rate=1e-3)
    before = learner.logprobs(pack(samples))
    metrics = [learner.update(samples, seed) for seed in range(4)][-1]
    moved = learner.logprobs(pack(samples)) - before
    assert float((moved * pack(samples).advantages_N).mean()) > 0.0
    assert np.exp(-0.2) < metrics["train/ratio_min"] < 1 < metrics["train/ratio_max"] < np.exp(0.2)
    assert metrics["train/logprob_diff_max"] > 0
    # it reports no clip and no KL
    assert not {"train/clipped_fraction", "train/ratio_outside_clip", "train/kl"} & {*metrics}
    with pytest.raises(ConfigError, match=r"bound is 0\.0"):
        squashed(bound=0.0)


@dataclass(frozen=True, kw_only=True)
class Imitation(Loss):
    """Reads the reference and the engine's log-probabilities."""

    needs_reference = True
    old_logprobs = "engine"

    def compute(self, inputs):
        """Pulls the policy towards its reference."""
        assert torch.equal(inputs.old_logprobs_N, inputs.engine_logprobs_N)
        distance_N = inputs.logprobs_N - inputs.reference_logprobs_N
        return ObjectiveOutput(loss=distance_N.square().sum() / inputs.tokens, kl=distance_N)


def test_a_loss_says_what_it_needs(model, samples):
    learner = learner_of(model, Imitation(), minibatches=2, learning_rate=1e-3)
    metrics = learner.update(samples)
    assert "train/kl" in metrics
    assert "train/ratio" not in metrics
    unknown = [dataclasses.replace(s, engine_logprobs=None) for s in samples]
    with pytest.raises(BatchError, match="engine_logprobs"):
        learner.update(unknown)


@dataclass(frozen=True, kw_only=True)
class Faulty(Loss):
    """Returns the value that a test gives it."""

    result: Any

    def compute(self, inputs):
        """Calls it."""
        return self.result(inputs.logprobs_N)


def output_of(**parts):
    return lambda logprobs_N: ObjectiveOutput(loss=logprobs_N.sum(), **parts)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda lp: ObjectiveOutput(loss=lp[:3]),
            r"loss of '.*:Faulty' is of shape \(3,\); expected",
        ),
        (lambda lp: ObjectiveOutput(loss=lp.detach().sum()), "expected a number with a gradient"),
        (lambda lp: ObjectiveOutput(loss=0.5), "loss of '.*:Faulty' is 0.5; expected a tensor"),
        (lambda lp: lp.sum(), "compute of '.*:Faulty' returned Tensor; expected ObjectiveOutput"),
        (lambda lp: None, "compute of '.*:Faulty' returned NoneType; expected ObjectiveOutput"),
        (output_of(ratio=torch.ones(2)), r"ratio of '.*:Faulty' is of shape \(2,\); expected"),
        (output_of(kl=0.5), r"kl of '.*:Faulty' is 0.5; expected a tensor of shape \(\d+,\)"),
    ],
)
def test_a_faulty_loss_is_named_before_it_changes_a_weight(model, samples, result, message):
    learner = learner_of(model, Faulty(result=result))
    before = [p.clone() for p in learner.policy.parameters()]
    with pytest.raises(BatchError, match=message):
        learner.update(samples)
    assert all(map(torch.equal, before, learner.policy.parameters()))
    assert all(p.grad is None for p in learner.policy.parameters())


def test_a_class_instead_of_a_loss_is_refused(model):
    with pytest.raises(ConfigError, match=r"expected a loss such as GSPO\(\)"):
        learner_of(model, GSPO)


TWO = [0, 0, 1]
"""Episodes of two tokens and of one."""


def ratios_of(ratios, advantages, episode=TWO, old=0.0, engine=None):
    """Tokens with these ratios; `engine` has the ratios of pi_old and the engine's policy."""
    log_ratios = torch.tensor(ratios, dtype=torch.float64).log()
    inputs = loss_input(log_ratios, advantages, episode, old=old)
    off = torch.tensor(engine or [1.0] * len(ratios), dtype=torch.float64).log()
    return replace(inputs, engine_logprobs_N=inputs.old_logprobs_N - off)


def gradient(loss, inputs):
    (slope_N,) = torch.autograd.grad(-loss.compute(inputs).loss, inputs.logprobs_N)
    return slope_N


g2, g05 = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1.05 * 0.5))
EXAMPLES = [
    # SAPO: 4 g (1 - g) r; mean over tokens, then over episodes
    (
        SAPO(),
        ([2, 1, 0.5], [1, 1, -1]),
        [4 * g2 * (1 - g2) * 2 / 4, 1 / 4, -2 * g05 * (1 - g05) / 2],
    ),
    (CISPO(), ([0.5, 7, 1], [1, 1, -2]), [0.5 / 3, 5 / 3, -2 / 3]),
    (VESPO(), ([1.1, 1.1, 1], [1, 1, -1]), [1.21**2 * math.exp(-0.63) / 3] * 2 + [-1 / 3]),
    (VESPO(), ([0.5, 2, 0.9], [1, 1, -1]), [1 / 3, 1 / 3, -(0.9**3) * math.exp(0.2) / 3]),
    # two tokens weigh as much as one: A / G each
    (LUSPO(), ([1, 1, 1], [1, 1, -1]), [0.5, 0.5, -0.5]),
    (LUSPO(), ([1.01, 1.01, 1], [1, 1, -1]), [0, 0, -0.5]),
    (IcePop(), ([1, 1, 1], [1, 1, 1], TWO, 0.0, [0.4, 1.5, 6]), [0, 1.5 / 4, 0]),
    # p = 0.8 and q = 0.5: the rise of 0.3 blocks an advantage above 0 only
    (DPPO(), ([1.6, 1.6, 1], [1, -1, 1], TWO, math.log(0.5)), [0, -1.6 / 3, 1 / 3]),
]


@pytest.mark.parametrize(("loss", "case", "expected"), EXAMPLES, ids=lambda v: type(v).__name__)
def test_a_loss_has_the_gradient_that_was_computed_by_hand(loss, case, expected):
    torch.testing.assert_close(
        gradient(loss, ratios_of(*case)), torch.tensor(expected, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", sorted(BUILTIN["loss"]))
def test_on_policy_every_loss_is_the_policy_gradient(name):
    loss = replace(find("loss", name)(), aggregation="token_sum", max_tokens=1)
    advantages = [1.0, -0.5, 2.0]
    slope_N = gradient(loss, ratios_of([1, 1, 1], advantages, old=-0.3))
    torch.testing.assert_close(slope_N, torch.tensor(advantages, dtype=torch.float64) / 2)
    assert slope_N.dtype == torch.float64


@pytest.mark.parametrize("name", sorted(BUILTIN["loss"]))
def test_a_minibatch_has_the_same_gradient_in_one_microbatch_and_in_two(name):
    whole = ratios_of([1.0001, 0.9999, 1.0002], [1.0, -1.0, 0.5])
    first = ratios_of([1.0001, 0.9999], [1.0, -1.0], [0, 0])
    second = ratios_of([1.0002], [0.5], [0])
    parts = [
        gradient(find("loss", name)(), replace(part, episodes=2, tokens=3))
        for part in (first, second)
    ]
    torch.testing.assert_close(torch.cat(parts), gradient(find("loss", name)(), whole))


@pytest.mark.parametrize("name", ["cispo", "sapo", "vespo"])
def test_extreme_ratios_give_finite_gradients(name):
    slope_N = gradient(find("loss", name)(), ratios_of([1e-30, 1e30, 1e30], [1.0, 1.0, -1.0]))
    assert slope_N.isfinite().all()


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (IcePop, {"old_logprobs": "engine"}),
        (IcePop, {"correction": "truncated"}),
        (IcePop, {"mask_high": 0.9}),
    ],
)
def test_a_setting_without_a_meaning_is_refused(make, wrong):
    with pytest.raises(ConfigError, match="expected"):
        make(**wrong)
