"""The `transformers` engine: exact, independent of the rest of the batch."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gspo_env.engines import transformers
from gspo_env.engines.base import Sampling
from gspo_env.engines.transformers import TransformersEngine, sample
from gspo_env.errors import EngineError
from gspo_env.model import kv_attention


def plain_logprobs(model, ids, count, temperature=1.0):
    """Log-probabilities of the last `count` ids by a plain forward pass."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = plain(torch.tensor([ids])).logits[0].float() / temperature
    rows = torch.log_softmax(logits, -1)[-count - 1 : -1]
    return rows.gather(-1, torch.tensor(ids[-count:])[:, None])[:, 0]


def random_ids(rng, low, high, vocabulary=250):
    return [rng.randrange(1, vocabulary) for _ in range(rng.randrange(low, high))]


async def converse(engine, rng, turns, session, temperature=1.0, seed=0):
    """A multi-turn episode; returns its ids and each turn's (prompt, completion)."""
    ids, log = random_ids(rng, 3, 40), []
    for k in range(turns):
        sampling = Sampling(max_tokens=rng.randrange(1, 9), temperature=temperature, seed=seed + k)
        done = await engine.generate(list(ids), sampling, session)
        log.append((list(ids), done))
        ids += [*done.token_ids, *random_ids(rng, 1, 12)]
    return log


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward_pass_over_all_rows_of_many_ragged_episodes(
    model, temperature
):
    engine = TransformersEngine(model, max_slots=5, max_context=400, max_step_tokens=37)

    async def play():
        jobs = [
            converse(engine, random.Random(n), 1 + n % 5, f"s{n}", temperature) for n in range(16)
        ]
        return await asyncio.gather(*jobs)

    for log in asyncio.run(play()):
        for prompt, done in log:
            expected = plain_logprobs(
                model, prompt + list(done.token_ids), len(done.token_ids), temperature
            )
            assert torch.tensor(done.logprobs).sub(expected).abs().max() < 1e-5


def test_a_later_turn_feeds_only_what_is_new(model):
    engine = TransformersEngine(model, max_slots=2, max_context=200)

    async def play():
        first = await engine.generate(list(range(1, 51)), Sampling(max_tokens=4), "a")
        fed = engine.fed_tokens
        again = [*range(1, 51), *first.token_ids, 7, 8, 9]
        await engine.generate(again, Sampling(max_tokens=1), "a")
        return fed, engine.fed_tokens

    before, after = asyncio.run(play())
    assert before == 50 + 3
    assert after - before == 1 + 3


def test_a_prompt_shared_by_a_group_is_computed_once(model):
    engine = TransformersEngine(model, max_slots=8, max_context=200)

    async def play():
        sampling = [Sampling(max_tokens=1, seed=n) for n in range(8)]
        prompt = list(range(1, 61))
        jobs = [engine.generate(prompt, s, f"s{n}") for n, s in enumerate(sampling)]
        return await asyncio.gather(*jobs)

    done = asyncio.run(play())
    assert engine.fed_tokens == 60 + 7
    for completion in done:
        ids = [*range(1, 61), *completion.token_ids]
        assert abs(plain_logprobs(model, ids, 1)[0].item() - completion.logprobs[0]) < 1e-5


def test_a_request_samples_the_same_alone_and_in_a_crowd(model):
    async def alone():
        engine = TransformersEngine(model, max_slots=4, max_context=200)
        return await engine.generate([5, 6, 7], Sampling(max_tokens=12, seed=3), "x")

    async def crowd():
        engine = TransformersEngine(model, max_slots=4, max_context=200)
        rng = random.Random(0)
        others = [
            converse(engine, random.Random(n), 3, f"o{n}", seed=rng.randrange(99)) for n in range(6)
        ]
        mine = engine.generate([5, 6, 7], Sampling(max_tokens=12, seed=3), "x")
        return (await asyncio.gather(*others, mine))[-1]

    assert asyncio.run(alone()).token_ids == asyncio.run(crowd()).token_ids


def test_new_weights_drop_every_cached_key(model):
    engine = TransformersEngine(model, max_slots=2, max_context=100)

    async def play():
        first = await engine.generate([3, 4, 5], Sampling(max_tokens=3), "a")
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
        await engine.update_weights([], 1)
        ids = [3, 4, 5, *first.token_ids, 9]
        return ids, await engine.generate(ids, Sampling(max_tokens=3), "a")

    ids, done = asyncio.run(play())
    expected = plain_logprobs(model, ids + list(done.token_ids), len(done.token_ids))
    assert torch.tensor(done.logprobs).sub(expected).abs().max() < 1e-5
    assert done.weights_version == 1


