"""The embedded engine on a GPU: the CPU's ids and log-probabilities."""

import asyncio
import copy
import random

import pytest
import torch
from support import architectures
from support.device_cases import experts, hybrid
from support.pretend_device import pretend_gpu

from gspo_env.engines.base import Sampling
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.engines.embedded.unpacked import UnbatchedEngine
from gspo_env.model.check import check_model


async def episode(engine, seed):
    """Turns of one session; returns each turn's ids and log-probabilities."""
    rng, done = random.Random(seed % 3), []
    ids = [rng.randrange(1, 250) for _ in range(20)]
    rng = random.Random(seed)
    for turn in range(3):
        sampling = Sampling(
            max_tokens=rng.randrange(1, 9), temperature=seed % 3 * 0.5, seed=seed + turn
        )
        done.append(await engine.generate(list(ids), sampling, f"s{seed}"))
        ids += [*done[-1].token_ids, *(rng.randrange(1, 250) for _ in range(rng.randrange(1, 12)))]
    engine.release(f"s{seed}")
    return done


def batched(model):
    return TransformersEngine(model, max_slots=5, max_context=300, max_step_tokens=37)


def unbatched(model):
    return UnbatchedEngine(model, max_slots=5, max_context=300)


def played(engine, episodes=8):
    async def play():
        first = await asyncio.gather(*(episode(engine, n) for n in range(episodes)))
        await engine.sleep()
        await engine.update_weights([], 1)
        return [first, await episode(engine, 99)]

    found = asyncio.run(play())
    engine.close()
    return found


def numbers(played):
    """The ids and the log-probabilities of all actions, those of the last episode behind."""
    first, last = played
    done = [each for episode in [*first, last] for each in episode]
    return [d.token_ids for d in done], [x for d in done for x in d.logprobs]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 8}])
def test_episodes_are_those_of_the_cpu(options):
    model = architectures.build("Mistral", vocab_size=260, **options)
    ids, logprobs = numbers(played(batched(copy.deepcopy(model))))
    with pretend_gpu() as gpu:
        there, found = numbers(played(batched(copy.deepcopy(model).to("cuda"))))
    assert there == ids
    assert sum(gpu.replays) > 3 * len(gpu.replays)
    # the CPU multiplies with other kernels, so the last bits differ
    assert found == pytest.approx(logprobs, rel=1e-5, abs=1e-6)


def test_episodes_of_a_hybrid_model_are_those_of_the_cpu():
    model = hybrid()
    expected = played(unbatched(copy.deepcopy(model)), 2)
    with pretend_gpu() as gpu:
        engine = unbatched(copy.deepcopy(model).to("cuda"))
        assert played(engine, 2) == expected
    own = [n for (_, place), n in gpu.waits.items() if place.startswith("gspo_env")]
    assert sum(own) <= engine.fed_tokens


@pytest.mark.parametrize("make", [experts, hybrid])
def test_the_check_at_start_finds_the_same_way(make):
    model = make()
    here = check_model(copy.deepcopy(model))
    with pretend_gpu():
        there = check_model(copy.deepcopy(model).to("cuda"))
    assert (there.mode, there.padded) == (here.mode, here.padded)
    assert there.bound == pytest.approx(here.bound)


def test_graphs_follow_moved_weights_and_make_way_for_hooks():
    model = architectures.build("Mistral", vocab_size=260)

    def moved(engine):
        with torch.no_grad():
            for layer in engine.model.model.layers:
                weight = layer.self_attn.q_proj.weight
                layer.self_attn.q_proj.weight = torch.nn.Parameter(2 * weight)

    def hooked(engine):
        calls = []
        engine.model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        return calls

    def actions(device):
        copied = copy.deepcopy(model).to(device)
        engine = batched(copied)
        engine.model = copied
        sampled, calls = [], []

        async def play():
            for change in (None, moved, hooked):
                calls.append(change and change(engine))
                await engine.update_weights([], len(calls))
                drawn = [
                    engine.generate([5, 6, n], Sampling(max_tokens=12, seed=n)) for n in range(3)
                ]
                sampled.append([d.token_ids for d in await asyncio.gather(*drawn)])

        asyncio.run(play())
        return sampled, len(calls[-1])

    expected, _ = actions("cpu")
    with pretend_gpu() as gpu:
        assert actions("cuda") == (expected, 12)
    assert len(gpu.replays) == 2
    assert expected[0] != expected[1]
