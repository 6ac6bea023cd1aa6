"""Failures that are injected are counted exactly, by the wrapper and by training."""

from __future__ import annotations

import asyncio
import math

import pytest
from faulty import Faulty, faulty, injected

from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError
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


def test_the_rates_are_kept_and_the_seed_repeats(tmp_path):
    def played(seed, name):
        _, found = faults({"exception": 0.1, "nan": 0.1}, seed=seed, log=str(tmp_path / name))
        return [fault.reason for fault in found]

    assert played(1, "a") == played(1, "b") != played(2, "c")


@pytest.mark.parametrize("rates", [{"fire": 0.1}, {"nan": -0.1}, {"nan": 0.6, "type": 0.6}])
def test_impossible_rates_are_refused(rates):
    with pytest.raises(ConfigError, match="rates is"):
        Faulty("gspo/Lookup-v0", rates)


def test_it_is_made_by_name_as_a_command_line_would():
    env = make_env("faulty:Faulty", env="gspo/Lookup-v0", rates={"nan": 1.0}, hops=3)
    assert env.reset(seed=0)[0] is None
    assert make_env("faulty:Faulty", env="gspo/Lookup-v0", rates={}).reset(seed=0)[0]


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
