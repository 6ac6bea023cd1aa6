"""Measures what threads cost and give, alone and beside two busy processes.

    python benchmarks/threads.py [--run]

For each size of model: the update and the decoding of 64 sequences with one thread and with torch's
number, which wait passively or actively for each other; and, if the model is small enough, the
update with two rows at a time, each in a thread, and with one. `--run` measures the default recipe
instead (some minutes): alone and beside two busy processes, with the threads that it chooses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHAPES = [(128, 2, 664), (256, 4, 2048), (384, 6, 4096), (512, 8, 8192)]
"""Width, layers and vocabulary of the models."""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keeps the machine busy with endless loops."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def make(hidden: int, layers: int, vocabulary: int) -> Any:
    """Makes a Qwen3 with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
    )
    return Qwen3ForCausalLM(shape)


def measure() -> list[dict[str, float]]:
    """Measures each size in this process: millions of parameters, median seconds by threads."""
    import numpy as np
    import torch
    from common import alternate, multi_turn_group, seconds

    from gspo_env.engines import Sampling
    from gspo_env.engines.transformers import TransformersEngine
    from gspo_env.learner import GSPO, Learner, LearnerConfig

    most, rows = torch.get_num_threads(), []
    for shape in SHAPES:
        model = make(*shape)
        learner = Learner(model, GSPO(), LearnerConfig(minibatches=1), total_steps=100)
        engine = TransformersEngine(model, max_slots=64, max_context=128)
        samples = multi_turn_group(np.random.default_rng(0), vocabulary=600, shared=64)

        async def decode(engine: TransformersEngine = engine) -> None:
            await engine.update_weights([], 1)
            prompts = [[5 + n] * 20 for n in range(64)]
            wanted = [Sampling(max_tokens=16, seed=n) for n in range(64)]
            await asyncio.gather(*map(engine.generate, prompts, wanted))

        def with_threads(threads: int, work: Any) -> float:
            torch.set_num_threads(threads)
            return seconds(work)

        row = {"parameters": sum(p.numel() for p in model.parameters()) / 1e6}
        works = {
            "update": lambda learner=learner, samples=samples: learner.update(samples),
            "decode": lambda decode=decode: asyncio.run(decode()),
        }
        for name, work in works.items():
            one, all_ = alternate(
                3,
                lambda work=work: with_threads(1, work),
                lambda work=work: with_threads(most, work),
            )
            row |= {f"{name} 1": float(np.median(one)), f"{name} {most}": float(np.median(all_))}
        if learner._lanes is not None:
            row |= rows_at_once(learner)
        rows.append(row)
    return rows


def rows_at_once(learner: Any) -> dict[str, float]:
    """Measures an update on 64 episodes of 8 tasks with two rows at a time, and with one."""
    import numpy as np
    import torch
    from common import alternate, multi_turn_group, seconds

    torch.set_num_threads(1)
    rng, lanes = np.random.default_rng(0), learner._lanes
    groups = [multi_turn_group(rng, vocabulary=600, shared=48) for _ in range(8)]
    samples = [sample for group in groups for sample in group]

    def update(at_once: bool) -> float:
        learner._lanes = lanes if at_once else None
        return seconds(lambda: learner.update(samples))

    two, one = alternate(5, lambda: update(True), lambda: update(False))
    learner._lanes = lanes
    return {"two rows at a time": float(np.median(two)), "one": float(np.median(one))}


def child(*arguments: str, **variables: str) -> str:
    """Runs a program of this Python; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")} | variables
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def show_sizes() -> None:
    """Prints the table of sizes."""
    for policy in ("PASSIVE", "ACTIVE"):
        for processes in (0, 2):
            with busy(processes):
                rows = json.loads(child(__file__, "--child", OMP_WAIT_POLICY=policy))
            print(f"{policy.lower()} waiting, beside {processes} busy processes")
            for row in rows:
                print("  ", ", ".join(f"{name}: {value:.3g}" for name, value in row.items()))


def show_run() -> None:
    """Prints the seconds of the default run, alone and busy, and their ratio."""
    import time

    times = {}
    for processes in (0, 2):
        with busy(processes), tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            output = str(Path(folder, "run"))
            train = ["-m", "gspo_env", "train", "--tracker", "none", "--output", output]
            child(*train, XDG_CACHE_HOME=folder)  # or the second one finds the warm-up of the first
            times[processes] = time.perf_counter() - started
        print(f"default run beside {processes} busy processes: {times[processes]:.0f} s")
    print(f"busy / alone: {times[2] / times[0]:.2f} (wanted: at most 2.2)")


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure()))
    elif options.run:
        show_run()
    else:
        show_sizes()


if __name__ == "__main__":
    main()
