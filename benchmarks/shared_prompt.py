"""Measures what it saves that the episodes of a group share the keys and values of their prompt.

    python benchmarks/shared_prompt.py [--rounds 5]

For each length of the prompt, 32 groups of 8 episodes sample 16 tokens with the embedded engine,
once with copies of the prompt and once with shared prompts, which take turns. The times are seconds
of the processor.
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

GROUPS, SIZE, TOKENS = 32, 8, 16


def make_play(engine: transformers.TransformersEngine, length: int) -> Callable[[int], float]:
    """Returns a function that measures one rollout, given the least length that is shared."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, 600, (GROUPS, length)).tolist()

    async def play() -> None:
        await engine.update_weights([], 0)
        wanted = [
            engine.generate(prompt, Sampling(max_tokens=TOKENS, seed=n), f"{group}/{n}")
            for group, prompt in enumerate(prompts)
            for n in range(SIZE)
        ]
        await asyncio.gather(*wanted)

    def measure(least: int) -> float:
        sequences._LEAST_SHARED = least
        return cpu_seconds(lambda: asyncio.run(play()))

    return measure


def main() -> None:
    """Prints a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    engine = transformers.TransformersEngine(
        make_model("small"), max_slots=GROUPS * SIZE, max_context=1024
    )
    for length in (32, 64, 128, 256, 512):
        measure = make_play(engine, length)
        copied, shared = alternate(rounds, lambda m=measure: m(10**9), lambda m=measure: m(1))
        ratio = median(b / a for a, b in zip(copied, shared, strict=True))
        print(f"prompts of {length:4} tokens: {ratio:.2f} of the time with copies")


if __name__ == "__main__":
    main()
