"""Shrunk credit by state and action: an example by hand, and where it is GiGPO."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gspo_env.credit import GiGPO
from gspo_env.types import Group, Task, bare_episode
from studies.credit.evidence import EvidenceCalibrated

TASK = Task(env_id="test", seed=0)


def group(episodes):
    """A group of episodes of (reward, state, action) triples."""
    made = [
        bare_episode(TASK, [2] * len(turns), *map(list, zip(*turns, strict=True)))
        for turns in episodes
    ]
    return Group(task=TASK, episodes=tuple(made))


def test_the_example_of_the_docstring():
    rows = EvidenceCalibrated().advantages(group([[(1.0, "s", "a")], *[[(0.0, "s", "b")]] * 2]))
    assert rows[0] == pytest.approx([2 / 3 + math.tanh(3) * (5 / 9 - 8 / 27)])


def test_one_action_a_turn_and_no_shrinkage_is_gigpo_where_there_is_evidence():
    episodes = [[(r, "s", name)] for r, name in ((1.0, "a"), (0.0, "b"), (3.0, "c"))]
    ours = EvidenceCalibrated(shrinkage=0.0, patience=1e-3).advantages(group(episodes))
    np.testing.assert_allclose(ours, GiGPO().advantages(group(episodes)), atol=1e-12)
