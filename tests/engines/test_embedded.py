"""The `transformers` engine: exact, independent of the rest of the batch."""

import asyncio
import copy
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import psutil
import pytest
import torch
from support import architectures
from support.logprobs import difference
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_env.engines.base import Sampling
from gspo_env.engines.embedded import engine as transformers
from gspo_env.engines.embedded import kv_attention
from gspo_env.engines.embedded.engine import TransformersEngine, sample
from gspo_env.engines.embedded.start import start_embedded
from gspo_env.errors import EngineError


def random_ids(rng, low, high, vocabulary=250):
    return [rng.randrange(1, vocabulary) for _ in range(rng.randrange(low, high))]


def test_closing_ends_the_requests_in_flight_with_an_error(model):
    engine = TransformersEngine(model, max_slots=2, max_context=100)

    async def play():
        jobs = [engine.generate([3, n], Sampling(max_tokens=90, seed=n)) for n in range(1, 5)]
        tasks = [asyncio.create_task(job) for job in jobs]
        while engine.fed_tokens < 10:
            await asyncio.sleep(0)
        engine.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in asyncio.run(play()):
        assert isinstance(error, EngineError)
        assert str(error) == "the engine is closed"


def test_sampling_follows_the_distribution(model):
    engine = TransformersEngine(model, max_slots=64, max_context=100)

    async def play():
        jobs = [engine.generate([3, 4], Sampling(max_tokens=1, seed=n)) for n in range(4000)]
        return await asyncio.gather(*jobs)

    counts = torch.zeros(model.config.vocab_size)
    for done in asyncio.run(play()):
        counts[done.token_ids[0]] += 1
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = plain(torch.tensor([[3, 4]])).logits[0, -1].softmax(-1)
    assert (counts / 4000 - expected).abs().sum() < 3 * (
        expected * (1 - expected) / 4000
    ).sqrt().sum()


def sharp(seed):
    """Sampling that mostly takes the likeliest id, so that requests stay together for long."""
    return {"temperature": 0.15, "seed": seed}


