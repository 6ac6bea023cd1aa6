"""Failures that are injected are counted exactly, by the wrapper and by training."""

from __future__ import annotations

import asyncio
import math

import pytest
from faulty import faulty, injected

from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.metrics import RolloutStats
from gspo_env.rollout.play import demonstrator, play_now
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import StopReason, Task

TASK = Task(env_id="test", seed=0)


def faults(rates, episodes=60, **settings):
    env = faulty("gspo/Lookup-v0", rates, **settings)
    played = [play_now(env, Task(env_id="test", seed=n), demonstrator()) for n in range(episodes)]
    return env, [fault for e in played for fault in e.faults]


@pytest.mark.parametrize("kind", ["exception", "exit", "nan", "type", "long"])
def test_each_kind_is_one_failure_of_an_episode_and_is_counted(kind, tmp_path):
    env, found = faults({kind: 0.1}, log=str(tmp_path / "log"))
    assert len(found) == env.injected[kind] == injected(tmp_path / "log").total() > 0
    expected = StopReason.ERROR if kind in ("exception", "exit") else StopReason.INVALID
    assert {fault.reason for fault in found} == {expected}


@pytest.mark.slow
def test_training_counts_exactly_what_was_injected(player, tmp_path):
    log = str(tmp_path / "log")
    rates = {"exception": 0.05, "exit": 0.03, "nan": 0.05, "type": 0.04, "hang": 0.03}

    def make():
        return faulty(player.env_id, rates, log=log, hang=4.0)

    settings = RolloutConfig(
        max_turn_tokens=32,
        max_context=512,
        episode_timeout=3.0,
        max_env_error_rate=1.0,  # 23 to 26 of 64 episodes are lost, by the order of threads
    )
    engine = TransformersEngine(player.model, max_slots=64, max_context=512)
    collector = Collector(engine, player.chat, EnvPool(make), settings)
    tasks = [Task(env_id=player.env_id, seed=n) for n in range(8)]
    groups = asyncio.run(collector.collect(tasks, seed=0, group_size=8))
    counts = injected(log)
    metrics = RolloutStats(groups, 1.0).metrics()
    assert metrics["rollout/env_timeouts"] == counts["hang"]
    assert metrics["rollout/env_errors"] == counts.total() - counts["hang"] > 5
    failures = metrics["rollout/retried"] + metrics["rollout/lost_episodes"]
    assert failures == counts.total() == collector.pool.faults.counts.total()
    assert math.isfinite(metrics["rollout/return"])
    collector.pool.close()
