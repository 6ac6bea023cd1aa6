"""A group goes on without its slowest episode only where it is asked to, and says so."""

from __future__ import annotations

import asyncio

import pytest
from virtual_clock import run

from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.engines import Completion
from gspo_env.env.base import TextEnv
from gspo_env.recipes.build import build_tokenizer
from gspo_env.rollout.collector import Collector, RolloutRequest
from gspo_env.rollout.gate import Gate
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Task

closed = []


class Once(TextEnv):
    blocking = False
    takes_cut_actions = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        return "", 1.0, True, False, {}

    def close(self):
        closed.append(self)


class Engine:
    """Takes 1 to 2 seconds for an action, and an hour for the last episode of one group."""

    def __init__(self):
        self.count, self.released = 0, []

    async def generate(self, prompt_ids, sampling, session=None):
        self.count += 1
        slow = session.startswith("x:99:") and self.count % 4 == 0
        await asyncio.sleep(3600.0 if slow else 1.0 + self.count % 11 / 10)
        return Completion(
            token_ids=(5,) * sampling.max_tokens,
            logprobs=(-1.0,) * sampling.max_tokens,
            finish_reason="length",
            weights_version=0,
        )

    def release(self, session):
        self.released.append(session)


def played(quantile, group_size=4, warm=20):
    """Plays groups whose episodes tell how long one takes, then the one with a slow episode."""
    limits = RolloutConfig(max_turn_tokens=2, max_context=200, episode_timeout=1e5)
    pool = EnvPool(Once, Once())
    collector = Collector(Engine(), ChatTokenizer(build_tokenizer(["go"])), pool, limits)
    gate = Gate(8)

    async def work():
        for seed in (*range(warm), 99):
            started = asyncio.get_running_loop().time()
            closed.clear()
            job = RolloutRequest(
                task=Task(env_id="x", seed=seed),
                seed=seed,
                place=0,
                group_size=group_size,
                temperature=1.0,
                straggler_quantile=quantile,
            )
            group = await collector.play(job, gate)
        assert gate.running == 0
        return group, asyncio.get_running_loop().time() - started

    group, seconds = run(work())
    assert len(collector.engine.released) == collector.engine.count
    return group, seconds


def test_by_default_a_group_waits_for_its_slowest_episode():
    group, seconds = played(1.0)
    assert (len(group.episodes), group.left_out, seconds) == (4, 0, 3600.0)


def test_where_it_is_asked_a_group_goes_on_without_its_slowest_episode_and_counts_it():
    group, seconds = played(0.9)
    assert (len(group.episodes), group.left_out) == (3, 1)
    assert seconds == pytest.approx(1.9, abs=0.2)  # the quantile of the times of the others
    assert len(closed) == 1  # nobody knows in which state its environment is


def test_a_group_waits_while_too_few_episodes_tell_how_long_one_takes():
    group, seconds = played(0.9, warm=3)
    assert (len(group.episodes), group.left_out, seconds) == (4, 0, 3600.0)


def test_a_group_of_two_keeps_both():
    group, _ = played(0.9, group_size=2, warm=41)
    assert (len(group.episodes), group.left_out) == (2, 0)


def test_an_environment_is_not_measured_by_the_times_of_a_faster_one():
    """Every episode of the second environment takes longer than any of the first."""

    class Two(Engine):
        async def generate(self, prompt_ids, sampling, session=None):
            done = await super().generate(prompt_ids, sampling, session)
            await asyncio.sleep(50.0 if session.startswith("slow:") else 0.0)
            return done

    limits = RolloutConfig(max_turn_tokens=2, max_context=200, episode_timeout=1e5)
    pool = EnvPool(Once, Once())
    collector = Collector(Two(), ChatTokenizer(build_tokenizer(["go"])), pool, limits)

    async def work():
        gate, left_out = Gate(8), {"fast": 0, "slow": 0}
        for seed in range(60):
            for env_id in ("fast", "slow") if seed > 20 else ("fast",):
                job = RolloutRequest(
                    task=Task(env_id=env_id, seed=seed),
                    seed=seed,
                    place=0,
                    group_size=4,
                    temperature=1.0,
                    straggler_quantile=1.0 - 1e-9,
                )
                left_out[env_id] += (await collector.play(job, gate)).left_out
        return left_out

    left_out = run(work())
    assert left_out["slow"] <= left_out["fast"] + 1
