"""The estimators other than `outcome` and `returns_to_go`, against numbers computed by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.credits import check, episode, group

from gspo_env.batch.padded import bare_episode
from gspo_env.credit import (
    CreditConfig,
    Estimator,
    GiGPO,
    GroupGAE,
    NormalizeThenAccumulate,
    Outcome,
    ReturnsToGo,
    TurnPlusOutcome,
    estimate,
)
from gspo_env.registry import find
from gspo_env.types import Group, StopReason, Task


def test_turn_plus_outcome_adds_the_outcome_to_each_turns_own_reward():
    rows = TurnPlusOutcome(scale="none").advantages(
        group(episode(0, 1, outcome=1), episode(0, 0, outcome=0), episode(0, 0, outcome=0))
    )
    check(rows, [2 / 3, 4 / 3], [-1 / 3, -2 / 3], [-1 / 3, -2 / 3])


def test_turn_plus_outcome_falls_back_to_the_group_where_few_reach_a_turn():
    rows = TurnPlusOutcome(scale="none").advantages(
        group(episode(0, 3, outcome=0), episode(0, outcome=0), episode(0, outcome=0))
    )
    check(rows, [0, 3], [0], [0])  # the mean of the other episodes over all their turns is 0


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [((1, 0, 0, 0), (3, -1, -1, -1)), ((1, 1, 0, 0), (1, 1, -1, -1)), ((0, 0), (0, 0))],
)
def test_divided_by_the_mean_outcome_rare_successes_count_more(outcomes, expected):
    rows = Outcome(scale="mean").advantages(group(*(episode(0, outcome=o) for o in outcomes)))
    check(rows, *([value] for value in expected))
    negative = group(*(episode(0, outcome=-o) for o in outcomes))
    check(Outcome(scale="mean").advantages(negative), *([0] for _ in expected))


def test_gigpo_meets_a_state_again_at_other_turns_and_ignores_lonely_ones():
    first = episode(0, 1, keys=["a", "b"])
    second = episode(0, 0, keys=["b", "c"])
    # returns 1 and 0; state b: returns-to-go 1 (turn 2) and 0 (turn 1); a and c were visited once
    check(GiGPO(scale="none").advantages(group(first, second)), [0.5, 1.0], [-1.0, -0.5])
    check(
        GiGPO(scale="none", step_weight=0).advantages(group(first, second)),
        [0.5, 0.5],
        [-0.5, -0.5],
    )


def test_normalize_then_accumulate_by_group():
    rows = NormalizeThenAccumulate(scale="none").advantages(group(episode(1, 0), episode(0, 0)))
    check(rows, [0.5, -0.25], [-0.5, -0.25])
    half = NormalizeThenAccumulate(scale="none", gamma=0.5).advantages(
        group(episode(1, 0), episode(0, 0))
    )
    check(half, [0.75 - 0.125, -0.25], [-0.25 - 0.125, -0.25])


def test_normalize_then_accumulate_by_turn_with_the_root_of_the_terms():
    three = group(episode(3, 0), episode(0, 3), episode(0, 0))
    plain = NormalizeThenAccumulate(per="turn", scale="none").advantages(three)
    check(plain, [1, -1], [1, 2], [-2, -1])
    rooted = NormalizeThenAccumulate(per="turn", scale="none", root=True).advantages(three)
    check(rooted, [1 / np.sqrt(2), -1], [1 / np.sqrt(2), 2], [-2 / np.sqrt(2), -1])


def test_group_gae_with_lambda_zero_is_the_difference_of_values():
    three = group(episode(1, 0), episode(0, 1), episode(0, 0))
    # returns-to-go [1, 0], [1, 1], [0, 0]; leave-one-out values [1/2, 1/2], [1/2, 0], [1, 1/2]
    check(
        GroupGAE(lam=0.0, scale="none").advantages(three),
        [1 + 1 / 2 - 1 / 2, 0 - 1 / 2],
        [0 + 0 - 1 / 2, 1 - 0],
        [0 + 1 / 2 - 1, 0 - 1 / 2],
    )


def test_group_gae_takes_values_from_equal_states():
    rows = GroupGAE(lam=1.0, scale="none").advantages(
        group(
            episode(0, 1, keys=["s", "x"]),
            episode(0, 0, keys=["s", "y"]),
            episode(0, 1, keys=["s", "x"]),
            episode(0, 4, keys=["s", "x"]),
        )
    )
    # three episodes visited x: values are the mean of the other two; y: the others at turn 2
    check(rows, [1 - 5 / 3, 1 - 2.5], [0 - 2, 0 - 2], [1 - 5 / 3, 1 - 2.5], [4 - 2 / 3, 4 - 1])


def test_group_gae_goes_on_after_truncation_with_what_the_others_got():
    done = (episode(0, 1), episode(0, 3), episode(0, 2))
    rows = GroupGAE(lam=1.0, scale="none").advantages(
        group(*done, episode(0, stop=StopReason.TRUNCATED))
    )
    # the truncated episode has no second turn, which gave the others 2 on average
    np.testing.assert_allclose(rows[3], [0 + 2 - 2])
    known = group(
        episode(0, 1, keys=["s", "x"]),
        episode(0, 3, keys=["s", "y"]),
        episode(0, keys=["s"], stop=StopReason.TRUNCATED, last_key="y"),
    )
    np.testing.assert_allclose(GroupGAE(lam=1.0, scale="none").advantages(known)[2], [0 + 3 - 2])


def test_advantages_are_scaled_to_the_wanted_root_mean_square():
    here = [group(episode(1, 0), episode(0, 5), episode(0, 0)), group(episode(7), episode(1))]
    credit = estimate(here, Outcome(scale="none"), CreditConfig(rms=0.5))
    flat = np.concatenate([row for part in credit.advantages for row in part])
    assert np.sqrt((flat**2).mean()) == pytest.approx(0.5)
    assert credit.rms == pytest.approx(0.5)


def test_an_estimator_may_give_one_advantage_for_each_token(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import numpy as np\n"
        "from gspo_env.credit import Estimator\n"
        "@dataclass(frozen=True)\n"
        "class ByToken(Estimator):\n"
        "    def advantages(self, group):\n"
        "        return [np.arange(e.model_tokens) / 10 for e in group.episodes]\n"
    )
    estimator = find("advantage", f"{tmp_path / 'mine.py'}:ByToken")()
    rows = estimate([group(episode(1, 0), episode(0))], estimator).advantages
    check(rows[0], [0.0, 0.1, 0.2, 0.3], [0.0, 0.1])


PAIRS = [
    ReturnsToGo(),
    ReturnsToGo(gamma=0.5, scale="std"),
    GroupGAE(),
    GroupGAE(lam=0.3, scale="std"),
    TurnPlusOutcome(),
    NormalizeThenAccumulate(per="turn"),
]


@pytest.mark.parametrize("estimator", PAIRS, ids=repr)
@pytest.mark.parametrize("rewards", [(1, 1, 1, 1), (0, 0, 2), (5,), (-1, 3, 0, 0, 0, 1)], ids=str)
def test_two_equal_episodes_have_no_advantage_and_count_as_without_variance(estimator, rewards):
    pair = group(episode(*rewards, keys="stuvwx"[: len(rewards)]), episode(*rewards))
    credit = estimate([pair], estimator)
    check(credit.advantages[0], [0] * len(rewards), [0] * len(rewards))
    assert credit.zero_variance_groups == 1.0
    assert credit.baseline_fallbacks == 0


@pytest.mark.parametrize("size", [1e3, 1e8, 1e12, 1e15])
@pytest.mark.parametrize(
    "name", ["outcome", "returns_to_go", "group_gae", "normalize_then_accumulate"]
)
@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_of_any_size_teach_nothing_and_the_smallest_difference_does(
    name, size, scale
):
    estimator = find("advantage", name)(scale=scale)
    for count in (3, 5, 7):
        equal = group(*[episode(size / 3, size / 3) for _ in range(count)])
        assert not estimator.teaches(equal)
        assert not np.any(np.concatenate(estimator.advantages(equal)))
    other = [episode(size / 3 + size * 1e-6, size / 3), episode(size / 3, size / 3)]
    assert estimator.teaches(group(*other, *equal.episodes))


class Rewards(Estimator):
    """REINFORCE: it compares nothing."""

    def advantages(self, group):
        return [e.rewards for e in group.episodes]


def test_the_only_episode_that_did_not_fail_is_trained_on_where_nothing_is_compared():
    left = group(episode(2, 1), episode(9, stop=StopReason.ERROR))
    check(estimate([left], Rewards()).advantages[0], [2, 1], [0])
    check(estimate([left], Outcome()).advantages[0], [0, 0], [0])


def test_the_only_other_episode_is_the_baseline_also_where_a_third_one_failed():
    rows = [episode(1, 1, 0), episode(0, 1)]
    # returns-to-go [2, 1, 0] and [1, 1]; turn 3 falls back to the mean of the other's turns
    check(ReturnsToGo().advantages(group(*rows)), [1, 0, -1], [-1, 0])
    failed = episode(9, stop=StopReason.ERROR)
    check(ReturnsToGo().advantages(group(*rows, failed)), [1, 0, -1], [-1, 0], [0])
    check(GroupGAE(lam=1).advantages(group(*rows)), [1, 0, -1], [-1, 0])
    visited = [episode(1, 0, keys=["s", None]), episode(0, 0, keys=[None, "s"])]
    check(GroupGAE(lam=0).advantages(group(*visited)), [1, 0], [0, -1])


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


# FACTOR (arXiv 2608.07118) asks that the credits of an episode's actions telescope to the advantage
# of the trajectory: with A_k = r_k + V_(k+1) - V_k and V = 0 at the end, the sum over k is R - V_1.
# Our estimators give sums of such residuals from turn k on, so a residual is A_k - w A_(k+1).
CASES = {
    "outcome": (Outcome(), 1.0, centred),
    "leave one out": (Outcome(baseline="leave_one_out"), 1.0, others),
    "returns_to_go": (ReturnsToGo(), 1.0, others),
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