async def replay(engine, tasks, size, turns, edits=False, system=()):
    """Groups of episodes that begin alike; returns each turn's (prompt, sampling, completion)."""

    async def episode(task, n):
        rng, log, session = random.Random(task), [], f"s{task}-{n}"
        ids = [*system, *random_ids(rng, 5, 60)]
        for k in range(turns):
            sampling = Sampling(max_tokens=6, **sharp(100 * n + k))
            done = await engine.generate(list(ids), sampling, session)
            log.append((list(ids), sampling, done))
            # the observation follows from the action, as in an environment
            ids += [*done.token_ids, *random_ids(random.Random(sum(done.token_ids)), 1, 12)]
            if edits and k == n % turns:
                ids = ids[: len(ids) // 2 + n]
        if n % 2:
            engine.release(session)
        return log

    jobs = [episode(task, n) for task in range(tasks) for n in range(size)]
    return [entry for log in await asyncio.gather(*jobs) for entry in log]


def distinct(log):
    """Number of different contexts in front of a sampled id, and those between them."""
    texts = [(*prompt, *done.token_ids[:-1]) for prompt, _, done in log]
    return len({text[:n] for text in texts for n in range(1, len(text) + 1)})


@pytest.mark.parametrize(
    ("module", "limit", "number"),
    [
        (kv_attention, "MOST_SCORES", 1 << 22),
        (kv_attention, "MOST_SCORES", 0),
        (kv_attention, "_LEAST_BYTES", 0),
    ],
    ids=["products", "fused kernel", "common keys"],
)
@pytest.mark.parametrize("kind", ["default", "windowed"])
def test_episodes_that_share_a_prompt_have_the_logprobs_of_a_plain_forward_pass(
    model, kind, module, limit, number, monkeypatch
):
    monkeypatch.setattr(module, limit, number)
    model = architectures.build("Gemma 3", vocab_size=300) if kind == "windowed" else model
    engine = TransformersEngine(model, max_slots=9, max_context=400, max_step_tokens=50)
    for system in ([], range(1, 30)):  # the second in slots that others have used
        log = asyncio.run(replay(engine, tasks=4, size=6, turns=5, edits=True, system=system))
        for prompt, sampling, done in log:
            assert difference(model, prompt, done, sampling.temperature) < 2e-5


def test_every_context_is_computed_once_however_many_episodes_have_it(model):
    engine = TransformersEngine(model, max_slots=32, max_context=400)
    log = asyncio.run(replay(engine, tasks=4, size=8, turns=4))
    tokens = sum(len(prompt) + len(done.token_ids) for prompt, _, done in log)
    assert engine.fed_tokens == distinct(log) < tokens / 4
    assert len({(*prompt, *done.token_ids) for prompt, _, done in log}) > 40  # and they part


@pytest.mark.parametrize("slots", [64, 9])
@pytest.mark.parametrize("most", [8192, 30])
def test_a_system_prompt_of_several_tasks_is_computed_once(model, slots, most, monkeypatch):
    engine = TransformersEngine(model, max_slots=slots, max_context=400, max_step_tokens=most)
    system, fed, forward = [n * 11 % 300 for n in range(48)], [], engine._cache.forward

    def noted(model, slots, starts, feeds, *others):
        fed.extend(min(48, s + len(f)) - min(48, s) for s, f in zip(starts, feeds, strict=True))
        return forward(model, slots, starts, feeds, *others)

    monkeypatch.setattr(engine._cache, "forward", noted)
    log = asyncio.run(replay(engine, tasks=12, size=2, turns=3, system=system))
    assert sum(fed) == 48
    if slots == 64:  # no episode loses its slot
        assert engine.fed_tokens == distinct(log)
    for prompt, sampling, done in log:
        assert difference(model, prompt, done, sampling.temperature) < 2e-5


def test_a_conversation_without_a_session_feeds_only_what_is_new(model):
    engine = TransformersEngine(model, max_slots=4, max_context=400)

    async def play():
        ids, fed = list(range(1, 51)), []
        for _ in range(4):
            done = await engine.generate(ids, Sampling(max_tokens=4))
            fed.append(engine.fed_tokens)
            assert difference(model, ids, done) < 1e-5
            ids = [*ids, *done.token_ids, 7, 8, 9]
        return fed

    first, *later = asyncio.run(play())
    assert first == 50 + 3
    assert [b - a for a, b in pairwise([first, *later])] == [1 + 3 + 3] * 3


def test_the_session_that_was_used_last_keeps_its_slot(model):
    engine = TransformersEngine(model, max_slots=3, max_context=400)

    async def feed(session, prompt):
        before = engine.fed_tokens
        await engine.generate(prompt, Sampling(max_tokens=1), session)
        return engine.fed_tokens - before

    async def play():
        prompts = {name: list(range(n, n + 40)) for n, name in enumerate("abcd")}
        order = [*"abc", "a", "d", "a"]
        return [await feed(name, prompts[name]) for name in order]

    assert asyncio.run(play()) == [40, 40, 40, 1, 40, 1]


@pytest.mark.parametrize("slots", [32, 7])
def test_episodes_that_stay_together_sample_what_each_samples_alone(model, slots):
    engine = TransformersEngine(model, max_slots=slots, max_context=400, max_step_tokens=40)
    log = asyncio.run(replay(engine, tasks=4, size=8, turns=4, edits=True))
    for prompt, sampling, done in log:
        assert difference(model, prompt, done, sampling.temperature) < 2e-5
    for prompt, sampling, done in log[::5]:
        fresh = TransformersEngine(model, max_slots=1, max_context=400)
        assert asyncio.run(fresh.generate(prompt, sampling)).token_ids == done.token_ids


def test_requests_with_one_context_may_end_differently(model):
    engine = TransformersEngine(model, max_slots=8, max_context=100)
    prompt = [3, 4, 5]

    async def play():
        alone = TransformersEngine(model, max_slots=1, max_context=100)
        whole, other, greedy = [
            (await alone.generate(prompt, Sampling(max_tokens=6, **kind))).token_ids
            for kind in ({"seed": 1}, {"seed": 2}, {"temperature": 0.0})
        ]
        kinds = [
            Sampling(max_tokens=6, seed=1),
            Sampling(max_tokens=2, seed=1),
            Sampling(max_tokens=6, seed=1, stop_ids=(whole[3],)),
            Sampling(max_tokens=6, seed=1, ends=lambda ids: len(ids) == 5),
            Sampling(max_tokens=6, seed=2),
            Sampling(max_tokens=6, temperature=0.0),
        ]
        jobs = [asyncio.create_task(engine.generate(prompt, kind, "same")) for kind in kinds]
        cancelled = asyncio.create_task(engine.generate(prompt, kinds[0], "other"))
        for _ in range(4):
            await asyncio.sleep(0)
        cancelled.cancel()
        engine.release("other")
        return whole, other, greedy, await asyncio.gather(*jobs)

    whole, other, greedy, done = asyncio.run(play())
    assert len(set(whole[:4])) == 4
    expected = [whole, whole[:2], whole[:4], whole[:5], other, greedy]
    assert [d.token_ids for d in done] == expected
    assert [d.finish_reason for d in done] == ["length", "length", "stop", "stop", *2 * ["length"]]


def test_a_step_of_many_logits_is_sampled_in_parts_with_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    logits, rng = 3 * torch.randn(9, 500), random.Random(0)
    rows = [n % 9 for n in range(40)]
    temperatures = [(0.0, 0.7, 1.0)[rng.randrange(3)] for _ in rows]
    draws = [rng.random() for _ in rows]
    whole = sample(logits, temperatures, draws, rows)
    plain = sample(logits, [1.0] * 9, draws[:9])
    for most in (1, 1000, 1700):
        monkeypatch.setattr(transformers, "_MOST_LOGITS", most)
        assert sample(logits, temperatures, draws, rows) == whole
        assert sample(logits, [1.0] * 9, draws[:9]) == plain


@pytest.mark.parametrize("size", [500, 8192, 10_001, 49_152])
def test_the_sampled_id_is_where_the_sum_of_probabilities_passes_the_draw(size):
    torch.manual_seed(0)
    logits, rng = 4 * torch.randn(3, size), random.Random(0)
    logits[1, 7:-7] = logits[2, : size // 2] = -torch.inf
    rows = [n % 3 for n in range(600)]
    draws = [0.0, 0.0, 0.0, *[1 - 2**-53] * 3, *(rng.random() for _ in rows[6:])]
    tokens, logprobs = sample(logits, [1.0] * len(rows), draws, rows)
    probs = logits.double().softmax(-1)
    total = probs.cumsum(-1)
    for row, draw, token, logprob in zip(rows, draws, tokens, logprobs, strict=True):
        assert total[row, token] - probs[row, token] - 1e-6 < draw < total[row, token] + 1e-6
        assert logprob == pytest.approx(float(probs[row, token].log()), abs=1e-5)


@pytest.mark.parametrize("size", [500, 8192, 50_257])
def test_logits_that_are_no_numbers_give_an_id_and_a_log_probability_that_is_none(size):
    (token,), (logprob,) = sample(torch.full((1, size), torch.nan), [1.0], [0.5])
    assert 0 <= token < size
    assert np.isnan(logprob)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_sequence_without_numbers_ends_and_spoils_none_beside_or_after_it(dtype):
    model = architectures.build("Qwen2", tie_word_embeddings=False).to(getattr(torch, dtype))
    model.get_input_embeddings().weight.data[7] = torch.nan
    engine, fresh = (TransformersEngine(model, max_slots=3, max_context=100) for _ in range(2))

    async def play(engine, *prompts):
        jobs = [engine.generate(p, Sampling(max_tokens=9, seed=1), str(p)) for p in prompts]
        return await asyncio.gather(*jobs)

    others = [3, 4, 5], list(range(10, 90))
    bad, *beside = asyncio.run(play(engine, [3] * 50 + [7] * 9, *others))
    assert len(bad.logprobs) == 1
    assert np.isnan(bad.logprobs[0])
    turns = [[*p, *d.token_ids, 9] for p, d in zip(others, beside, strict=True)]
    after = asyncio.run(play(engine, [5, 4, 3], *turns))
    alone = [*asyncio.run(play(fresh, *others)), *asyncio.run(play(fresh, [5, 4, 3], *turns))]
    for done, expected in zip([*beside, *after], alone, strict=True):
        assert done.token_ids == expected.token_ids
        assert done.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_long_prompts_of_several_lengths_have_the_logprobs_of_a_plain_pass(window):
    name = "Qwen2" if window is None else "Mistral"
    changes = {} if window is None else {"sliding_window": window}
    model = architectures.build(name, max_position_embeddings=1024, **changes)
    plain = copy.deepcopy(model)
    engine = TransformersEngine(model, max_slots=8, max_context=1024, max_step_tokens=700)
    rng = random.Random(0)
    prompts = [random_ids(rng, n, n + 1, 160) for n in (900, 256, 257, 40, 600)]
    prompts.append(prompts[0][:500] + prompts[1])  # continues a copy

    async def play():
        sampling = Sampling(max_tokens=3, seed=1)
        return await asyncio.gather(*(engine.generate(p, sampling) for p in prompts))

    for prompt, done in zip(prompts, asyncio.run(play()), strict=True):
        assert difference(plain, prompt, done) < 1e-4


def wide_model():
    """A model whose cache is large: 16 kB a token, 0.5 GB for 64 sequences of 500."""
    config = Qwen3Config(
        **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def wide():
    return wide_model()


async def play_apart(engine, size):
    """Samples 64 sequences that diverge after a prompt of so many tokens."""
    settings = [Sampling(max_tokens=4, temperature=1e3, seed=n) for n in range(64)]
    prompt = [3 + n % 200 for n in range(size)]
    return await asyncio.gather(*(engine.generate(prompt, sampling) for sampling in settings))


def resident():
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
@pytest.mark.parametrize("copy", [False, True])
def test_a_large_cache_is_free_during_an_update_and_samples_the_same_bits_after_it(wide, copy):
    engine = start_embedded(wide, max_slots=64, max_context=512, copy=copy)

    async def play():
        before = await play_apart(engine, 480)
        held = resident()
        await engine.sleep()
        freed = held - resident()
        await engine.update_weights([], 1)
        return before, freed, await play_apart(engine, 480)

    before, freed, after = asyncio.run(play())
    assert freed > 0.8 * 64 * 484 * 16384
    assert [(d.token_ids, d.logprobs) for d in before] == [(d.token_ids, d.logprobs) for d in after]


FRESH = get_context("forkserver")
FRESH.set_forkserver_preload(
    ["gspo_env.engines.embedded.start", "torch", "transformers.models.qwen3.modeling_qwen3"]
)


def grown(lend):
    """The growth of a process from an update to the cache behind it, in bytes."""
    torch.set_num_threads(1)
    engine = TransformersEngine(wide_model(), max_slots=64, max_context=512)

    async def play():
        await play_apart(engine, 400 if lend else 100)
        await engine.sleep()
        update = [torch.ones(1 << 21) for _ in range(50)]
        last = torch.ones(1 << 20)  # behind them, so that the heap keeps its end
        held = resident()
        del update
        await engine.update_weights([], 1)
        await play_apart(engine, 400)
        return held, resident(), last

    held, after, _ = asyncio.run(play())
    return after - held


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
@pytest.mark.parametrize("lend", [False, True])
def test_a_large_cache_takes_the_place_of_memory_that_an_update_has_freed(lend):
    with ProcessPoolExecutor(1, FRESH) as fresh:  # others have left holes in a heap
        assert fresh.submit(grown, lend).result() < 0.5 * 64 * 404 * 16384
