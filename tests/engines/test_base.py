"""What an engine returns is checked before anything is learned from it."""

import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_env.engines.base import (
    Completion,
    Engine,
    Sampling,
    check_completion,
    drained,
    version_runs,
)
from gspo_env.engines.parts import sample_parts, version_starts
from gspo_env.env.registration import make_env
from gspo_env.errors import EngineError
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import Task

GOOD = Completion(
    token_ids=(5, 6, 2), logprobs=(-0.5, -1.0, 0.0), finish_reason="stop", weights_version=0
)
ASKED = Sampling(max_tokens=4, stop_ids=(2,))
MALFORMED = {
    "a negative id": {"token_ids": (5, -6, 2)},
    "an id that is text": {"token_ids": (5, "6", 2)},
    "an id beyond the vocabulary": {"token_ids": (5, 300, 2)},
    "an id of any size": {"token_ids": (5, 10**30, 2)},
    "no id": {"token_ids": (), "logprobs": ()},
    "ragged ids": {"token_ids": ((5, 6), 2)},
    "ids that are None": {"token_ids": None},
    "a log-probability that is NaN": {"logprobs": (-0.5, math.nan, -1.0)},
    "a positive log-probability": {"logprobs": (-0.5, 0.5, -1.0)},
    "a log-probability of minus infinity": {"logprobs": (-0.5, -math.inf, -1.0)},
    "a log-probability that is None": {"logprobs": (-0.5, None, -1.0)},
    "fewer log-probabilities than ids": {"logprobs": (-0.5, -1.0)},
    "more tokens than asked": {"token_ids": (5, 6, 7, 8, 2), "logprobs": (-1.0,) * 5},
    "fewer tokens, without a stop id": {"token_ids": (5, 6, 7), "finish_reason": "length"},
    "a stop id in the middle": {"token_ids": (5, 2, 2)},
    "no version": {"weights_version": None},
    "a negative version": {"weights_version": -1},
    "versions of fewer tokens": {"weights_versions": ((0, 1), (1, 1))},
    "a lower version in its runs": {"weights_version": 1, "weights_versions": ((0, 1), (1, 2))},
    "versions that are not runs": {"weights_versions": (0, 1, 1)},
    "an unknown reason": {"finish_reason": "abort"},
    "length where a stop id ends it": {"finish_reason": "length"},
    "stop without a stop id": {"token_ids": (5, 6, 7)},
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_completion_is_refused_with_the_field_and_its_value(fault):
    check_completion(GOOD, ASKED, 300)
    with pytest.raises(EngineError, match=r"a completion is malformed: .* expected"):
        check_completion(replace(GOOD, **MALFORMED[fault]), ASKED, 300)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_runs_of_versions_name_the_version_of_each_token(versions):
    starts = [(v, n) for n, v in enumerate(versions) if n == 0 or versions[n - 1] != v]
    starts.append((9, len(versions)))  # weights that sampled nothing any more
    lowest, runs = version_runs(starts, len(versions))
    named = [v for v, tokens in runs for _ in range(tokens)] or [lowest] * len(versions)
    assert named == versions
    assert lowest == min(versions)
    done = replace(GOOD, weights_version=lowest, weights_versions=runs)
    assert [v for v, _ in version_starts(done)] == [v for v, _ in starts[:-1]]


def test_parts_of_an_action_keep_the_version_of_each_token():
    versions = iter([(4, ()), (4, ((4, 9), (5, 55))), (6, ())])

    async def part(ids, sampling):
        lowest, runs = next(versions)
        count = sampling.max_tokens
        return Completion(
            token_ids=(7,) * count,
            logprobs=(-1.0,) * count,
            finish_reason="length",
            weights_version=lowest,
            weights_versions=runs,
        )

    asked = Sampling(max_tokens=140, ends=lambda ids: len(ids) == 130)
    done = asyncio.run(sample_parts(part, [3], asked))
    assert done.weights_versions == ((4, 64 + 9), (5, 55), (6, 2))
    assert done.weights_version == 4
    check_completion(done, asked)


def test_what_is_no_completion_is_refused():
    with pytest.raises(EngineError, match="returned dict; expected a Completion"):
        check_completion({"token_ids": (1,)}, ASKED)


@given(
    st.lists(st.integers(3, 299), min_size=1, max_size=40),
    st.booleans(),
    st.lists(st.floats(-1e30, 0.0), min_size=41, max_size=41),
)
def test_every_well_formed_completion_is_accepted(ids, stopped, logprobs):
    ids = [*ids, 2] if stopped else ids
    done = Completion(
        token_ids=tuple(ids),
        logprobs=tuple(logprobs[: len(ids)]),
        finish_reason="stop" if stopped else "length",
        weights_version=7,
    )
    check_completion(done, Sampling(max_tokens=len(ids), stop_ids=(2,)), 300)


class Returning(Engine):
    """An engine that returns the same completion for every request."""

    def __init__(self, done):
        self.done = done

    async def generate(self, prompt_ids, sampling, session=None):
        return self.done


def play(engine, chat):
    limits = RolloutConfig(max_turn_tokens=8, max_context=256, max_turns=2)
    pool = EnvPool(lambda: make_env("gspo/Lookup-v0"))
    collector = Collector(engine, chat, pool, limits, vocab_size=len(chat.tokenizer))
    return asyncio.run(collector.collect([Task(env_id="test", seed=0)], seed=0, group_size=2))


@pytest.mark.parametrize("fault", ["an id of any size", "a positive log-probability"])
def test_no_malformed_completion_of_any_engine_reaches_an_episode(player, fault):
    with pytest.raises(EngineError, match="a completion is malformed"):
        play(Returning(replace(GOOD, **MALFORMED[fault])), player.chat)


def test_the_turns_of_an_episode_have_the_version_of_each_token(player):
    ids = (5, 6, player.chat.stop_ids[0])
    runs = ((2, 1), (4, 2))
    done = replace(GOOD, token_ids=ids, weights_version=2, weights_versions=runs)
    [group] = play(Returning(done), player.chat)
    for episode in group.episodes:
        assert {turn.weights_versions for turn in episode.turns} == {runs}
        assert episode.weights_versions == (2, 4)


def test_the_wait_for_requests_in_flight_is_bounded():
    with pytest.raises(EngineError, match=r"2 still run after 0\.01 s"):
        asyncio.run(drained(lambda: 2, 0.01))
