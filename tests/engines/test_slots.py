"""Requests that share sequences of the cache: whatever they do, each keeps its own context."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import architectures
from support.logprobs import difference

from gspo_env.engines.base import Sampling
from gspo_env.engines.embedded.engine import TransformersEngine

VOCABULARY = 60
TURNS = 5


@pytest.fixture(scope="module")
def peaked():
    """A model that is sure of the next id in some contexts, and not in others."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    return architectures.build("Qwen3", 7.0, **shape)


async def episode(engine, rng, prompts, session, log):
    """Samples turns; cancels some, releases its session at any time, and edits what was said."""
    ids = list(rng.choice(prompts))
    for _ in range(rng.randrange(1, TURNS)):
        sampling = Sampling(
            max_tokens=rng.randrange(1, 9),
            temperature=rng.choice([0.0, 0.2, 1.0]),
            stop_ids=tuple(range(rng.choice([0, 4]))),
            seed=rng.randrange(3),
        )
        asked = asyncio.ensure_future(engine.generate(list(ids), sampling, session))
        if rng.random() < 0.1:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            continue
        done = await asked
        log.append((list(ids), sampling, done))
        ids += [*done.token_ids, *rng.choice([1, 1, 1, 5]) * [sum(done.token_ids) % VOCABULARY]]
        if rng.random() < 0.1:
            ids = ids[: rng.randrange(1, len(ids))]
        if rng.random() < 0.1:
            engine.release(session)
    if rng.random() < 0.7:
        engine.release(session)


async def updates(engine, rng):
    for version in range(1, rng.choice([1, 3])):
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        await (engine.update_in_flight if rng.random() < 0.5 else engine.update_weights)(
            [], version
        )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_request_meets_the_keys_of_another_and_no_slot_is_lost(peaked, seed):
    rng, log = random.Random(seed), []
    slots, most = rng.choice([1, 2, 3, 9, 24]), rng.choice([1, 8, 1000])
    engine = TransformersEngine(peaked, max_slots=slots, max_context=300, max_step_tokens=most)
    system = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 15, 16, 40]))]
    prompts = [
        [*system, *[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 50))]]
        for _ in range(rng.randrange(1, 4))
    ]

    async def play():
        jobs = [
            episode(engine, random.Random(f"{seed} {n}"), prompts, f"s{n}", log)
            for n in range(rng.randrange(1, 24))
        ]
        await asyncio.wait_for(asyncio.gather(*jobs, updates(engine, rng)), timeout=120)

    asyncio.run(play())
    for prompt, sampling, done in log[::3]:
        assert difference(peaked, prompt, done, sampling.temperature or 1.0) < 1e-4
    held = engine._sequences
    assert held.requests == 0
    assert sorted(held._free) == [s.index for s in held._slots if not s.sessions]


def test_the_cache_has_as_many_slots_as_are_in_use_and_grows(peaked):
    prompts = [[n + 1, *range(20)] for n in range(12)]

    async def play(engine, count):
        kinds = [Sampling(max_tokens=4, seed=n) for n in range(count)]
        jobs = [engine.generate(prompts[n], kind, f"s{n}") for n, kind in enumerate(kinds)]
        return [(c.token_ids, c.logprobs) for c in await asyncio.gather(*jobs)]

    def slots(engine):
        return {len(tensor) for layer in engine._cache._layers.values() for tensor in layer}

    engine = TransformersEngine(peaked, max_slots=256, max_context=100)
    first = asyncio.run(play(engine, 3))
    assert slots(engine) == {3}
    more = asyncio.run(play(engine, 12))  # the first three continue their sessions
    assert slots(engine) == {12}
    assert [token_ids for token_ids, _ in more[:3]] == [token_ids for token_ids, _ in first]
    fresh = asyncio.run(play(TransformersEngine(peaked, max_slots=12, max_context=100), 12))
    assert [ids for ids, _ in fresh] == [ids for ids, _ in more]
    forked = TransformersEngine(peaked, max_slots=256, max_context=100)

    async def fork():  # one sequence until they sample different ids
        kinds = [Sampling(max_tokens=8, temperature=5.0, seed=n) for n in range(9)]
        return await asyncio.gather(*(forked.generate(prompts[0], kind) for kind in kinds))

    for done in asyncio.run(fork()):
        assert difference(peaked, prompts[0], done, 5.0) < 1e-4
    assert max(slots(forked)) <= 9 + 9 // 4  # a little more than in use, when it grows


@pytest.mark.parametrize("session", range(5))
def test_a_second_request_of_a_session_at_the_same_time_has_all_keys(peaked, session):
    prompt = [n * 7 % VOCABULARY for n in range(30)]
    longer = [*prompt, 3]

    async def play(ticks):
        engine = TransformersEngine(peaked, max_slots=12, max_context=100)
        kinds = [Sampling(max_tokens=6, seed=n) for n in range(5)]
        jobs = [engine.generate(prompt, kind, f"s{n}") for n, kind in enumerate(kinds)]
        first = asyncio.gather(*jobs)
        for _ in range(ticks):
            await asyncio.sleep(0)
        second = await engine.generate(longer, Sampling(max_tokens=3), f"s{session}")
        await first
        return second

    for ticks in range(8):
        assert difference(peaked, longer, asyncio.run(play(ticks))) < 1e-5
