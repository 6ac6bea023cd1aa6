"""The clip range that follows the credit of a turn, by hand and against GSPO by turn."""

import numpy as np
import pytest
import torch
from support.learners import loss_input

from gspo_env.learner import GSPO
from studies.credit.adaptive_clip import AdaptiveClip


def inputs_of(ratio, advantage, turns=(0, 0), episodes=(0, 0)):
    return loss_input(np.log(ratio), advantage, episodes, turns)


def evaluate(loss, inputs):
    output = loss.compute(inputs)
    return output.loss.item(), torch.autograd.grad(output.loss, inputs.logprobs_N)[0]


def test_by_hand():
    # z = ln 3 gives 2 sigmoid(z) - 1 = 1/2: 0.3 makes 0.2 to 0.23, or to 0.17 for -z
    z = float(np.log(3.0))
    loss = AdaptiveClip(clip_low=0.2, clip_high=0.2)
    for advantage, ratio, bound in ((z, 1.22, None), (z, 1.24, 1.23), (-z, 0.82, 0.83)):
        value, gradient = evaluate(loss, inputs_of(ratio, advantage))
        assert value == pytest.approx(-(bound or ratio) * advantage)
        assert bool(gradient.any()) == (bound is None)


def test_without_adaptation_it_is_gspo_by_turn():
    rng = np.random.default_rng(0)
    turns, episodes = (0, 0, 1, 0, 1, 1, 2), (0, 0, 0, 1, 1, 1, 1)
    bounds = {"clip_low": 0.05, "clip_high": 0.05}
    inputs = inputs_of(np.exp(0.2 * rng.normal(size=7)), rng.normal(size=7), turns, episodes)
    ours, gradient = evaluate(AdaptiveClip(clip_adapt=0.0, **bounds), inputs)
    value, expected = evaluate(GSPO(ratio_level="turn", **bounds), inputs)
    assert ours == pytest.approx(value)
    assert gradient.tolist() == pytest.approx(expected.tolist())
