"""The embedded engine on a GPU: the CPU's ids and log-probabilities."""

from __future__ import annotations

import asyncio
import copy
import random

from pretend_device import pretend_gpu

from gspo_env.engines.base import Sampling
from gspo_env.engines.transformers import TransformersEngine


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


def played(model):
    engine = TransformersEngine(model, max_slots=5, max_context=300, max_step_tokens=37)

    async def play():
        first = await asyncio.gather(*(episode(engine, n) for n in range(12)))
        await engine.sleep()
        await engine.update_weights([], 1)
        return [first, await episode(engine, 99)]

    found = asyncio.run(play())
    engine.close()
    return found


def test_episodes_are_those_of_the_cpu(model):
    expected = played(copy.deepcopy(model))
    with pretend_gpu():
        assert played(copy.deepcopy(model).to("cuda")) == expected
