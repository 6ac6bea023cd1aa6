"""Compares how far half-precision and float32 weights move in the same updates.

    python benchmarks/half_precision.py [--speed]

The same model of 100 M parameters trains on the same random episodes, with the same learning rate.
Half-precision weights train once with their float32 masters and once without: AdamW then works on
the weights themselves. The movement is the norm of the change of what the optimiser works on.
`--speed` measures instead how fast the embedded engine samples, and how fast an update is, in
bfloat16 and in float32, alternately.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median
from unittest import mock

import numpy as np
import torch
from common import alternate, cpu_seconds, make_model, multi_turn_group

from gspo_env.batch.sample import Sample
from gspo_env.engines import Sampling
from gspo_env.engines.transformers import TransformersEngine
from gspo_env.learner import GSPO, Learner, LearnerConfig, masters

ROWS, PROMPT, ACTION = 32, 40, 24
"""What `--speed` samples: the requests at the same time, and their tokens."""


def train(size: str, dtype: torch.dtype, *, with_masters: bool, batches: Sequence[list[Sample]]):
    """Makes one optimiser step for each batch; returns the movement of all parameters."""
    model = make_model(size).bfloat16().to(dtype)  # bfloat16 first: the same start for all
    config = LearnerConfig(minibatches=1, warmup_steps=0, learning_rate=1e-6)
    with mock.patch.object(masters, "HALF", masters.HALF if with_masters else ()):
        learner = Learner(model, GSPO(), config, total_steps=len(batches))
    if not with_masters:
        learner.masters.loss_scale = 1.0
    weights = [p.detach().clone() for p in model.parameters()]
    trained = [p.detach().clone() for p in learner.masters.tensors.values()]
    started = time.perf_counter()
    for seed, batch in enumerate(batches):
        learner.update(batch, seed)
    seconds = time.perf_counter() - started
    after = learner.masters.tensors.values()
    moved = [(a.detach() - b).float() for a, b in zip(after, trained, strict=True)]
    changed = sum(int((a != b).sum()) for a, b in zip(model.parameters(), weights, strict=True))
    norm = float(torch.stack([m.norm() for m in moved]).norm())
    largest = max(float(m.abs().max()) for m in moved)
    share = changed / sum(w.numel() for w in weights)
    return norm, largest, share, seconds


def programs(
    size: str, dtype: torch.dtype, batch: list[Sample]
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Returns what measures CPU seconds of sampling and of an update."""
    model = make_model(size).to(dtype)
    engine = TransformersEngine(model, max_slots=ROWS, max_context=PROMPT + ACTION)
    learner = Learner(model, GSPO(), LearnerConfig(minibatches=1), total_steps=1000)
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, model.config.vocab_size, (ROWS, PROMPT)).tolist()

    async def sample_all() -> None:
        await engine.update_weights([], 0)
        plans = [Sampling(max_tokens=ACTION, seed=seed) for seed in range(ROWS)]
        pairs = zip(prompts, plans, strict=True)
        await asyncio.gather(*(engine.generate(prompt, plan) for prompt, plan in pairs))

    return (
        lambda: cpu_seconds(lambda: asyncio.run(sample_all())),
        lambda: cpu_seconds(lambda: learner.update(batch, 0)),
    )


def show_speed(size: str, batch: list[Sample], rounds: int = 5) -> None:
    """Prints how much faster bfloat16 is than float32."""
    plain = programs(size, torch.float32, batch)
    half = programs(size, torch.bfloat16, batch)
    columns = alternate(rounds, plain[0], half[0], plain[1], half[1])
    for name, slow, fast in (("sampling", *columns[:2]), ("update", *columns[2:])):
        ratio = median(a / b for a, b in zip(slow, fast, strict=True))
        print(f"{name}: {median(slow):.2f} s in float32, {median(fast):.2f} s in bfloat16")
        print(f"    {ratio:.2f} times as fast (median of the pairs)")


def main() -> None:
    """Prints a row for each way of training, or the speeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=["small", "large"], default="large")
    parser.add_argument("--steps", type=int, default=40)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--float16", action="store_true", help="also float16, slow on most CPUs")
    kind.add_argument("--speed", action="store_true", help="measure the time only")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of an episode, about")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, own = np.random.default_rng(0), (arguments.tokens * 3 // 4, arguments.tokens)
    vocabulary = make_model(arguments.size).config.vocab_size
    batches = [
        multi_turn_group(rng, vocabulary=vocabulary, shared=4, own=own, size=4)
        for _ in range(arguments.steps)
    ]
    if arguments.speed:
        show_speed(arguments.size, batches[0])
        return
    ways = [
        (torch.float32, True),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        *([(torch.float16, False), (torch.float16, True)] if arguments.float16 else []),
    ]
    print(f"{arguments.steps} steps of {arguments.size}, learning rate 1e-6")
    print(f"{'weights':28} {'moved':>10} {'of float32':>11} {'largest':>9} {'changed':>8} {'s':>6}")
    wanted = 0.0
    for dtype, with_masters in ways:
        moved, largest, share, seconds = train(
            arguments.size, dtype, with_masters=with_masters, batches=batches
        )
        wanted = wanted or moved
        name = str(dtype).removeprefix("torch.")
        name += "" if dtype == torch.float32 else ", masters" if with_masters else ", AdamW on them"
        row = f"{name:28} {moved:10.4g} {moved / wanted:11.1%} {largest:9.2g} {share:8.2%}"
        print(f"{row} {seconds:6.0f}", flush=True)


if __name__ == "__main__":
    main()
