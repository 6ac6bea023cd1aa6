"""Measures the extra peak memory of an update with a large vocabulary instead of a small one.

    python benchmarks/memory.py
    python benchmarks/memory.py --preflight [NAME ...] [--threads 1]

Each size runs in a separate process, whose peak resident memory the kernel counts. Weights,
gradients and the two optimiser moments of the head and the embeddings are subtracted. The baseline
is the same update with full logits.

With `--preflight`, it trains with each of six settings and compares what the preflight said with
what the run used: the memory that its process took from the preflight on, and the time of the
processor from there to the end. With a GPU, that is the GPU's memory, and the time of the clock.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

from gspo_env.env.base import TextEnv

MIB = 2**20
SHORT = {"steps": 2, "tasks_per_step": 4, "eval_tasks": 16}
STORY = {"env": "gspo/Story-v0", "rollout": {"max_turn_tokens": 40, "max_context": 512}, **SHORT}
WHOLE = {"model": "smollm2", "model_dtype": "float32", **STORY}
IMITATION = {**SHORT, "steps": 1, "tasks_per_step": 8, "recipe": {"imitation_steps": 16}}
SETTINGS = {
    "SmolLM2, whole, float32": ("", WHOLE),
    "SmolLM2, LoRA": ("", {**WHOLE, "learner": {"lora_rank": 16}}),
    "SmolLM2, whole, bfloat16": ("", {**WHOLE, "model_dtype": "bfloat16"}),
    "SmolLM2, LoRA, imitation": ("smollm2", IMITATION),
    "SmolLM2, whole, checkpointing": ("", {**WHOLE, "learner": {"checkpointing": True}}),
    "SmolLM2, LoRA, 1,200 tokens, 64 episodes": (
        "",
        {
            **WHOLE,
            "env": f"{__file__}:Reading",
            "steps": 1,
            "tasks_per_step": 8,
            "eval_tasks": 8,
            "rollout": {"max_turn_tokens": 40, "max_context": 2048, "concurrency": 64},
            "learner": {"lora_rank": 16},
        },
    ),
}
"""The recipe of each, and its settings."""


class Reading(TextEnv):
    """A long text and a question about it."""

    def reset(self, *, seed=None, options=None):
        """Draws the text."""
        super().reset(seed=seed)
        words = self.np_random.choice(["red", "green", "small", "door", "tree", "walks"], 1150)
        return f"{' '.join(words)}\nWhich of these words is the most frequent?", {}

    def step(self, action):
        """Ends the episode."""
        return "", float(len(action) % 2), True, False, {}


def _update(vocabulary: int, arguments: argparse.Namespace, full: bool, answer) -> None:
    import numpy as np
    import torch
    from common import random_qwen3

    from gspo_env.batch.sample import Sample
    from gspo_env.learner import GSPO, Learner, LearnerConfig

    torch.set_num_threads(1)
    config = LearnerConfig(minibatches=1, warmup_steps=0)
    model = random_qwen3(arguments.hidden, 4, vocabulary, tie_word_embeddings=False)
    learner = Learner(model, GSPO(), config, total_steps=10)
    learner._parallel = None  # the small model has one row at a time too, as the large one
    if full:
        learner.scorer.head = None
    rng = np.random.default_rng(0)
    length = 513  # 512 of them sampled
    count = arguments.tokens // (length - 1)
    samples = [
        Sample(
            token_ids=rng.integers(0, vocabulary, length),
            turn_ids=np.array([-1] + [0] * (length - 1)),
            advantages=np.ones(length - 1) * (-1) ** n,
        )
        for n in range(count)
    ]
    for seed in range(2):  # in the second update the moments of the optimiser exist already
        learner.update(samples, seed)
    answer.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def peak(vocabulary: int, arguments: argparse.Namespace, full: bool = False) -> int:
    """Measures the peak bytes of two updates."""
    return in_child(_update, vocabulary, arguments, full)


def _train(name: str, threads: int, answer) -> None:
    import psutil
    import torch

    import gspo_agents.preflight
    from gspo_agents.gspo import GSPOAgent
    from gspo_env.config import Config, override

    gpu = torch.cuda.is_available()
    clock = time.perf_counter if gpu else time.process_time
    time.perf_counter = clock  # the run's own metrics, too
    torch.set_num_threads(threads)
    recipe, tree = SETTINGS[name]
    config = Config.from_recipe(recipe) if recipe else Config()
    with tempfile.TemporaryDirectory() as folder:
        config = override(config, {**tree, "output": folder, "tracker": "none"})
        agent = GSPOAgent(config=config)
        agent._gather()
        trim()
        before = torch.cuda.memory_allocated() if gpu else psutil.Process().memory_info().rss
        began = clock()
        start = agent._start
        estimate = gspo_agents.preflight.estimate(agent, start.episodes if start else ())
        measured = clock() - began
        gspo_agents.preflight.check = lambda agent, demonstrations: []  # once is enough
        began = clock()
        trim()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        history = agent.train()
        seconds = (clock() - began) / (1 if gpu else threads)
        most = torch.cuda.max_memory_allocated if gpu else lambda: high_water()
        peak = most() - before
    parts = {}
    for part in ("rollout", "update", "eval"):
        parts[part] = sum(m.get(f"time/{part}", 0.0) for _, m in history)
    answer.put((estimate, measured, peak, seconds, parts))


def trim() -> None:
    """Gives memory that is free back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def high_water() -> int:
    """Returns the most bytes that this process has had in memory."""
    text = Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return 1024 * int(lines["VmHWM"].split()[0])


