"""The exact expectations agree with sampled groups, and show what a divisor does."""

import numpy as np
import pytest

from gspo_env.credit import (
    GiGPO,
    GroupGAE,
    NormalizeThenAccumulate,
    Outcome,
    ReturnsToGo,
    TurnPlusOutcome,
)
from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, find
from studies.credit.branches import BranchBaseline
from studies.credit.branching import DATA, BranchedEnumeration, table
from studies.credit.enumeration import Enumeration, direction, policy_at
from studies.credit.evidence import EvidenceCalibrated
from studies.credit.exact import (
    additive,
    all_right,
    analyse,
    best_return,
    episodes_to_target,
    key_and_door,
    look_up,
    may_stop,
    probabilities,
    true_gradient,
)

ESTIMATORS = sorted({*BUILTIN["advantage"]} - {"by_agent", "distillation", "parts"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        *((name, look_up(1, 2)) for name in ESTIMATORS),
        *((name, make(2)) for name in ("gigpo", "group_gae") for make in (key_and_door, may_stop)),
    ],
)
def test_the_enumeration_agrees_with_sampled_groups(name, problem):
    estimator = find("advantage", name)(scale="std")
    sampled = analyse(problem, estimator, groups=1500, group_size=3, seed=5)
    logits = 0.5 * np.random.default_rng(5).standard_normal(problem.shape)
    exact = direction([(Enumeration(problem, estimator, 3), logits)], groups=1)
    assert exact.bias == pytest.approx(sampled.bias, abs=4 * sampled.error)
    noise = np.sqrt((exact.cosine / exact.progress) ** 2 - 1)
    assert noise == pytest.approx(sampled.noise, rel=0.1)


UNBIASED = [Outcome(), ReturnsToGo(), GroupGAE(lam=1.0), NormalizeThenAccumulate(per="turn")]
BIASED = [GiGPO(), GroupGAE(), NormalizeThenAccumulate(), TurnPlusOutcome()]


@pytest.mark.parametrize("estimator", [*UNBIASED, *BIASED], ids=repr)
@pytest.mark.parametrize("problem", [key_and_door(4), all_right(3)])
def test_without_a_divisor_four_estimators_give_the_true_gradient(estimator, problem):
    groups = Enumeration(problem, estimator, 4)
    bias = max(direction([(groups, policy_at(problem, share))]).bias for share in (0.3, 0.9))
    if estimator in UNBIASED:
        assert bias < 1e-12
    else:
        assert 0.03 < bias < 0.35


@pytest.mark.parametrize(
    ("problem", "points", "continuations"),
    [
        (key_and_door(4), [1, 2, 3], 1),
        (key_and_door(4), [2], 3),
        (all_right(3), [1, 2], 1),
        (additive(2), [1], 2),
    ],
)
def test_branches_give_the_true_gradient_and_plain_estimators_of_branches_do_not(
    problem, points, continuations
):
    def bias(estimator):
        groups = BranchedEnumeration(problem, estimator, 2, points, continuations)
        return max(direction([(groups, policy_at(problem, share))]).bias for share in (0.3, 0.9))

    assert bias(BranchBaseline()) < 1e-12
    assert bias(Outcome()) > 0.02


def test_branches_have_no_bias_of_length_where_the_loss_has_none():
    problem = may_stop(3)
    estimator = BranchBaseline(aggregation="token_sum")
    groups = BranchedEnumeration(problem, estimator, 2, [1], aggregation="token_sum")
    assert direction([(groups, policy_at(problem, 0.5))]).bias < 1e-12


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_default_divisor_turns_no_update_away_from_a_rare_success(name):
    problem = key_and_door(4)
    policy = policy_at(problem, 0.1)
    ours, theirs = (
        direction([(Enumeration(problem, estimator, 8), policy)])
        for estimator in (find("advantage", name)(), find("advantage", name)(scale="std"))
    )
    assert ours.cosine > 0.94
    assert ours.cosine > theirs.cosine + 0.1
    assert ours.progress > theirs.progress + 0.1


@pytest.mark.parametrize("turns", [2, 3])
def test_the_sum_over_tokens_has_no_bias_where_the_policy_decides_the_length(turns):
    problem = may_stop(turns)
    estimator = find("advantage", "outcome")(baseline="leave_one_out")
    policy = policy_at(problem, 0.5)
    mean, total = (
        direction([(Enumeration(problem, estimator, 4, aggregation), policy)])
        for aggregation in ("sequence_mean", "token_sum")
    )
    assert mean.bias > 0.05
    assert total.bias < 1e-9


@pytest.mark.parametrize("estimator", [Outcome(), EvidenceCalibrated()])
def test_the_sum_over_tokens_agrees_with_sampled_groups(estimator):
    problem = may_stop(2)
    sampled = analyse(
        problem, estimator, aggregation="token_sum", groups=1500, group_size=3, seed=5
    )
    logits = 0.5 * np.random.default_rng(5).standard_normal(problem.shape)
    exact = direction([(Enumeration(problem, estimator, 3, "token_sum"), logits)], groups=1)
    assert exact.bias == pytest.approx(sampled.bias, abs=4 * sampled.error)
    with pytest.raises(ConfigError, match="expected sequence_mean or token_sum"):
        Enumeration(problem, estimator, 3, "token_mean")


def test_a_policy_along_the_way_has_the_wanted_return_and_too_many_groups_are_refused():
    for problem in (look_up(1, 3), all_right(3)):
        assert true_gradient(problem, policy_at(problem, 0.9))[1] == pytest.approx(
            0.9 * (1.2 if problem.reward.max() == 1.0 and 0.2 in problem.reward else 1.0), rel=0.02
        )
    with pytest.raises(ConfigError, match="expected at most 200000"):
        Enumeration(additive(4), find("advantage", "outcome")(), 8)


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


def test_the_page_has_the_table_of_the_recorded_comparisons():
    assert "\n".join(table()) in (DATA.parents[1] / "README.md").read_text()
