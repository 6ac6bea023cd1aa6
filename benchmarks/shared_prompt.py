"""Measures what it saves that prompts which begin alike are computed once and kept once.

    python benchmarks/shared_prompt.py [--rounds 5]

32 groups of 8 episodes sample 16 tokens with the embedded engine. For each length of the prompt,
rollouts with copies of it and with prompts that a group shares take turns. Then the prompts of all
groups begin with the same system prompt, behind which each has 10 tokens of its own: it is computed
for each group, or once. The times are seconds of the processor.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from statistics import median

import numpy as np
from common import alternate, cpu_seconds, make_model

from gspo_env.engines import sequences, transformers
from gspo_env.engines.base import Sampling

GROUPS, SIZE, TOKENS, OWN = 32, 8, 16, 10
NEVER = 10**9


def make_play(
    engine: transformers.TransformersEngine, length: int, system: int = 0
) -> Callable[..., float]:
    """Returns a function that measures one rollout.

    It takes the least length that is shared and the least beginning that is looked for.
    """
    draw = np.random.default_rng(0)
    begin = draw.integers(0, 600, system).tolist()
    prompts = [begin + own for own in draw.integers(0, 600, (GROUPS, length)).tolist()]

    async def play() -> None:
        await engine.update_weights([], 0)
        wanted = [
            engine.generate(prompt, Sampling(max_tokens=TOKENS, seed=n), f"{group}/{n}")
            for group, prompt in enumerate(prompts)
            for n in range(SIZE)
        ]
        await asyncio.gather(*wanted)

    def measure(least: int, block: int) -> float:
        sequences._LEAST_SHARED, sequences._BLOCK = least, block
        return cpu_seconds(lambda: asyncio.run(play()))

    return measure


def main() -> None:
    """Prints a row for each length."""
    usual = sequences._LEAST_SHARED, sequences._BLOCK
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    engine = transformers.TransformersEngine(
        make_model("small"), max_slots=GROUPS * SIZE, max_context=1024
    )
    for length in (32, 64, 128, 256, 512):
        measure = make_play(engine, length)
        each = [lambda m=measure, least=least: m(least, usual[1]) for least in (NEVER, 1)]
        copied, shared = alternate(rounds, *each)
        ratio = median(b / a for a, b in zip(copied, shared, strict=True))
        print(f"prompts of {length:4} tokens: {ratio:.2f} of the time with copies")
    for system in (32, 64, 256, 900):
        measure = make_play(engine, OWN, system)
        each = [lambda m=measure, block=block: m(usual[0], block) for block in (NEVER, usual[1])]
        again, once = alternate(rounds, *each)
        ratio = median(b / a for a, b in zip(again, once, strict=True))
        print(f"a system prompt of {system:4} tokens: {ratio:.2f} of the time if not found again")


if __name__ == "__main__":
    main()
