"""The exact analysis: the gradient is correct, and unbiased estimators show no bias."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_env.credit import ReturnsToGo
from studies.credit.exact import (
    additive,
    best_return,
    episodes_to_target,
    key_and_door,
    may_stop,
    probabilities,
    true_gradient,
)

PROBLEMS = [additive(3), key_and_door(3), may_stop(3)]


def expected_return(problem, logits, state=0):
    """The expected return, by enumeration of all episodes."""
    _, chance = probabilities(problem, logits)
    total = 0.0
    for action, p in enumerate(chance[state]):
        after = problem.after[state, action]
        later = expected_return(problem, logits, after) if after >= 0 else 0.0
        total += p * (problem.reward[state, action] + later)
    return total


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_gradient_is_that_of_the_enumerated_return(problem):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(problem.shape)
    gradient, value = true_gradient(problem, logits)
    assert value == pytest.approx(expected_return(problem, logits), abs=1e-12)
    for place in np.ndindex(logits.shape):
        up, down = logits.copy(), logits.copy()
        up[place] += 1e-5
        down[place] -= 1e-5
        slope = (expected_return(problem, up) - expected_return(problem, down)) / 2e-5
        assert gradient[place] == pytest.approx(slope, abs=1e-9)


def test_policy_gradient_reaches_the_best_return_and_giving_up_is_infinite():
    assert best_return(additive(4)) == pytest.approx(1.0)
    assert best_return(key_and_door(3)) == pytest.approx(1.0)
    quick = episodes_to_target(additive(2), ReturnsToGo(), step_size=8.0)
    assert 0 < quick < 2000
    never = episodes_to_target(additive(2), ReturnsToGo(), step_size=1e-6, limit=80)
    assert never == np.inf
