"""The table of losses: exact where the mathematics says so, and equal to the other enumeration."""

from dataclasses import dataclass

import numpy as np
import pytest

from gspo_env.credit import Estimator, Outcome, ReturnsToGo
from gspo_env.learner import GSPO
from studies.credit.enumeration import Enumeration, direction
from studies.credit.exact import all_right
from studies.credit.losses_exact import CASES, PROBLEMS, AllGroups, Centred, logits_of, losses

SIZE = 3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_exact_importance_weights_have_no_bias_in_any_case(problem, case):
    groups = AllGroups(problem, Outcome(baseline="leave_one_out"), SIZE)
    logits = logits_of(problem, case, seed=1)
    assert groups.direction(losses()["exact importance weights"], *logits).bias < 1e-12
    if case == "moved":
        assert groups.direction(losses()["gspo"], *logits).bias > 0.01


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_the_groups_of_actions_agree_with_the_groups_of_kinds(problem):
    logits = logits_of(problem, "on policy", seed=1)
    ours = AllGroups(problem, ReturnsToGo(), SIZE).direction(GSPO(), *logits)
    theirs = direction([(Enumeration(problem, ReturnsToGo(), SIZE), logits[0])], groups=16)
    assert (ours.bias, ours.progress) == pytest.approx((theirs.bias, theirs.progress), abs=1e-9)


@dataclass(frozen=True)
class Alike(Estimator):
    """Credit that says nothing: every turn has the advantage 1."""

    def advantages(self, group):
        return [np.ones(len(e.turns)) for e in group.episodes]


@pytest.mark.parametrize("centred", [Centred(), Centred(cap=1.2)])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_with_centred_scores_the_noise_of_an_engine_moves_no_policy_without_credit(
    problem, centred
):
    groups, logits = AllGroups(problem, Alike(), 2), logits_of(problem, "engine", seed=1)
    means = []
    for loss in (centred, losses()["dr_grpo"]):
        chance_M, updates_MD = groups.updates(loss, *logits)
        means.append(np.linalg.norm(chance_M @ updates_MD))
    assert means[0] < 1e-12 < 1e-6 < means[1]


def test_the_mean_of_the_group_as_a_divisor_has_no_bias_for_outcomes_of_0_and_1():
    problem = all_right(2)
    logits = logits_of(problem, "on policy", seed=1)
    assert AllGroups(problem, Outcome(scale="mean"), SIZE).direction(GSPO(), *logits).bias < 1e-12
    assert AllGroups(problem, Outcome(scale="std"), SIZE).direction(GSPO(), *logits).bias < 1e-12
