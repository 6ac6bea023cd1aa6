"""The estimators against advantages computed by hand."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.credits import check, episode, group

from gspo_env.credit import (
    CreditConfig,
    Estimator,
    NormalizeThenAccumulate,
    Outcome,
    ReturnsToGo,
    TurnPlusOutcome,
    estimate,
)
from gspo_env.errors import ConfigError
from gspo_env.types import StepInfo, StopReason

UNEQUAL = group(
    episode(1, 2), episode(3), episode(0, 0, 0, stop=StopReason.MAX_TURNS), episode(6, 0)
)


def test_outcome_by_hand():
    # returns 3, 3, 0, 6: mean 3, population variance 18 / 4
    std = np.sqrt(4.5)
    scaled = Outcome(scale="std").advantages(UNEQUAL)
    check(scaled, [0, 0], [0], [-3 / std] * 3, [3 / std] * 2)
    check(
        Outcome(scale="none", baseline="leave_one_out").advantages(UNEQUAL),
        [0, 0],
        [0],
        [-4] * 3,
        [4] * 2,
    )
    scaled = Outcome(scale="std", ddof=1).advantages(UNEQUAL)
    check(scaled, [0, 0], [0], [-3 / 6**0.5] * 3, [3 / 6**0.5] * 2)


def test_returns_to_go_by_hand():
    # returns-to-go: [3, 2], [3], [0, 0, 0], [6, 0]; everything sums to 14 over 8 turns
    rows = ReturnsToGo(scale="none").advantages(UNEQUAL)
    # only one episode reaches turn 3: its baseline is 14 / 5, over the five turns of the others
    check(rows, [0, 2], [0], [-4, -1, -14 / 5], [4, -1])
    squares = (0 + 0 + 9 + 9) + (16 + 4 + 4) / 9 + (14 / 8) ** 2
    scaled = ReturnsToGo(scale="std").advantages(UNEQUAL)
    np.testing.assert_allclose(scaled[0], np.array([0, 2]) / np.sqrt(squares / 8))


@pytest.mark.parametrize("function", [Outcome().advantages, ReturnsToGo().advantages])
def test_errors_and_nothing_to_compare_get_zeros(function):
    check(function(group(episode(1, 2))), [0, 0])
    check(function(group(episode(1, 1), episode(1, 1), episode(1, 1))), [0, 0], [0, 0], [0, 0])
    failed = episode(9, 9, stop=StopReason.ERROR)
    rows = function(group(episode(1), failed, episode(0), episode()))
    check([rows[1], rows[3]], [0, 0], [])
    without = function(group(episode(1), episode(0)))
    check([rows[0], rows[2]], list(without[0]), list(without[1]))


FINITE = st.floats(-5, 5).map(lambda value: round(value, 2))
rewards = st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=3, max_size=6)


@given(rewards=rewards, shift=FINITE, gamma=st.sampled_from([0.5, 1.0]))
def test_shift_of_all_rewards_changes_nothing(rewards, shift, gamma):
    before = group(*(episode(*row) for row in rewards))
    after = group(*(episode(*(r + shift for r in row)) for row in rewards))
    for scale in ("std", "none"):
        for estimator in (Outcome(scale=scale), ReturnsToGo(scale=scale, gamma=gamma)):
            rows = zip(estimator.advantages(before), estimator.advantages(after), strict=True)
            for a, b in rows:
                np.testing.assert_allclose(a, b, atol=1e-8)


def test_estimate_scales_over_the_batch_and_counts():
    groups = [group(episode(2), episode(0)), group(episode(1), episode(1)), UNEQUAL]
    credit = estimate(groups, Outcome(scale="batch"))
    assert Outcome() == Outcome(scale="none")
    values = np.concatenate([v for row in credit.advantages for v in row])
    centred = np.array([1, -1, 0, 0, 0, 0, 0, -3, -3, -3, 3, 3])
    np.testing.assert_allclose(values, centred / centred.std())
    assert credit.metrics() == {
        "rollout/zero_variance_groups": pytest.approx(1 / 3),
        "train/advantage_rms": pytest.approx(np.sqrt(np.mean(values**2))),
        "time/credit": credit.seconds,
        "train/baseline_fallbacks": 0,
        "train/length_biased_groups": 0,
    }
    assert estimate([UNEQUAL], ReturnsToGo()).baseline_fallbacks == 1


@pytest.mark.parametrize(
    ("episodes", "biased"),
    [
        ((episode(1, 0, 2), episode(0.5)), True),
        ((episode(0, 0, 2), episode(0.5)), False),  # no turn but the last pays
        ((episode(1, 2), episode(1, 0)), False),  # equal lengths
        ((episode(1, 0, 2, stop=StopReason.MAX_TURNS), episode(0.5)), False),  # a limit decided
        ((episode(1, 0, 2, stop=StopReason.ERROR), episode(0.5), episode(1)), False),
    ],
)
def test_groups_are_counted_where_a_summed_comparison_fines_or_pays_one_more_turn(episodes, biased):
    groups = [group(*episodes), group(episode(1, 1), episode(0, 0))]
    for estimator in (NormalizeThenAccumulate(), TurnPlusOutcome()):
        assert estimate(groups, estimator).length_biased_groups == (0.5 if biased else 0)
    assert estimate(groups, ReturnsToGo()).length_biased_groups == 0


@dataclass(frozen=True)
class Own(Estimator):
    """Returns what it is given."""

    result: Any

    def advantages(self, group):
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned NoneType"),
        ([], "returned 0 arrays"),
        ([[1.0]], r"returned shape \(1,\) for episode 0"),
        ([[1.0, np.nan]], "expected finite values"),
        ([["a", "b"]], "expected numbers"),
    ],
)
def test_wrong_result_names_the_estimator(result, message):
    with pytest.raises(ConfigError, match=f"Own'.*{message}"):
        estimate([group(episode(1, 1))], Own(result))


def test_an_estimator_of_the_user_may_scale_by_the_batch():
    class Rewards(Estimator):
        def advantages(self, group):
            return [episode.rewards for episode in group.episodes]

        def batch_divisor(self, advantages):
            return advantages.std()

    (rows,) = estimate([group(episode(1.0), episode(3.0))], Rewards()).advantages
    check(rows, [1.0], [3.0])


class Rewards(Estimator):
    def advantages(self, group):
        return [episode.rewards for episode in group.episodes]


def test_statistics_of_the_batch_are_of_what_is_trained():
    """A cut episode, a masked turn and a turn with the environment's own advantages are not."""
    whole, cut = episode(3.0, 1.0), episode(100.0, stop=StopReason.MAX_TURNS)
    infos = StepInfo(token_mask=(False, False)), StepInfo(token_advantages=(0.5, 0.5))
    turns = tuple(replace(whole.turns[0], info=info, reward=100.0) for info in infos)
    own = replace(whole, turns=(*turns, *whole.turns))
    here = [group(whole, own, cut)]
    config = CreditConfig(rms=1.0, train_on_truncated=False)
    (rows,) = estimate(here, Rewards(), config).advantages
    unit = np.sqrt(5)
    check(rows, [3 / unit, 1 / unit], [*[100 / unit] * 2, 3 / unit, 1 / unit], [100 / unit])
    assert estimate(here, Rewards()).rms > 10
    apart = [group(episode(3.0), episode(1.0), cut)]
    (rows,) = estimate(apart, Outcome(scale="batch"), replace(config, rms=0.0)).advantages
    assert rows[0][0] - rows[1][0] == pytest.approx(2.0)
