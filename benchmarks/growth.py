"""Measures how rollout and update grow, and what the framework itself costs.

    python benchmarks/growth.py [--long] [--only PART]

The parts are `overhead` (CPU time of a turn and memory of a waiting episode, with an environment
and an engine that do nothing), `model`, `group`, `turns`, `context` and `flight`. Each of the last
five changes one number, prints the CPU time of the rollout and of the update for each value, and
the slope of log time over log value between the first and the last half. Without `--long` the
values are small. Random weights sample nothing that a template ends, so every action has its
maximum length and the work is known.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from common import cpu_seconds, random_qwen3

from gspo_env.batch.sample import to_samples
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines import Completion, Sampling
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.base import TextEnv, UnicodeText
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.recipes.build import build_tokenizer
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runtime.loops import run_alone
from gspo_env.types import Group, Task

SIZES = {  # hidden size and layers by millions of parameters, with a vocabulary of 16,384
    1: (48, 4),
    4: (128, 8),
    30: (384, 14),
    100: (768, 12),
    500: (1280, 25),
}
ACTION = 8
"""Tokens of an action."""
CHAT = ChatTokenizer(build_tokenizer(["go on wait there"]))


class Idle(TextEnv):
    """An environment that does nothing for some turns; its prompt has some words."""

    blocking = False
    gives_outcome = False
    takes_cut_actions = True
    observation_space = UnicodeText(2**17)

    def __init__(self, turns: int = 4, words: int = 24) -> None:
        super().__init__(max_turns=turns)
        self.prompt = " on" * words

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Returns the prompt."""
        super().reset(seed=seed)
        return self.prompt, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Says a word, until the turns are over."""
        terminated, truncated = self.end_turn(False)
        return "wait", 0.0, terminated, truncated, {}


class Instant:
    """An engine that answers at once, or, with a gate, when that opens."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.gate, self.waiting, self.tokens = gate, 0, 0
        self._ids = (*CHAT.encode(" there"), CHAT.stop_ids[0])

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Returns one word and the end of the turn."""
        if self.gate is not None:
            self.waiting, self.tokens = self.waiting + 1, self.tokens + len(prompt_ids)
            await self.gate.wait()
        return Completion(
            token_ids=self._ids,
            logprobs=(-1.0,) * len(self._ids),
            finish_reason="stop",
            weights_version=0,
        )

    def release(self, session: str) -> None:
        """Has nothing to release."""


def collector(engine: Any, turns: int, words: int, **limits: Any) -> Collector:
    """Makes a collector of idle environments."""
    given = {"max_turns": turns, "max_turn_tokens": ACTION, "max_context": 2**16, **limits}
    return Collector(engine, CHAT, EnvPool(lambda: Idle(turns, words)), RolloutConfig(**given))


def tasks(count: int) -> list[Task]:
    """Makes tasks of the idle environment."""
    return [Task(env_id="idle", seed=n) for n in range(count)]


def turn_microseconds(rounds: int = 7) -> float:
    """Measures the CPU time of a turn with an instant environment and engine."""
    source, times = collector(Instant(), 16, 24), []
    for n in range(rounds + 1):
        gc.collect()
        gc.freeze()  # as a run does
        times.append(cpu_seconds(lambda n=n: run_alone(source.collect(tasks(8), seed=n))))
        gc.unfreeze()
    return statistics.median(times[1:]) / (8 * 8 * 16) * 1e6


def episode_bytes(episodes: int = 512, words: int = 200) -> tuple[float, float]:
    """Measures the bytes of an episode that waits for its engine, and the tokens of its prompt."""

    async def measure() -> tuple[float, float]:
        gate = asyncio.Event()
        engine = Instant(gate)
        source = collector(engine, 1, words, concurrency=episodes)
        gate.set()
        await source.collect(tasks(2), seed=0)  # what happens once
        gate.clear()
        engine.waiting = engine.tokens = 0
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        running = asyncio.ensure_future(source.collect(tasks(episodes // 8), seed=1))
        while engine.waiting < episodes:
            await asyncio.sleep(0)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        gate.set()
        await running
        return used / episodes, engine.tokens / episodes

    tracemalloc.start()
    try:
        return asyncio.run(measure())
    finally:
        tracemalloc.stop()


def overhead() -> None:
    """Prints both; a token of a waiting prompt counts 8 bytes in each of the lists that hold it."""
    spent = turn_microseconds()
    print(f"framework's CPU time of a turn: {spent:.0f} us  (at most 100 wanted)")
    used, tokens = episode_bytes()
    print(
        f"memory of a waiting episode: {used / 1e3:.1f} kB with a prompt of {tokens:.0f} tokens "
        f"({8 * tokens / 1e3:.1f} kB as one list)  (at most 50 kB beyond its tokens wanted)"
    )


def measure(
    millions: int = 1,
    group: int = 8,
    turns: int = 4,
    words: int = 24,
    groups: int = 4,
    flight: int = 256,
) -> tuple[float, float, int]:
    """Returns the CPU seconds of a rollout and of the update on it, and the tokens of all episodes.

    Args:
        millions: Parameters of the model, in millions.
        group: Episodes of a task.
        turns: Turns of an episode.
        words: Words of the prompt, one token each.
        groups: Tasks.
        flight: Episodes in flight.
    """
    context = words + turns * (ACTION + 16) + 64
    model = random_qwen3(*SIZES[millions], 16_384, max_position_embeddings=context)
    slots = min(flight, group * groups)
    engine = TransformersEngine(model, max_slots=slots, max_context=context)
    limits = {"group_size": group, "concurrency": flight, "max_context": context}
    source = collector(engine, turns, words, **limits)
    played: list[Group] = []

    def roll(seed: int) -> Callable[[], None]:
        return lambda: played.extend(run_alone(source.collect(tasks(groups), seed=seed)))

    roll(0)()
    asyncio.run(engine.update_weights([], 1))
    played.clear()
    rollout = cpu_seconds(roll(1))
    episodes = [e for g in played for e in g.episodes if e.turns]
    samples = to_samples(episodes, [np.ones(len(e.turns)) for e in episodes])
    settings = LearnerConfig(learning_rate=1e-9, warmup_steps=0)
    learner = Learner(model, GSPO(), settings, total_steps=9)
    update = cpu_seconds(lambda: learner.update(samples))
    return rollout, update, sum(len(s.token_ids) for s in samples)


SHORT: dict[str, tuple[str, list[int], dict[str, int]]] = {
    "model": ("millions", [1, 4, 30], {"groups": 1}),
    "group": ("group", [4, 8, 16, 32], {"groups": 2}),
    "turns": ("turns", [2, 4, 8, 16], {"groups": 1}),
    "context": ("words", [128, 512, 2048], {"groups": 1, "group": 2}),
    "flight": ("flight", [8, 32, 128], {"groups": 16}),
}
LONG: dict[str, tuple[str, list[int], dict[str, int]]] = {
    "model": ("millions", [1, 4, 30, 100, 500], {"groups": 4}),
    "group": ("group", [4, 8, 16, 32, 64, 128], {"groups": 4}),
    "turns": ("turns", [2, 4, 8, 16, 32, 64], {"groups": 4}),
    "context": ("words", [128, 512, 2048, 8192, 16_384, 32_768], {"groups": 1, "group": 4}),
    "flight": ("flight", [8, 32, 128, 512, 1024], {"groups": 128}),
}
"""For each part: the number that changes, its values, and the others that are not as by default."""


def grow(part: str, long: bool) -> None:
    """Prints the times of one part and their slopes."""
    name, values, others = (LONG if long else SHORT)[part]
    print(f"\n{part}: {name} = {values}, {others}", flush=True)
    rollouts, updates = [], []
    for value in values:
        rollout, update, tokens = measure(**{name: value}, **others)
        text = f"  {value:6}  rollout {rollout:9.3f} s  update {update:9.3f} s  {tokens:9} tokens"
        print(text, flush=True)  # the next value may take an hour
        rollouts.append(rollout)
        updates.append(update)
    print(f"  slope of the rollout: {_slope(values, rollouts)}")
    print(f"  slope of the update: {_slope(values, updates)}")


def _slope(values: Sequence[int], times: Sequence[float]) -> str:
    middle = len(values) // 2
    parts = [(values[: middle + 1], times[: middle + 1]), (values[middle:], times[middle:])]
    slopes = [np.polyfit(np.log(x), np.log(y), 1)[0] for x, y in parts]
    return f"{slopes[0]:.2f} up to {values[middle]}, {slopes[1]:.2f} behind"


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--long", action="store_true", help="up to 500 M parameters; hours")
    parser.add_argument("--only", default="", choices=["", "overhead", *SHORT])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only in ("", "overhead"):
        overhead()
    for part in SHORT:
        if arguments.only in ("", part):
            grow(part, arguments.long)


if __name__ == "__main__":
    main()
