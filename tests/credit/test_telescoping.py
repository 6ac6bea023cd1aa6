"""Credit of turns adds up to credit of the episode, for every estimator.

FACTOR (arXiv 2608.07118) asks that the credits of an episode's actions telescope to the advantage
of the trajectory: with A_k = r_k + V_(k+1) - V_k and V = 0 at the end, the sum over k is R - V_1.
Our estimators give sums of such residuals from turn k on, so a residual is A_k - w A_(k+1).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_env.credit import (
    GiGPO,
    GroupGAE,
    NormalizeThenAccumulate,
    Outcome,
    ReturnsToGo,
    TurnPlusOutcome,
)
from gspo_env.credit.branches import BranchBaseline
from gspo_env.types import Group, Task, bare_episode

TASK = Task(env_id="test", seed=0)
REWARD = st.integers(-8, 8).map(lambda n: n / 4)


def groups():
    """Groups of 3 to 6 episodes of 1 to 5 turns each, all as long."""
    shape = st.tuples(st.integers(3, 6), st.integers(1, 5))
    return shape.flatmap(
        lambda s: st.lists(
            st.lists(REWARD, min_size=s[1], max_size=s[1]), min_size=s[0], max_size=s[0]
        )
    )


def residuals(advantages, weight):
    """What each turn adds: A_k - weight * A_(k+1)."""
    return [row - weight * np.append(row[1:], 0.0) for row in advantages]


def others(rewards):
    """Each episode's return, minus the mean return of the others."""
    totals = np.sum(rewards, axis=1)
    return totals - (totals.sum() - totals) / (len(totals) - 1)


def centred(rewards):
    """Each episode's return, minus the mean return of the group."""
    totals = np.sum(rewards, axis=1)
    return totals - totals.mean()


CASES = {
    "outcome": (Outcome(), 1.0, centred),
    "leave one out": (Outcome(baseline="leave_one_out"), 1.0, others),
    "returns_to_go": (ReturnsToGo(), 1.0, others),
    "branch_baseline": (BranchBaseline(), 1.0, others),
    "td": (GroupGAE(lam=0.0), 0.0, others),
    "group_gae": (GroupGAE(lam=0.7), 0.7, others),
    "whole returns": (GroupGAE(lam=1.0), 1.0, others),
    "normalize_then_accumulate": (NormalizeThenAccumulate(per="turn"), 1.0, centred),
    "over all turns": (NormalizeThenAccumulate(), 1.0, centred),
    "turn_plus_outcome": (TurnPlusOutcome(), 0.0, None),
    "gigpo": (GiGPO(), 1.0, lambda rewards: 2 * centred(rewards)),
}


@pytest.mark.parametrize("name", sorted(CASES))
@given(rewards=groups())
@settings(max_examples=60, deadline=None)
def test_the_residuals_of_an_episode_add_up_to_its_advantage(name, rewards):
    estimator, weight, wanted = CASES[name]
    keys = [str(k) for k in range(len(rewards[0]))]
    episodes = tuple(bare_episode(TASK, [1] * len(row), row, keys) for row in rewards)
    advantages = estimator.advantages(Group(task=TASK, episodes=episodes))
    sums = [row.sum() for row in residuals(advantages, weight)]
    if wanted is None:  # the outcome in each turn, and the turn's own reward once
        np.testing.assert_allclose(sums, (len(rewards[0]) + 1) * centred(rewards), atol=1e-9)
    else:
        np.testing.assert_allclose(sums, wanted(rewards), atol=1e-9)
