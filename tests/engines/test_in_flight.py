"""Weights that change while requests run, in the engines of this process."""

import asyncio
import copy
import random
import threading

import pytest
import torch
from support.logprobs import difference_by_version, other_weights, versions_of

from gspo_env.engines.base import Sampling, Transformers, check_completion
from gspo_env.engines.embedded.copy import CopyEngine
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.engines.embedded.unpacked import UnbatchedEngine
from gspo_env.errors import EngineError

ENGINES = ["batched", "unbatched", "batched copy", "unbatched copy"]


@pytest.fixture(params=ENGINES)
def engine(request, model):
    name, _, own = request.param.partition(" ")

    def start(model):
        if name == "batched":
            return TransformersEngine(model, max_slots=4, max_context=300, max_step_tokens=40)
        return UnbatchedEngine(model, max_slots=4, max_context=300)

    return CopyEngine(model, start) if own else start(model)


async def play(engine, model, models, updates, requests=6, turns=1, update=None):
    """Plays conversations, with an update of the weights after every few tokens."""
    update, log = update or engine.update_in_flight, []

    async def converse(n):
        rng = random.Random(n // 2)  # two of them begin alike
        ids = [rng.randrange(1, 250) for _ in range(10 + n // 2)] if n else [9, 8, 7]
        for turn in range(turns):
            sampling = Sampling(max_tokens=30, seed=10 * n + turn)
            done = await engine.generate(list(ids), sampling, f"s{n}")
            check_completion(done, sampling)
            log.append((list(ids), done))
            ids += [*done.token_ids, 5, 6]

    jobs = [asyncio.create_task(converse(n)) for n in range(requests)]
    for version in range(1, updates + 1):
        for _ in range(8):
            await asyncio.sleep(0)
        model.load_state_dict(models[version].state_dict())
        await update([], version)
    await asyncio.gather(*jobs)
    return log


@pytest.mark.parametrize("turns", [1, 2])
def test_each_token_has_the_log_probability_that_its_version_of_the_weights_gives(
    engine, model, turns
):
    assert engine.updates_in_flight
    models = [copy.deepcopy(model), *(other_weights(model, n, 0.3) for n in (1, 2))]
    log = asyncio.run(play(engine, model, models, updates=2, turns=turns))
    assert any(len(done.weights_versions) == 3 for _, done in log)
    assert {v for _, done in log for v in versions_of(done).tolist()} == {0, 1, 2}
    assert max(difference_by_version(models, *each) for each in log) < 1e-4


@pytest.mark.parametrize("how", ["update_in_flight", "update_weights"])
def test_after_an_update_sampling_is_as_in_a_new_engine(engine, model, how):
    models = [copy.deepcopy(model), other_weights(model, 1, 0.3)]
    update = getattr(engine, how)
    asyncio.run(play(engine, model, models, updates=1, turns=2, update=update))
    sampling = Sampling(max_tokens=20, seed=3)
    fresh = TransformersEngine(copy.deepcopy(models[1]), max_slots=2, max_context=300)
    after = asyncio.run(engine.generate([9, 8, 7], sampling))
    expected = asyncio.run(fresh.generate([9, 8, 7], sampling))
    assert after.token_ids == expected.token_ids
    assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert (after.weights_version, after.weights_versions) == (1, ())


def test_an_engine_that_forgets_computes_a_prompt_again(engine):
    prompt, fed = list(range(3, 43)), [0]
    for session in "abc":
        asyncio.run(engine.generate(prompt, Sampling(max_tokens=1), session))
        fed.append(engine.fed_tokens)
        if session == "b":
            asyncio.run(engine.forget())
    assert fed[1] == fed[3] - fed[2] == len(prompt) > fed[2] - fed[1]


def test_an_update_waits_for_requests_that_run_and_not_for_those_that_were_cancelled(engine):
    prompts = [[3, 4, 5], [6, 7], [8, 9], [3], [4], [5]]  # more than slots

    async def play():
        jobs = [asyncio.create_task(engine.generate(p, Sampling(max_tokens=50))) for p in prompts]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for job in jobs[::2]:
            job.cancel()
        await engine.update_weights([], 1)
        assert engine.weights_version == 1
        return await asyncio.gather(*jobs[1::2], engine.generate([3, 4, 5], Sampling(max_tokens=3)))

    *before, after = asyncio.run(play())
    assert [done.weights_version for done in (*before, after)] == [0, 0, 0, 1]
    assert [len(done.token_ids) for done in before] == [50] * 3


def test_a_prompt_that_does_not_fit_and_a_closed_engine_are_refused(engine):
    with pytest.raises(EngineError, match="do not fit a context of 300"):
        asyncio.run(engine.generate([1] * 298, Sampling(max_tokens=3)))
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate([3], Sampling(max_tokens=3)))


def test_a_copy_samples_with_its_own_weights_while_the_learner_changes_its(model):
    before = copy.deepcopy(model)
    engine = Transformers(own_weights=True).start(model, max_slots=4, max_context=100)
    assert engine.copies
    stop = threading.Event()

    def learn():
        while not stop.is_set():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)

    learner = threading.Thread(target=learn)
    learner.start()
    try:
        done = asyncio.run(engine.generate([3, 4, 5], Sampling(max_tokens=40)))
    finally:
        stop.set()
        learner.join()
    assert difference_by_version([before], [3, 4, 5], done) < 1e-4
    model.load_state_dict(other_weights(before, 1, 0.3).state_dict())
    asyncio.run(engine.update_weights([], 1))
    again = asyncio.run(engine.generate([3, 4, 5], Sampling(max_tokens=40)))
    assert difference_by_version([before, model], [3, 4, 5], again) < 1e-4


def test_a_copy_of_a_model_with_an_adapter_takes_what_trains(model):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    engine = Transformers(own_weights=True).start(adapted, max_slots=4, max_context=100)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape), alpha=0.3)
    asyncio.run(engine.update_weights([], 1))
    done = asyncio.run(engine.generate([3, 4, 5], Sampling(max_tokens=20)))
    assert difference_by_version([adapted] * 2, [3, 4, 5], done) < 1e-4
