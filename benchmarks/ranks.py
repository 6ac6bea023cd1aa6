"""Compares two ranks of FSDP2 with one process: gradients, cost, and what a short run learns.

    python benchmarks/ranks.py                # gradients and cost, about a minute
    python benchmarks/ranks.py --learn 20     # also a run of 20 steps with each; some minutes

Both ranks are processes of this machine, on a CPU by gloo. With a core for each rank, two ranks
could take half the time of one process; what they send each other is the rest.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gspo_env.batch.sample import Sample
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.learner.controller import Controller, Plan, serve
from gspo_env.learner.ranks import Ranks, join
from gspo_env.model.load import add_adapter

PLAIN = {"minibatches": 1, "warmup_steps": 0, "microbatch_tokens": 2048}
GRADIENT = {**PLAIN, "learning_rate": 1.0, "max_grad_norm": 0.0, "optimizer": "torch.optim:SGD"}
UPDATES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is compared."""

    name: str
    tied: bool = False
    lora_rank: int = 0
    episodes: int = 24


CASES = (
    Case(name="full, untied head"),
    Case(name="full, tied head", tied=True),
    Case(name="LoRA, untied head", lora_rank=4),
    Case(name="LoRA, tied head", lora_rank=4, tied=True),
    Case(name="3 episodes", episodes=3),
    Case(name="1 episode: a rank has none", episodes=1),
)


def make_model(case: Case, hidden: int = 64) -> Any:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        tie_word_embeddings=case.tied,
    )
    model: Any = Qwen3ForCausalLM(shape)
    if case.lora_rank:
        model = add_adapter(model, case.lora_rank)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.02)
    return model


def make_samples(count: int, longest: int = 200) -> list[Sample]:
    rng = np.random.default_rng(count)
    samples = []
    for _ in range(count):
        length = int(rng.integers(longest // 4, longest))
        turns = np.where(rng.random(length) < 0.5, 0, -1)
        turns[0], turns[-1] = -1, 0
        ids, advantages = rng.integers(1, 512, length), rng.normal(size=(turns >= 0).sum())
        samples.append(Sample(token_ids=ids, turn_ids=turns, advantages=advantages))
    return samples


def plan_of(text: str) -> Plan:
    config = LearnerConfig(**json.loads(text))
    return Plan(loss=GSPO(), config=config, total_steps=100, temperature=1.0)


def both(ranks: Ranks, whole: Any, config: LearnerConfig) -> tuple[Learner, Controller]:
    alone = Learner(copy.deepcopy(whole), GSPO(), config, total_steps=100)
    text = json.dumps(asdict(config))
    return alone, Controller(ranks, whole, plan_of(text), text)


def gradient(ranks: Ranks, case: Case) -> None:
    """One step of SGD with a learning rate of 1 subtracts the gradient."""
    whole = make_model(case)
    config = LearnerConfig(**{**GRADIENT, "lora_rank": case.lora_rank})
    before = {name: weight.detach().clone() for name, weight in whole.named_parameters()}
    alone, together = both(ranks, whole, config)
    samples = make_samples(case.episodes)
    alone.update(samples)
    together.update(samples)
    expected = {n: before[n] - w.detach() for n, w in alone.policy.named_parameters()}
    found = {n: before[n] - w.detach() for n, w in whole.named_parameters()}
    difference = max(float((expected[n] - found[n]).abs().max()) for n in found)
    largest = max(float(value.abs().max()) for value in expected.values())
    print(f"{case.name:28}  {difference:9.1e}  {largest:9.2g}", flush=True)


def cost(ranks: Ranks) -> None:
    """Updates in turn, with one process and with two ranks; the other rank waits meanwhile."""
    whole = make_model(CASES[0], hidden=256)
    alone, together = both(ranks, whole, LearnerConfig(**PLAIN))
    samples = make_samples(48)
    tokens = sum(len(sample.token_ids) for sample in samples)
    seconds: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(UPDATES + 1):
        for name, learner in (("one", alone), ("two", together)):
            started = time.perf_counter()
            learner.update(samples)
            seconds[name].append(time.perf_counter() - started)
    one, two = (statistics.median(values[1:]) for values in seconds.values())
    size = sum(weight.numel() for weight in whole.parameters()) / 1e6
    print(f"update of {tokens:,} tokens, {size:.1f} million weights, one thread a process:")
    print(f"one process {one:.2f} s, two ranks {two:.2f} s: {two / one:.2f} times the time")


def learn(steps: int) -> None:
    """Runs the default task with one process and with two; prints the success before and after."""
    with tempfile.TemporaryDirectory() as folder:
        for processes in (1, 2):
            flags = ["--steps", str(steps), "--processes", str(processes), "--tracker", "none"]
            out = Path(folder, str(processes))
            command = [sys.executable, "-m", "gspo_env", "train", *flags, "--output", str(out)]
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - started
            saved = max((out / "checkpoints").glob("step-*"))
            history = json.loads((saved / "state.json").read_text())["history"]
            found = [m["eval/success"] for _, m in history if "eval/success" in m]
            texts = f"success {found[0]:.1%} -> {found[-1]:.1%}"
            print(f"{processes} process(es): {texts}, {seconds:.0f} s", flush=True)


def rank() -> None:
    torch.set_num_threads(1)
    with join() as ranks:
        if ranks.rank:
            serve(ranks, plan_of)
            return
        print(f"{'largest difference':>39}  gradient")
        for case in CASES:
            gradient(ranks, case)
        cost(ranks)


def main() -> None:
    if "RANK" in os.environ:
        rank()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learn", type=int, default=0, help="steps of a run with each")
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **together, "RANK": str(n), "LOCAL_RANK": str(n)},
        )
        for n in range(2)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit("a rank failed")
    if asked.learn:
        learn(asked.learn)


if __name__ == "__main__":
    main()
