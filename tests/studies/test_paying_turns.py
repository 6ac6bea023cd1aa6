"""What estimators make of one more turn where turns pay and the policy decides when to stop."""

import numpy as np
import pytest

from gspo_env.credit import NormalizeThenAccumulate, Outcome, ReturnsToGo
from studies.credit.enumeration import Enumeration
from studies.credit.exact import pay_once, paying_turns, true_gradient
from studies.credit.paying_turns import estimators, first_turn, going_on, logits_of

PER_GROUP, PER_TURN = NormalizeThenAccumulate(), NormalizeThenAccumulate(per="turn")


@pytest.mark.parametrize(
    ("pays", "stopping", "true", "fined"),
    [
        (0.5, 0.0, 0.125, (0.048, 0.075)),
        (0.5, 0.2, 0.075, (-0.010, 0.010)),
        (0.2, 0.1, 0.025, (-0.010, -0.003)),
        (0.0, 0.5, -0.125, (-0.145, -0.162)),
    ],
)
def test_a_baseline_for_each_turn_that_is_summed_fines_one_more_turn(pays, stopping, true, fined):
    problem = pay_once(3, pays, stopping)
    # by hand: p (1 - p) (pays - stopping) at p = 1/2
    assert true == pytest.approx((pays - stopping) / 4)
    assert first_turn(problem, ReturnsToGo(), "token_sum") == pytest.approx(true, abs=1e-12)
    assert first_turn(problem, Outcome(), "token_sum") == pytest.approx(0.75 * true, abs=1e-12)
    found = [first_turn(problem, each, "token_sum") for each in (PER_GROUP, PER_TURN)]
    np.testing.assert_allclose(found, fined, atol=5e-4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chance", [0.2, 0.7])
def test_only_the_estimators_that_sum_comparisons_push_a_turn_the_wrong_way(size, chance):
    problem = paying_turns(3, 0.1, 0.25)
    logits = logits_of(problem, chance)
    true = going_on(problem, true_gradient(problem, logits)[0])
    for name, estimator in estimators().items():
        chance_M, gradient_MD, _ = Enumeration(problem, estimator, size, "token_sum").under(logits)
        wrong = (going_on(problem, chance_M @ gradient_MD) * true < 0).any()
        assert wrong == estimator.sums_comparisons, name