def test_weights_change_at_once_after_requests_that_were_cancelled_and_after_those_that_run(model):
    engine = TransformersEngine(model, max_slots=2, max_context=100)
    prompts = [[3, 4, 5], [6, 7], [8, 9]]  # more than slots

    async def play():
        jobs = [asyncio.create_task(engine.generate(p, Sampling(max_tokens=50))) for p in prompts]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        jobs[0].cancel()
        jobs[2].cancel()
        await engine.update_weights([], 1)
        assert engine.weights_version == 1
        return await jobs[1], await engine.generate([3, 4, 5], Sampling(max_tokens=3))

    before, after = asyncio.run(play())
    assert (before.weights_version, after.weights_version) == (0, 1)
    assert len(before.token_ids) == 50


def test_a_stop_id_ends_an_action_and_is_kept(model):
    engine = TransformersEngine(model, max_slots=2, max_context=100)
    every = tuple(range(model.config.vocab_size))
    done = asyncio.run(engine.generate([3, 4], Sampling(max_tokens=9, stop_ids=every)))
    assert (len(done.token_ids), done.finish_reason) == (1, "stop")


def test_greedy_takes_the_most_likely_id(model):
    engine = TransformersEngine(model, max_slots=2, max_context=100)
    done = asyncio.run(engine.generate([3, 4], Sampling(max_tokens=6, temperature=0.0)))
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    ids = [3, 4]
    for _ in range(6):
        ids.append(int(plain(torch.tensor([ids])).logits[0, -1].argmax()))
    assert list(done.token_ids) == ids[2:]


def test_a_prompt_beyond_the_context_is_refused(model):
    engine = TransformersEngine(model, max_slots=2, max_context=10)
    with pytest.raises(EngineError, match="do not fit a context of 10"):
        asyncio.run(engine.generate([1] * 8, Sampling(max_tokens=3)))


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


class OnApple(torch.Tensor):
    """Says that it is on Apple's GPU, which refuses float64."""

    device = property(lambda self: torch.device("mps"))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            raise TypeError("the MPS framework does not support float64")
        return result


def test_a_device_without_float64_samples_the_same():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match="float64"):
        logits.as_subclass(OnApple).double()
    settings = [1.0, 0.0, 0.5], [0.3, 0.9, 0.999]
    assert sample(logits.as_subclass(OnApple), *settings) == sample(logits, *settings)


def windowed():
    """A model whose second layer sees 9 tokens."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, **window)).eval()


@pytest.mark.parametrize("most_scores", [1 << 22, 0], ids=["products", "fused kernel"])
@pytest.mark.parametrize("kind", ["default", "windowed"])
def test_episodes_that_share_a_prompt_have_the_logprobs_of_a_plain_forward_pass(
    model, kind, most_scores, monkeypatch
):
    monkeypatch.setattr(kv_attention, "_MOST_SCORES", most_scores)
    monkeypatch.setattr(transformers, "_LEAST_SHARED", 16)
    model = windowed() if kind == "windowed" else model
    engine = TransformersEngine(model, max_slots=9, max_context=400, max_step_tokens=50)
    rng = random.Random(0)
    prompts = [random_ids(rng, 17, 70), random_ids(rng, 17, 70), [*range(1, 30)], [*range(1, 45)]]

    async def episode(n, prompt, turns):
        ids, log, own = list(prompt), [], random.Random(n)
        for k in range(turns):
            sampling = Sampling(max_tokens=own.randrange(1, 9), seed=10 * n + k)
            done = await engine.generate(list(ids), sampling, f"s{n}")
            log.append((list(ids), done))
            ids += [*done.token_ids, *random_ids(own, 1, 12)]
            if own.random() < 0.2:  # an edit, sometimes of the prompt itself
                ids = ids[: own.randrange(5, len(ids))]
        engine.release(f"s{n}")
        return log

    async def play():
        jobs = [episode(n, prompts[n % 5 % 4], 1 + n % 6) for n in range(40)]
        return await asyncio.gather(*jobs)

    asyncio.run(play())
    for log in asyncio.run(play()):  # again, in slots that others have used
        for prompt, done in log:
            expected = plain_logprobs(model, prompt + list(done.token_ids), len(done.token_ids))
            assert torch.tensor(done.logprobs).sub(expected).abs().max() < 1e-5
    assert engine._cache._shared.layers
