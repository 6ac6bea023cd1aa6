"""The exact study of imitation: its term is that of training, and what the docs say of it."""

import asyncio
import itertools

import numpy as np
import pytest
from support.turns import episode, turn

from gspo_env.training.interleaved import Interleaved
from gspo_env.types import Group
from studies.credit.exact import TASK, additive, probabilities
from studies.credit.imitation_exact import (
    SHOWN,
    Ways,
    imitated,
    learner_of,
    policy_with,
    sequence_of,
    three_ways,
)


@pytest.fixture(scope="module")
def ways():
    return Ways()


def test_the_imitated_gradient_of_a_uniform_policy_is_one_hot_less_a_quarter_over_two_tokens():
    gradient = imitated(three_ways(), np.zeros((5, 1, 4)), [SHOWN["worse expert"]], 0.4)
    expected = np.zeros((5, 4))
    expected[0] = 0.2 * (np.array([0, 0, 1, 0]) - 0.25)
    expected[3] = 0.2 * (np.array([1, 0, 0, 0]) - 0.25)
    np.testing.assert_allclose(gradient, expected.ravel(), atol=1e-15)


@pytest.mark.parametrize("problem", [three_ways(), additive(2)], ids=["one token", "two tokens"])
def test_the_imitated_gradient_is_the_slope_of_the_weighted_mean_log_probability(problem):
    logits = np.random.default_rng(1).standard_normal(problem.shape)
    walks = [[(0, 0), (1, 0)], [(0, 0), (1, 3)]]

    def term(table):
        log_token, _ = probabilities(problem, table.reshape(problem.shape))
        places = [(s, *p) for walk in walks for s, a in walk for p in problem.path(a)]
        return 0.3 * np.mean([log_token[place] for place in places])

    steps = 1e-6 * np.eye(logits.size)
    slope = [(term(logits.ravel() + d) - term(logits.ravel() - d)) / 2e-6 for d in steps]
    np.testing.assert_allclose(imitated(problem, logits, walks, 0.3), slope, atol=1e-9)


def test_what_is_kept_of_a_group_is_what_training_keeps_over_all_orders_of_its_episodes(ways):
    """Every order of one group of each kind: four walks of which two, one or none succeed."""
    problem = ways.problem
    success = [walk for walk, reward in zip(ways.walks, ways.reward_W, strict=True) if reward > 0]
    failures = [walk for walk in ways.walks if walk not in success]
    learner = learner_of(5, 4, 0.1)
    for walks in ([*success[1:3], *failures[:2]], [success[0], *failures[:3]], failures[:4]):
        counts = np.zeros(len(ways.walks))
        for order in itertools.permutations(walks):
            played = []
            for walk in order:
                turns = [
                    turn(prompt_ids=(4 + s,), action_ids=(a,), logprobs=(0.0,)) for s, a in walk
                ]
                played.append(episode(*turns, outcome=sum(problem.reward[pair] for pair in walk)))
            imitation = Interleaved(learner.config, learner)
            asyncio.run(imitation.prepare([Group(task=TASK, episodes=tuple(played))], None))
            for kept in imitation.state()["kept"]:
                ids = [token for sequence in kept for token in sequence[0]]
                counts += [ids == sequence_of(problem, walk)[0] for walk in ways.walks]
        members = sorted(ways.walks.index(walk) for walk in walks)
        (place,) = np.flatnonzero((ways.groups_MG == members).all(1))
        np.testing.assert_allclose(ways.first_MW[place], counts / 24)


def test_kept_episodes_of_the_same_policy_are_the_gradient_of_the_log_of_its_success(ways):
    logits = policy_with(0.3) + 0.5 * np.random.default_rng(2).standard_normal((5, 1, 4))
    kept_W = ways.kept(logits) / ways.kept(logits).sum()
    shown = ways.imitates("kept", logits, 1.0, kept_W)
    mean = sum(share * gradient for share, gradient in shown)

    def log_success(table):
        chance = probabilities(ways.problem, table.reshape(logits.shape))[1]
        return np.log(chance[0, :3] @ chance[1:4, 0])

    steps = 1e-6 * np.eye(logits.size)
    flat = logits.ravel()
    slope = [(log_success(flat + d) - log_success(flat - d)) / 2e-6 for d in steps]
    np.testing.assert_allclose(mean, np.array(slope) / 2, atol=1e-9)  # two tokens


def test_imitation_helps_flat_groups_and_a_worse_expert_or_a_large_weight_holds_back(ways):
    low, high = policy_with(0.02), policy_with(0.95)
    assert ways.flat(low) > 0.9 > 0.2 > ways.flat(high)
    gain = {
        (name, term): ways.change(term, policy, 0.1)
        for name, policy in {"low": low, "high": high}.items()
        for term in ("none", *SHOWN, "kept")
    }
    for term in (*SHOWN, "kept"):
        assert gain["low", term][0] > 5 * gain["low", "none"][0] > 0
    assert gain["high", "worse expert"][0] < gain["high", "none"][0] < gain["high", "expert"][0]
    assert gain["high", "kept"][0] == pytest.approx(gain["high", "none"][0], rel=0.03)
    assert ways.change("worse expert", high, 1.0)[0] < 0
    for name in ("low", "high"):  # kept episodes narrow the ways
        assert gain[name, "kept"][2] < gain[name, "none"][2]


def test_a_training_from_rare_success_needs_the_term_and_a_large_weight_of_kept_settles_on_less(
    ways,
):
    low = policy_with(0.02)

    def end(term, weight):
        return ways.figures(ways.train(term, low, weight))[0]

    alone, best, worse = end("none", 0.0), end("expert", 0.1), end("worse expert", 0.1)
    kept, much = end("kept", 0.1), end("kept", 1.0)
    assert alone[0] < 0.2 < 0.45 < worse[0] < 0.5 < kept[0] < 0.9 < best[0]
    assert worse[1] > 0.99  # all successes are the worse way
    assert much[0] < kept[0]
    assert much[1] > 0.8 > kept[1]
