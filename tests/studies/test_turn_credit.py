"""Published ways to credit turns: their equations by hand, and what the table says of them."""

import math

import numpy as np
import pytest

from gspo_env.batch.padded import bare_episode
from gspo_env.credit import GiGPO, Outcome
from gspo_env.types import Group, Task
from studies.credit.evidence import EvidenceCalibrated
from studies.credit.exact import key_and_door
from studies.credit.losses_exact import PROBLEMS
from studies.credit.turn_credit import (
    JudgedTurns,
    ReverseTurns,
    VerifierCredit,
    best_actions,
    measure,
)

TASK = Task(env_id="tabular", seed=0)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_siblings_from_each_turn_have_no_bias_and_more_noise(problem):
    bias, progress = measure(ReverseTurns(problem, Outcome(), 1))
    assert bias < 1e-12
    assert progress < 0.94


def test_scores_become_gains_keeps_losses_and_what_followed():
    rewards = [[0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, -0.5], [0.0, 0.5, 0.0, 0.0]]
    group = Group(task=TASK, episodes=tuple(bare_episode(TASK, [1] * 4, r) for r in rewards))
    rows = np.array(VerifierCredit(scale="none").advantages(group))
    # turn 0: a gain of 1/2; without one, 1 and 1/2 follow. Turn 1: nothing, nothing, 1/2; 1 and 1
    # follow. Turn 2: 1/2, 1, nothing without peers. Turn 3: keeps, loses 1/2, nothing.
    credit = np.array([[0.5, 0.0, 0.5, 1.0], [0.5, 0.0, 1.0, -0.5], [-0.5, 0.5, 0.0, 0.0]])
    np.testing.assert_allclose(rows, credit - credit.mean(0))


def test_a_judge_moves_credit_and_keeps_its_sum():
    states, texts = ["0", "2"], ["0.0 2", "1.0 -1"]
    right = bare_episode(TASK, [1, 1], [0.0, 1.0], states, texts)
    half = bare_episode(TASK, [1, 1], [0.0, 0.0], states, ["0.0 2", "0.0 -1"])
    estimator = JudgedTurns(best=best_actions(key_and_door(2)), scale="none")
    rows = estimator.advantages(Group(task=TASK, episodes=(right, half)))
    np.testing.assert_allclose(rows, [[1.0, 1.0], [0.0, -2.0]])  # 1 and -1 for whole episodes


def group_of(episodes):
    """A group of episodes of (reward, state, action) triples."""
    made = [
        bare_episode(TASK, [2] * len(turns), *map(list, zip(*turns, strict=True)))
        for turns in episodes
    ]
    return Group(task=TASK, episodes=tuple(made))


def test_evidence_calibrated_credit_by_hand():
    rows = EvidenceCalibrated().advantages(group_of([[(1.0, "s", "a")], *[[(0.0, "s", "b")]] * 2]))
    assert rows[0] == pytest.approx([2 / 3 + math.tanh(3) * (5 / 9 - 8 / 27)])


def test_one_action_a_turn_and_no_shrinkage_is_gigpo_where_there_is_evidence():
    episodes = [[(r, "s", name)] for r, name in ((1.0, "a"), (0.0, "b"), (3.0, "c"))]
    ours = EvidenceCalibrated(shrinkage=0.0, patience=1e-3).advantages(group_of(episodes))
    np.testing.assert_allclose(ours, GiGPO().advantages(group_of(episodes)), atol=1e-12)
