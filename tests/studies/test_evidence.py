"""Shrunk credit by state and action, against its equations and a calculation in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_env.credit import GiGPO
from gspo_env.errors import ConfigError
from gspo_env.types import Group, Task, bare_episode
from studies.credit.evidence import EvidenceCalibrated

TASK = Task(env_id="test", seed=0)
EPISODES = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.sampled_from("st"), st.sampled_from("uv")
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=2,
    max_size=5,
)


def group(episodes):
    """A group of episodes of (reward, state, action) triples."""
    made = [
        bare_episode(TASK, [2] * len(turns), *map(list, zip(*turns, strict=True)))
        for turns in episodes
    ]
    return Group(task=TASK, episodes=tuple(made))


def reference(episodes, kappa, tau, omega):
    """The equations of the docstring, unscaled, written as loops."""
    totals = [sum(r for r, _, _ in turns) for turns in episodes]
    to_go = [[sum(r for r, _, _ in turns[k:]) for k in range(len(turns))] for turns in episodes]
    flat = [
        (g, s, u) for t, row in zip(episodes, to_go, strict=True)
        for g, (_, s, u) in zip(row, t, strict=True)
    ]  # fmt: skip
    rows = []
    for turns, total in zip(episodes, totals, strict=True):
        row = []
        for _, state, action in turns:
            here = [(g, u) for g, s, u in flat if s == state]
            n, mu_s = len(here), sum(g for g, _ in here) / len(here)
            by = {u: [g for g, v in here if v == u] for u in {v for _, v in here}}
            mean = {u: sum(gs) / len(gs) for u, gs in by.items()}
            mu = {u: (len(gs) * mean[u] + kappa * mu_s) / (len(gs) + kappa) for u, gs in by.items()}
            between = sum(len(gs) * (mean[u] - mu_s) ** 2 for u, gs in by.items()) / n
            within = sum((g - mean[u]) ** 2 for g, u in here) / n
            trust = math.tanh(n / tau) * between / (between + within) if between + within else 0.0
            centre = sum(mu[u] for _, u in here) / n
            row.append(total - sum(totals) / len(totals) + omega * trust * (mu[action] - centre))
        rows.append(row)
    return rows


@given(EPISODES, st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.5, 4.0]))
def test_it_is_the_equations(episodes, kappa, tau):
    estimator = EvidenceCalibrated(shrinkage=kappa, patience=tau, step_weight=0.7)
    wanted = reference(episodes, kappa, tau, 0.7)
    for ours, theirs in zip(estimator.advantages(group(episodes)), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_the_example_of_the_docstring():
    rows = EvidenceCalibrated().advantages(group([[(1.0, "s", "a")], *[[(0.0, "s", "b")]] * 2]))
    assert rows[0] == pytest.approx([2 / 3 + math.tanh(3) * (5 / 9 - 8 / 27)])


def test_one_action_a_turn_and_no_shrinkage_is_gigpo_where_there_is_evidence():
    episodes = [[(r, "s", name)] for r, name in ((1.0, "a"), (0.0, "b"), (3.0, "c"))]
    ours = EvidenceCalibrated(shrinkage=0.0, patience=1e-3).advantages(group(episodes))
    np.testing.assert_allclose(ours, GiGPO().advantages(group(episodes)), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "value"), [("shrinkage", -1.0), ("patience", 0.0), ("gamma", 2.0)]
)
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is"):
        EvidenceCalibrated(**{name: value})
