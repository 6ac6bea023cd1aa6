"""Several rewards, each normalised on its own and then weighted."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.credits import check, episode, group

from gspo_env.credit import ByAgent, Parts, estimate
from gspo_env.credit.estimate import CreditConfig
from gspo_env.errors import ConfigError
from gspo_env.types import ResetInfo, StepInfo, Timing


def rated(*turns, **fields):
    """An episode whose turns have these parts and the reward 0.25."""
    bare = episode(*[0.25] * len(turns), **fields)
    played = [
        replace(turn, info=StepInfo(reward_parts=parts))
        for turn, parts in zip(bare.turns, turns, strict=True)
    ]
    return replace(bare, turns=tuple(played))


def test_two_parts_of_different_units_by_hand():
    """z of [1, 0] and of [0, 10] are [1, -1] and [-1, 1], whatever the units."""
    played = group(rated({"a": 1.0, "b": 0.0}), rated({"a": 0.0, "b": 10.0}))
    weights = {"a": 1.0, "b": 0.5}
    check(Parts(weights=weights, estimator="outcome").advantages(played), [0.5], [-0.5])
    plain = Parts(weights=weights, estimator="outcome", normalize=False)
    # 1 * [0.5, -0.5] + 0.5 * [-5, 5]
    check(plain.advantages(played), [-2.0], [2.0])


def test_it_is_the_aggregation_of_trl():
    """TRL 1.16: (r - mean) / (std + 1e-4) of each reward, with ddof 1, weighted and added."""
    rewards = np.random.default_rng(0).standard_normal((8, 3)) * [1, 10, 100]
    weights = {"a": 1.0, "b": 0.5, "c": -2.0}
    played = group(*(rated(dict(zip(weights, row, strict=True))) for row in rewards))
    z = (rewards - rewards.mean(0)) / (rewards.std(0, ddof=1) + 1e-4)
    own = Parts(weights=weights, estimator="outcome", ddof=1).advantages(played)
    np.testing.assert_allclose(np.concatenate(own), z @ [1.0, 0.5, -2.0], rtol=3e-4)


def test_parts_of_turns_are_credited_from_their_turn_on_and_those_of_an_episode_from_the_first():
    first = rated({"hop": 1.0}, {"hop": 0.0, "answer": 1.0})
    second = rated({"hop": 0.0}, {"hop": 0.0, "answer": 0.0})
    # returns-to-go: hop [1, 0] and [0, 0] less the other's; answer [1, 1] and [0, 0]
    own = Parts(weights={"hop": 1.0, "answer": 1.0}, normalize=False)
    check(own.advantages(group(first, second)), [2.0, 1.0], [-2.0, -1.0])


def test_an_episode_without_a_part_is_not_compared_by_it_and_equal_parts_add_nothing():
    played = group(
        rated({"a": 1.0, "same": 3.0}), rated({"a": 0.0, "same": 3.0}), rated({"same": 3.0})
    )
    own = Parts(weights={"a": 1.0, "same": 5.0}, estimator="outcome")
    check(own.advantages(played), [1.0], [-1.0], [0.0])
    assert own.teaches(played)
    assert not own.teaches(group(rated({"same": 1.0}), rated({"same": 1.0})))
    # a single episode with a part has nothing to be compared with
    check(own.advantages(group(rated({"a": 1.0}), rated({}))), [0.0], [0.0])


def test_tokens_calls_and_seconds_are_measured_and_a_weight_below_0_makes_them_penalties():
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    short, long = episode(0.0), episode(0.0)
    (turn,) = long.turns
    turn = replace(turn, action_ids=(0,) * 6, logprobs=(0.0,) * 6, text=call * 2)
    long = replace(long, turns=(replace(turn, timing=Timing(generate=2.0, step=1.0)),))
    for name, amount in (("tokens", 4.0), ("calls", 2.0), ("seconds", 3.0)):
        own = Parts(weights={name: -0.5}, estimator="outcome", normalize=False)
        check(own.advantages(group(short, long)), [amount / 4], [-amount / 4])
        assert long.outcome == 0.0


def test_the_reward_of_the_score_is_a_part():
    played = group(
        replace(rated({"a": 1.0}), ending=replace(rated({}).ending, outcome=4.0)), rated({"a": 0.0})
    )
    own = Parts(weights={"reward": 1.0, "a": 1.0}, normalize=False)
    check(own.advantages(replace(played, score="turns")), [1.0], [-1.0])
    check(own.advantages(replace(played, score="outcome")), [4.75], [-4.75])
    assert own.uses_score
    assert not Parts(weights={"a": 1.0}).uses_score
    assert not Parts(weights={"reward": 1.0}, estimator="outcome").uses_score


@given(
    values=st.lists(st.integers(-3, 3), min_size=3, max_size=6),
    unit=st.sampled_from([1e-3, 7.0, 1e4]),
    estimator=st.sampled_from(["outcome", "returns_to_go", "gigpo", "normalize_then_accumulate"]),
)
def test_the_unit_of_a_part_changes_nothing(values, unit, estimator):
    def credit(scale):
        played = [
            rated({"a": scale * value, "b": float(n)}, {"a": scale * ((value + n) % 2)})
            for n, value in enumerate(values)
        ]
        own = Parts(weights={"a": 1.0, "b": 0.3}, estimator=estimator)
        return np.concatenate(own.advantages(group(*played)))

    np.testing.assert_allclose(credit(unit), credit(1), atol=1e-9)


def test_the_metrics_have_each_measured_part_and_the_credit_of_each(caplog):
    played = group(rated({"a": 1.0}, {}), rated({"a": 0.0}))
    own = Parts(weights={"a": 2.0, "tokens": -1.0, "unheard": 1.0}, estimator="outcome")
    with caplog.at_level(logging.WARNING):
        credit = estimate([played], own, CreditConfig(score="turns"))
        estimate([played], own, CreditConfig(score="turns"))
    metrics = credit.metrics()
    assert metrics["rollout/reward/tokens"] == 3.0  # four and two
    assert metrics["train/part_credit/a"] == 2.0
    assert metrics["train/part_credit/unheard"] == 0.0
    assert "rollout/reward/a" not in metrics  # the rollout has it
    assert caplog.text.count("names the part 'unheard', which no episode of a step has") == 1
    # the standard deviation of the batch divides the sum: its root mean square is about 1
    assert credit.rms == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": {"a": "much"}}, "weights has a='much'; expected finite numbers"),
        ({"weights": {"a": float("nan")}}, "weights has a=nan"),
        ({"estimator": "distillation"}, "estimator is 'distillation'; expected the name of a"),
        ({"estimator": "parts"}, "estimator is 'parts'; expected the name of a"),
        ({"estimator": "by_agent"}, "estimator is 'by_agent'; expected the name of a"),
        ({"scale": "std"}, "scale is 'std'"),
    ],
)
def test_an_impossible_value_is_named(values, message):
    with pytest.raises(ConfigError, match=message):
        Parts(**values)


def test_a_run_without_a_weight_is_refused():
    with pytest.raises(ConfigError, match=r"weights is \{\}; expected a weight other than 0"):
        Parts().check()
    with pytest.raises(ConfigError, match="expected a weight other than 0"):
        Parts(weights={"a": 0}).advantages(group(rated({"a": 1.0}), rated({"a": 0.0})))


def game(*agents, key=None, **rewards):
    """An episode with a turn for each agent, whose last turn pays each agent its own."""
    bare = rated(*[{}] * (len(agents) - 1), rewards, keys=[key] * len(agents))
    following = [*agents[1:], None]
    turns = [
        replace(turn, info=replace(turn.info, agent=agent))
        for turn, agent in zip(bare.turns, following, strict=True)
    ]
    return replace(bare, turns=tuple(turns), reset=ResetInfo(agent=agents[0]))


def test_each_turn_has_the_credit_of_its_agent():
    played = group(game("x", "y", x=1.0, y=-1.0), game("x", "y", x=0.0, y=0.0))
    check(ByAgent().advantages(played), [0.5, -0.5], [-0.5, 0.5])
    check(ByAgent(weights={"y": 0.0, "x": 2}).advantages(played), [1.0, 0.0], [-1.0, 0.0])
    check(ByAgent(scale="std").advantages(played), [1.0, -1.0], [-1.0, 1.0])
    # a game that was cut pays nobody; equal rewards teach nothing
    check(ByAgent(missing=-1.0).advantages(group(game("x", x=1.0), game("x"))), [1.0], [-1.0])
    assert not ByAgent().teaches(group(game("x", x=1.0), game("x", x=1.0)))
    # an agent is compared with itself in the same state only
    apart = group(game("x", key="a", x=1.0), game("x", key="b", x=0.0), game("x", key="b", x=2.0))
    check(ByAgent().advantages(apart), [0.0], [-1.0], [1.0])
    with pytest.raises(ConfigError, match="weights has x='a lot'; expected finite numbers"):
        ByAgent(weights={"x": "a lot"})
