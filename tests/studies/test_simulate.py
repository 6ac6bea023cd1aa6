"""The simulator of `studies/simulate.py` against what queueing theory gives exactly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FOLDER = Path(__file__).parents[2] / "studies"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def queueing():
    yield load("queueing")
    sys.modules.pop("queueing")


@pytest.fixture(scope="module")
def program(queueing):
    yield load("simulate")
    sys.modules.pop("simulate")


def mean_value_analysis(customers, think, service):
    """Rate of a closed network of one queue with one server, and a delay (Reiser, Lavenberg)."""
    queue = rate = 0.0
    for n in range(1, customers + 1):
        response = service * (1 + queue)
        rate = n / (think + response)
        queue = rate * response
    return rate


@pytest.mark.parametrize("episodes", [1, 4, 16])
@pytest.mark.parametrize("tools", ["constant", "log-normal"])
def test_a_server_that_shares_its_time_has_the_rate_of_the_closed_network(
    queueing, episodes, tools
):
    rng = np.random.default_rng(0)
    tokens, step, think = 40, 0.01, 2.0

    def lengths(mean, count):
        return rng.geometric(1 / mean, count).tolist()

    def draw():
        times = [think] * 5 if tools == "constant" else rng.lognormal(np.log(think) - 0.5, 1.0, 5)
        return [queueing.Turn(0, n, t) for n, t in zip(lengths(tokens, 5), times, strict=True)]

    # a step of n requests takes n times as long: each gets an n-th of the server
    system = queueing.System(step={1: step, 16: 16 * step}, slots=16, concurrency=episodes)
    result = queueing.simulate(system, draw, 1000)
    expected = mean_value_analysis(episodes, think, tokens * step)
    assert result.rate * 5 == pytest.approx(expected, rel=0.04)
    assert 1 - result.servers_idle == pytest.approx(expected * tokens * step, rel=0.05)


def test_a_server_with_one_slot_serves_in_turn(queueing):
    rng = np.random.default_rng(1)

    def lengths(mean, count):
        return rng.geometric(1 / mean, count).tolist()

    def draw():
        tools = rng.exponential(1.0, 4).tolist()
        return [queueing.Turn(0, n, t) for n, t in zip(lengths(50, 4), tools, strict=True)]

    system = queueing.System(step={1: 0.01}, slots=1, concurrency=3)
    rate = queueing.simulate(system, draw, 1500).rate * 4
    assert rate == pytest.approx(mean_value_analysis(3, 1.0, 0.5), rel=0.04)


def test_equal_episodes_take_the_time_that_one_counts_by_hand(queueing):
    system = queueing.System(
        step={1: 1.0, 2: 3.0}, prefill=0.5, host=0.25, embedded=True, slots=2, concurrency=2
    )

    def draw():
        return [queueing.Turn(4, 10, 100.0)]

    # both are prompted (2 * (2 + 0.25) s), then decode ten tokens of 3 s each, then use the tool
    result = queueing.simulate(system, draw, 2)
    assert result.seconds == pytest.approx(4.5 + 30 + 100)
    assert (result.episodes, result.tokens) == (2, 20)
    assert result.servers_idle == pytest.approx(100 / 134.5)
    one = queueing.System(step={1: 1.0}, slots=1, concurrency=2)
    assert queueing.simulate(one, draw, 2).seconds == pytest.approx(20 + 100)
    assert queueing.System(step={1: 1.0, 3: 2.0}, slots=5).step_times()[1:] == [1, 1.5, 2, 2.5, 3]


@settings(max_examples=30)
@given(
    batch=st.integers(1, 4),
    group=st.integers(1, 3),
    staleness=st.integers(0, 3),
    update=st.floats(0.0, 5.0),
    seed=st.integers(0, 99),
)
def test_no_group_is_older_than_allowed_and_every_update_has_its_groups(
    queueing, batch, group, staleness, update, seed
):
    rng = np.random.default_rng(seed)

    def draw():
        return [queueing.Turn(0, 5, float(rng.lognormal(0.0, 1.5))) for _ in range(2)]

    system = queueing.System(
        step={1: 0.01},
        **{"batch": batch, "group": group, "staleness": staleness, "update": update},
    )
    result = queueing.simulate(system, draw, 8 * batch * group)
    assert result.updates == 8
    assert len(result.staleness) == 8 * batch
    assert max(result.staleness) <= staleness
    assert 0 <= result.trainer_idle <= 1


def test_playing_ahead_hides_the_update_behind_the_rollout(queueing):
    def seconds(staleness):
        system = queueing.System(step={1: 0.1}, batch=2, staleness=staleness, update=3.0)
        return queueing.simulate(system, lambda: [queueing.Turn(0, 20, 2.0)], 20).seconds

    assert seconds(0) == pytest.approx(10 * (4 + 3))
    # a batch is played in 4 s and trained on in 3 s; two of them alternate
    assert seconds(1) == pytest.approx(5 * (4 + 3) + 3)


def test_the_rate_stays_below_what_each_resource_allows(program):
    for system in program.SIZES.values():
        small = program.replace(system, concurrency=64, batch=4, group=4)
        load = program.Workload(turns=3, tokens=50)
        result = program.simulate(small, load.source(), 192)
        assert result.rate <= 1.02 * min(program.bounds(small, load).values())
