"""Rollouts of a real model, for tests of several files."""

import asyncio
from typing import Any

from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import Episode, Group, Task


def collector(player: Any, make: Any, engine: Any = TransformersEngine, **config: Any) -> Collector:
    """A collector of episodes that the player's model plays in the environments of `make`."""
    settings = RolloutConfig(**{"max_turn_tokens": 32, "max_context": 512, **config})
    running = engine(player.model, max_slots=settings.concurrency, max_context=settings.max_context)
    pool = EnvPool(make, blocking=getattr(make, "blocking", None))
    return Collector(running, player.chat, pool, settings)


def play(
    running: Collector, tasks: int = 4, size: int = 4, seed: int = 0, **options: Any
) -> list[Group]:
    every = [Task(env_id="test", seed=n) for n in range(tasks)]
    return asyncio.run(running.collect(every, seed=seed, group_size=size, **options))


def episodes(groups: list[Group]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]
