"""Losses by weight: their examples, their equations, and what all losses have in common."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from learners import loss_input

from gspo_env.errors import ConfigError
from gspo_env.learner.more_losses import CISPO, LUSPO, SAPO, VESPO, IcePop
from gspo_env.registry import BUILTIN, find
from studies.credit.dppo import DPPO

TWO = [0, 0, 1]
"""Episodes of two tokens and of one."""


def inputs_of(ratios, advantages, episode=TWO, old=0.0, engine=None):
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
        gradient(loss, inputs_of(*case)), torch.tensor(expected, dtype=torch.float64)
    )


@pytest.mark.parametrize("name", sorted(BUILTIN["loss"]))
def test_on_policy_every_loss_is_the_policy_gradient(name):
    loss = replace(find("loss", name)(), aggregation="token_sum", max_tokens=1)
    advantages = [1.0, -0.5, 2.0]
    slope_N = gradient(loss, inputs_of([1, 1, 1], advantages, old=-0.3))
    torch.testing.assert_close(slope_N, torch.tensor(advantages, dtype=torch.float64) / 2)
    assert slope_N.dtype == torch.float64


@pytest.mark.parametrize("name", sorted(BUILTIN["loss"]))
def test_a_minibatch_has_the_same_gradient_in_one_microbatch_and_in_two(name):
    whole = inputs_of([1.0001, 0.9999, 1.0002], [1.0, -1.0, 0.5])
    first = inputs_of([1.0001, 0.9999], [1.0, -1.0], [0, 0])
    second = inputs_of([1.0002], [0.5], [0])
    parts = [
        gradient(find("loss", name)(), replace(part, episodes=2, tokens=3))
        for part in (first, second)
    ]
    torch.testing.assert_close(torch.cat(parts), gradient(find("loss", name)(), whole))


@pytest.mark.parametrize("name", ["cispo", "sapo", "vespo"])
def test_extreme_ratios_give_finite_gradients(name):
    slope_N = gradient(find("loss", name)(), inputs_of([1e-30, 1e30, 1e30], [1.0, 1.0, -1.0]))
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