def compare_preflight(names: list[str], threads: int) -> None:
    """Prints what the preflight said of each setting, and what the run used."""
    print("| setting | memory, said | used | ratio | time, said | used | ratio | preflight |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        said, measured, peak, seconds, parts = in_child(_train, name, threads)
        print(
            f"| {name} | {said.more / 1e9:.2f} GB | {peak / 1e9:.2f} GB | {said.more / peak:.2f} "
            f"| {said.seconds:.0f} s | {seconds:.0f} s | {said.seconds / seconds:.2f} "
            f"| {measured:.0f} s |",
            flush=True,
        )
        print(said, parts, flush=True)


def in_child(function, *arguments):
    """Calls a function in a process of its own; returns what it puts into the queue."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=function, args=(*arguments, answer))
    child.start()
    while child.is_alive() and answer.empty():
        time.sleep(0.1)
    if answer.empty():
        raise SystemExit(f"the process of {arguments[0]} ended {child.exitcode}")
    result = answer.get()
    child.join()
    return result


def main() -> None:
    """Prints the cost of the larger vocabulary, with chunked and with full logits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="also with full logits (8 GiB)")
    parser.add_argument("--preflight", nargs="*", metavar="NAME", help="compare it with runs")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.preflight is not None:
        compare_preflight(arguments.preflight or list(SETTINGS), arguments.threads)
        return
    small = peak(1000, arguments)
    # embeddings and head, each with its gradient and two moments, in float32
    apart = (arguments.vocabulary - 1000) * arguments.hidden * 2 * 4 * 4
    print(f"vocabulary 1000: peak {small / MIB:.0f} MiB, {arguments.tokens} model tokens")
    for full in (False, True) if arguments.full else (False,):
        large = peak(arguments.vocabulary, arguments, full)
        name = "full logits" if full else "chunked head"
        print(
            f"vocabulary {arguments.vocabulary}, {name}: peak {large / MIB:.0f} MiB, "
            f"{apart / MIB:.0f} MiB of it weights, gradients and optimiser state"
        )
        over = large - small - apart
        wanted = "" if full else f"; at most 400 MB wanted: {'met' if over <= 4e8 else 'NOT met'}"
        print(f"  above the small vocabulary: {over / 1e6:.0f} MB{wanted}")


if __name__ == "__main__":
    main()
