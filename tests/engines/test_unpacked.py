"""The engine with the model's own cache: log-probabilities, reuse of caches, fairness, limits."""

import asyncio
import contextlib
import copy

import pytest
from support import architectures
from support.logprobs import difference

from gspo_env.engines import Sampling, TransformersEngine, UnbatchedEngine
from gspo_env.model.check import check_model


@pytest.fixture(scope="module")
def hybrid():
    model = architectures.build("LFM2")
    check_model(model)
    return model


def start(model, **limits):
    return UnbatchedEngine(model, **{"max_slots": 4, "max_context": 200} | limits)


@pytest.mark.parametrize("whole_turns", [True, False])
def test_turns_of_many_sessions_report_what_a_pass_over_the_whole_sequence_gives(
    hybrid, whole_turns
):
    engine = start(hybrid, max_slots=3, whole_turns=whole_turns)

    async def play():
        return await asyncio.gather(*(architectures.converse(engine, seed) for seed in range(6)))

    for log in asyncio.run(play()):
        for prompt, done in log:
            assert difference(hybrid, prompt, done) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_a_seed_gives_the_action_of_the_fast_engine(temperature):
    model = architectures.build("Qwen3")
    slow = start(copy.deepcopy(model))
    fast = TransformersEngine(model, max_slots=4, max_context=200)
    for seed in range(8):
        sampling = Sampling(max_tokens=6, temperature=temperature, seed=seed, stop_ids=(9, 50))
        prompt = list(range(3, 9 + seed))
        first, second = (asyncio.run(e.generate(prompt, sampling, "a")) for e in (slow, fast))
        assert first.token_ids == second.token_ids
        assert first.finish_reason == second.finish_reason
        assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)


def test_a_prompt_that_does_not_continue_its_cache_is_computed_from_the_start(hybrid):
    engine = start(hybrid)
    prompt = list(range(3, 43))
    asyncio.run(engine.generate(prompt, Sampling(max_tokens=4), "a"))
    for other in ([*prompt[:30], 99, 98], prompt[:20], [5]):
        before = engine.fed_tokens
        done = asyncio.run(engine.generate(other, Sampling(max_tokens=1), "a"))
        assert engine.fed_tokens - before == len(other)
        assert difference(hybrid, other, done) < 1e-4


def test_a_cancelled_request_leaves_its_slot_and_no_cache(hybrid):
    engine = start(hybrid, max_slots=1)

    async def play():
        job = asyncio.create_task(engine.generate([3, 4], Sampling(max_tokens=100), "a"))
        for _ in range(5):
            await asyncio.sleep(0)
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job
        await engine.update_weights([], 1)
        return await engine.generate([3, 4, 5], Sampling(max_tokens=3), "a")

    done = asyncio.run(play())
    assert done.weights_version == 1
    assert difference(hybrid, [3, 4, 5], done) < 1e-4


def test_activation_checkpointing_keeps_gradients_and_the_cache():
    model = architectures.build("LFM2")
    plain = copy.deepcopy(model)
    learner = architectures.make_learner(model, checkpointing=True)
    assert architectures.learner_difference(learner, plain, architectures.make_samples(0)) < 1e-4
    learner.policy.train()
    assert architectures.engine_difference(model, plain) < 1e-4
