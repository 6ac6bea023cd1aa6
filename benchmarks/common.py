"""What the benchmarks share: a model that plays, episodes of it, and alternating timing."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo_env.chat import ChatTokenizer
from gspo_env.embedded import EmbeddedConfig, build, to_samples, warm_up
from gspo_env.engines.transformers import TransformersEngine
from gspo_env.registration import make_env
from gspo_env.rollout import Collector, EnvPool, RolloutConfig
from gspo_env.types import Group, Task

ENV = "gspo/Lookup-v0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """The default recipe's model after a short warm-up, which is enough to end its turns."""

    model: Any
    tokenizer: Any
    chat: ChatTokenizer


def make_player(steps: int = 100) -> Player:
    """Builds the default model and lets it imitate for a few steps."""
    env = make_env(ENV)
    config = EmbeddedConfig(demonstrations=1000, imitation_steps=steps)
    model, tokenizer, demonstrations = build(env, ENV, config, 0)
    chat = ChatTokenizer(tokenizer)
    warm_up(model, to_samples(demonstrations, chat, env), config, 0, lambda step, loss: None)
    return Player(model=model, tokenizer=tokenizer, chat=chat)


def make_collector(player: Player, config: RolloutConfig) -> Collector:
    """The rollout of the default recipe."""
    engine = TransformersEngine(
        player.model, max_slots=config.concurrency, max_context=config.max_context
    )
    return Collector(engine, player.chat, EnvPool(lambda: make_env(ENV)), config)


def collect(collector: Collector, tasks: int = 32, seed: int = 0) -> list[Group]:
    """One rollout batch, with nothing cached from before."""
    asyncio.run(collector.engine.update_weights([], seed))
    batch = [Task(env_id=ENV, seed=n) for n in range(tasks)]
    return asyncio.run(collector.collect(batch, seed=seed))


def alternate(rounds: int, *programs: Callable[[], float]) -> list[list[float]]:
    """Runs the programs in turn; returns what each returned in every round but the first."""
    rows = [[program() for program in programs] for _ in range(rounds + 1)]
    return [list(column) for column in zip(*rows[1:], strict=True)]


def seconds(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def show(name: str, values: list[float], unit: str) -> float:
    """Prints the median and the spread; returns the median."""
    middle = statistics.median(values)
    print(f"{name:44} {middle:10.4g} {unit}  ({min(values):.4g} to {max(values):.4g})")
    return middle
