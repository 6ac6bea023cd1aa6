"""Compares the simulation with real rollouts through the embedded engine: `simulate.py --check`.

The times of the parts are measured alone, in seconds of the processor: a decoding step for several
sizes of the batch, and a token of a prompt. The controller's time of a turn is the one with which
the simulation takes as long as 16 episodes without sleeps do. Then 16, 64 and 256 episodes in
flight are played whose tools sleep, and the same sleeps are simulated. Actions have the lengths of
the measurement. The simulated times are multiplied by the share of a processor that the real
rollout did not get, which is printed: near 1 on a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from queueing import Result, System, Turn, simulate
from simulate import log_normal

from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.engines import Completion, Sampling
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.base import TextEnv
from gspo_env.recipes.build import build_model, build_tokenizer
from gspo_env.recipes.tiny import Tiny
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import Task

FLIGHTS = (16, 64, 256)
SIZES = (1, 8, 64, 256)
TURNS = 6
MEDIAN, P99 = 0.05, 1.0
"""Seconds of a tool."""
WORDS = ["red", "green", "blue", "one", "two", "three", "four", "river", "stone", "cedar"]
CONTEXT = 512
MOST = 0.15
"""Largest difference of the median of predicted / measured from 1."""
TOKENS = 16
"""Mean tokens of an action: one id in 16 ends it, and random weights like all ids alike."""


def sleeps(seed: int) -> list[float]:
    """Returns the seconds of the tools of an episode."""
    mean, sigma = log_normal(MEDIAN, P99)
    values: list[float] = np.random.default_rng(seed).lognormal(mean, sigma, TURNS).tolist()
    return values


class Sleeper(TextEnv):
    """Six turns, each with a tool that sleeps in a thread."""

    blocking = True

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = [self.scale * seconds for seconds in sleeps(seed or 0)]
        return f"task {seed}: {' '.join(WORDS)}", {}

    def step(self, action: str) -> Any:
        if seconds := self.left.pop(0):
            time.sleep(seconds)
        return " ".join(WORDS[:8]), 0.0, not self.left, False, {}


class Endless(ChatTokenizer):
    """One id in `TOKENS` ends an action."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        size = len(self.tokenizer)
        return tuple(range(size - size // TOKENS, size))


class Watched(TransformersEngine):
    """Adds up the time in which it has a request."""

    requests = 0
    busy = since = 0.0

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        """Counts a request."""
        if not self.requests:
            self.since = time.perf_counter()
        self.requests += 1
        try:
            return await super().generate(*args, **kwargs)
        finally:
            self.requests -= 1
            if not self.requests:
                self.busy += time.perf_counter() - self.since


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A real rollout."""

    seconds: float
    busy: float
    """Seconds in which the engine had a request."""
    worked: float
    """Seconds of the processor, of all threads."""
    tokens: int

    def on(self, system: System) -> System:
        """Returns a system as slow as this rollout's share of a processor made it."""
        slow = self.busy / self.worked
        steps = {n: slow * seconds for n, seconds in system.step.items()}
        return replace(system, step=steps, prefill=slow * system.prefill, host=slow * system.host)


@dataclass(slots=True)
class Bench:
    """A model with random weights that is played again and again."""

    chat: Endless = field(init=False)
    model: Any = field(init=False)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    """New tokens before each measured action, and its own."""

    def __post_init__(self) -> None:
        tokenizer = build_tokenizer([" ".join(WORDS), *(f" {word}" for word in WORDS)])
        self.chat = Endless(tokenizer, history="keep")
        self.model = build_model(Tiny(), len(tokenizer), tokenizer.eos_token_id, 0)

    def engine(self, slots: int) -> Watched:
        return Watched(self.model, max_slots=slots, max_context=CONTEXT)

    def play(self, flight: int, episodes: int, scale: float) -> Played:
        """Plays episodes whose tools sleep."""
        limits = RolloutConfig(
            concurrency=flight, max_turn_tokens=8 * TOKENS, max_context=CONTEXT, max_turns=TURNS
        )
        pool = EnvPool(lambda: Sleeper(scale=scale))
        engine = self.engine(flight)
        collector = Collector(engine, self.chat, pool, limits)
        tasks = [Task(env_id="x", seed=n) for n in range(episodes)]
        started, worked = time.perf_counter(), time.process_time()
        groups = asyncio.run(collector.collect(tasks, seed=0, group_size=1))
        seconds, worked = time.perf_counter() - started, time.process_time() - worked
        pool.close()
        engine.close()
        turns = [turn for g in groups for e in g.episodes for turn in e.turns]
        if not scale:
            self.lengths = [(len(t.prompt_ids), len(t.action_ids)) for t in turns]
        tokens = sum(len(turn.action_ids) for turn in turns)
        return Played(seconds=seconds, busy=engine.busy, worked=worked, tokens=tokens)

    def sample(self, count: int, prompt: int, tokens: int, seed: int) -> float:
        """Returns the processor's seconds of requests of equal lengths that begin together."""
        engine = self.engine(count)
        rng = np.random.default_rng(seed)
        limits = Sampling(max_tokens=tokens, temperature=1.0, seed=seed)

        async def all_of_them() -> None:
            ids = rng.integers(3, 280, (count, prompt)).tolist()
            await asyncio.gather(*(engine.generate(row, limits) for row in ids))

        worked = time.process_time()
        asyncio.run(all_of_them())
        engine.close()
        return time.process_time() - worked

    def measure(self) -> System:
        """Measures the times of the parts, in seconds of the processor."""
        worked = self.play(16, 64, 0.0).worked
        context = round(TURNS / 2 * float(np.mean(np.sum(self.lengths, axis=1))))

        def per(work: Callable[[int], float], few: int, many: int) -> float:
            times = [(work(many) - work(few)) / (many - few) for _ in range(3)]
            return max(statistics.median(times), 1e-7)

        steps = {n: per(lambda t, n=n: self.sample(n, context, t, t), 4, 16) for n in SIZES}
        prefill = per(lambda p: self.sample(16, p, 1, p), context // 2, context + context // 2) / 16
        system = System(step=steps, prefill=prefill, embedded=True, slots=16, concurrency=16)
        low, high = 0.0, 0.02
        for _ in range(12):
            host = (low + high) / 2
            quick = self.simulated(replace(system, host=host), 64, 0.0).seconds < worked
            low, high = (host, high) if quick else (low, host)
        return replace(system, host=low)

    def simulated(self, system: System, episodes: int, scale: float) -> Result:
        """Simulates episodes with the sleeps of the real ones."""
        rng = np.random.default_rng(1)
        seeds = iter(range(episodes))

        def draw() -> list[Turn]:
            chosen = rng.integers(len(self.lengths), size=TURNS)
            tools = sleeps(next(seeds))
            return [Turn(*self.lengths[n], scale * t) for n, t in zip(chosen, tools, strict=True)]

        return simulate(system, draw, episodes)


def check(rounds: int) -> bool:
    """Prints predicted and measured times of real rollouts; returns whether they agree."""
    torch.set_num_threads(1)
    bench = Bench()
    bench.play(16, 32, 0.0)  # the first calls of a process are slow
    ratios: dict[int, list[float]] = {flight: [] for flight in FLIGHTS}
    for _ in range(rounds):
        system = bench.measure()
        steps = ", ".join(f"{n}: {1e3 * seconds:.2f}" for n, seconds in system.step.items())
        print(
            f"milliseconds of a step by requests {steps}; of a token of a prompt "
            f"{1e3 * system.prefill:.3f}, of the controller in a turn {1e3 * system.host:.2f}"
        )
        for flight in FLIGHTS:
            episodes = max(128, 3 * flight)
            played = bench.play(flight, episodes, 1.0)
            here = played.on(replace(system, slots=flight, concurrency=flight))
            found = bench.simulated(here, episodes, 1.0)
            ratios[flight].append(found.seconds / played.seconds)
            print(
                f"{flight:4d} in flight: predicted {found.seconds:.2f} s, measured "
                f"{played.seconds:.2f} s, ratio {ratios[flight][-1]:.3f}; engine idle "
                f"{found.servers_idle:.0%} and {1 - played.busy / played.seconds:.0%}; "
                f"{found.tokens:,} and {played.tokens:,} tokens; a second of the processor took "
                f"{played.busy / played.worked:.2f} s"
            )
    for flight, values in ratios.items():
        middle = statistics.median(values)
        print(f"{flight:4d} in flight: median of predicted / measured {middle:.3f}")
    return all(abs(statistics.median(values) - 1) <= MOST for values in ratios.values())
