"""A failure of an environment costs one attempt at one episode, and every failure is counted."""

import asyncio
import logging
import sqlite3
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from functools import partial

import pytest
from support import rollouts
from support.jails import run_python
from support.rollouts import collector, episodes
from support.scripted_engine import Scripted
from support.small_env import Small

from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.metrics import Evaluation, RolloutStats
from gspo_env.rollout.play import play as play_episode
from gspo_env.rollout.play import play_now
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runtime.threads import EnvThread
from gspo_env.types import FAILURES, StopReason, Task


class Asks(Small):
    first = 'Follow 2 links from "amber".'
    blocking = None


class Counted(Asks):
    """Fails as `fault` says in the first step of the instances with the numbers in `bad`."""

    made: list
    bad: frozenset[int] = frozenset()
    fault = "raise"
    closed = 0

    def __init__(self):
        self.number = len(self.made)
        self.made.append(self)

    def step(self, action):
        result = ["end", 1.0, True, False, {"success": True}]
        if self.number in self.bad:
            if self.fault == "raise":
                raise OSError("lost")
            if self.fault == "exit":
                sys.exit(3)
            if self.fault == "cancel":
                raise asyncio.CancelledError
            if self.fault == "unreadable":
                raise Unreadable
            if self.fault == "long":
                result[0] = "a" * 10_000_000
            elif self.fault == "odd":
                result[0] = Unreadable()
            else:
                result[1] = {"nan": float("nan"), "inf": float("inf"), "text": "much"}[self.fault]
        return tuple(result)

    def close(self):
        self.closed += 1


class Unreadable(Exception):
    """Cannot even be shown."""

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


play = partial(rollouts.play, tasks=2)


def counted(**attributes):
    return type("Fresh", (Counted,), {"made": [], **attributes})


def sampled(episode):
    return [turn.action_ids for turn in episode.turns]


REASONS = {
    **dict.fromkeys(("raise", "exit", "cancel", "unreadable"), StopReason.ERROR),
    **dict.fromkeys(("long", "odd", "nan", "inf", "text"), StopReason.INVALID),
}


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("fault", REASONS)
def test_a_fault_costs_one_attempt_and_its_environment_is_closed(player, fault, blocking):
    env = counted(fault=fault, bad=frozenset({1, 4}), blocking=blocking)
    running = collector(player, env, max_turns=1)
    groups = play(running)
    running.pool.close()
    everything = episodes(groups)
    assert not any(e.failed for e in everything)
    reached = [e for e in everything if e.faults]
    assert reached
    assert {f.reason for e in reached for f in e.faults} == {REASONS[fault]}
    metrics = RolloutStats(groups, 1.0).metrics()
    assert metrics["rollout/env_errors"] == metrics["rollout/retried"] == len(reached)
    assert metrics["rollout/lost_episodes"] == metrics["rollout/env_timeouts"] == 0
    assert all(one.closed == 1 for one in env.made)


def attempted(player, bad, retries):
    env = counted(bad=frozenset(bad), blocking=False)
    every = episodes(play(collector(player, env, max_retries=retries)))
    return [(sampled(e), bool(e.faults)) for e in every]


def test_an_episode_that_is_played_again_is_the_one_that_would_have_been_played(player):
    whole, again = attempted(player, (), 2), attempted(player, {0, 3, 5}, 2)
    assert sum(retried for _, retried in again) == 3
    assert [ids for ids, _ in again] == [ids for ids, _ in whole]


def test_the_last_retry_has_other_random_numbers(player):
    whole, again = attempted(player, (), 1), attempted(player, {0, 3, 5}, 1)
    pairs = list(zip(whole, again, strict=True))
    assert all(retried or before == after for (before, _), (after, retried) in pairs)
    assert any(before != after for (before, _), (after, _) in pairs)


class Hostile(Counted):
    """Fails in every attempt at the tasks of `bad`."""

    def reset(self, *, seed=None, options=None):
        self.number = seed
        return super().reset(seed=seed)


def test_after_the_last_retry_an_episode_is_lost_and_scored_nowhere(player):
    env = type("Fresh", (Hostile,), {"made": [], "bad": {1}, "blocking": False})
    groups = play(collector(player, env, max_turns=1, max_retries=3), tasks=3)
    lost = [e for e in episodes(groups) if e.failed]
    assert 0 < len(lost) <= 4
    assert {e.task.seed for e in lost} == {1}
    assert {len(e.faults) for e in lost} == {4}
    stats = RolloutStats(groups, 1.0)
    metrics = stats.metrics()
    assert metrics["rollout/env_errors"] == 4 * len(lost)
    assert metrics["rollout/retried"] == 3 * len(lost)
    assert metrics["rollout/lost_episodes"] == len(lost)
    assert metrics["rollout/lone_groups"] == (len(lost) >= 3)
    played = [e for e in episodes(groups) if not e.failed]
    assert metrics["rollout/return"] == pytest.approx(
        sum(e.rewards.sum() for e in played) / len(played)
    )
    result = Evaluation(groups, groups, 1.0)
    assert result.sampled.success == pytest.approx(sum(e.success for e in played) / len(played))
    assert result.metrics()["eval/env_errors"] == 8 * len(lost)


@pytest.mark.parametrize(
    ("rate", "bad", "sentence"),
    [
        (0.5, {1}, ""),
        (1.0, {1}, ""),
        (0.25, {1}, r"4 of 8 episodes failed .* at most 25% may; .* lost \("),
        (1.0, {0, 1}, "8 of 8 episodes failed"),
    ],
)
def test_the_error_rate_that_stops_the_run_is_a_setting_and_no_episode_left_stops_it_too(
    player, rate, bad, sentence
):
    env = type("Fresh", (Hostile,), {"made": [], "bad": bad, "blocking": False})
    running = collector(player, env, max_env_error_rate=rate, max_turn_tokens=400)
    with pytest.raises(RolloutError, match=sentence) if sentence else nullcontext():
        assert sum(e.failed for e in episodes(play(running))) == 4


def test_an_environment_that_cannot_be_made_costs_one_attempt(player):
    class Picky(counted(blocking=True)):
        tries = 0

        def __init__(self):
            type(self).tries += 1
            if self.tries == 3:
                sys.exit("no licence")
            super().__init__()

    groups = play(collector(player, Picky, max_turns=1))
    (fault,) = [fault for e in episodes(groups) for fault in e.faults]
    assert fault.message.startswith("__init__() raised SystemExit: no licence (")
    assert not any(e.failed for e in episodes(groups))


def test_a_cause_is_logged_once_with_its_line_and_counted_at_the_end(player, caplog):
    env = counted(bad=frozenset(range(4)), blocking=False)
    running = collector(player, env)
    with caplog.at_level(logging.WARNING):
        play(running)
        failures = running.pool.faults.counts[StopReason.ERROR]
        running.pool.close()
    assert failures > 2
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    assert "OSError: lost (tests/rollout/test_failures.py:" in lines[0]
    assert lines[1].startswith(f"{failures} failures of environments: OSError at tests/rollout")
    assert "in step" in lines[1]
    assert 'raise OSError("lost")' in running.pool.faults.first.traceback


class Database(Asks):
    """Uses a connection that only the thread that made it may use."""

    def __init__(self):
        self.database = self.mine = sqlite3.connect(":memory:")

    def reset(self, *, seed=None, options=None):
        self.database.execute("SELECT 1")
        self.mine = sqlite3.connect(":memory:")
        return super().reset(seed=seed)

    @property
    def system_prompt(self):
        return str(self.mine.execute("SELECT 'Be kind.'").fetchone()[0])

    def step(self, action):
        self.database.execute("SELECT 1")
        (row,) = self.mine.execute("SELECT 1.0")
        return "go on", row[0], False, False, {}

    def close(self):
        self.database.close()
        self.mine.close()
        type(self).closed.append(threading.current_thread())


def test_an_environment_keeps_one_thread_from_its_making_to_its_close(player, caplog):
    Database.closed = []
    running = collector(player, Database, max_turns=4)
    for _ in range(2):
        groups = play(running, tasks=4)
        assert not any(e.faults for e in episodes(groups))
    running.pool.close()
    assert "raised" not in caplog.text
    assert len(set(Database.closed)) == len(Database.closed) > 1
    assert threading.main_thread() not in Database.closed


class Stuck(Asks):
    """Never returns from the first step of some tasks."""

    release = threading.Event()
    stuck: frozenset[int] = frozenset()
    made = 0

    def __init__(self):
        self.number, type(self).made = self.made, self.made + 1

    def step(self, action):
        if self.number in self.stuck:
            self.release.wait()
        return super().step(action)


def quick(chat, env, **limits):
    """A collector whose episodes take no time where nothing hangs."""
    return Collector(
        Scripted(lambda prompt_ids, sampling: (chat.stop_ids[0],)),
        chat,
        EnvPool(env),
        RolloutConfig(max_turn_tokens=8, max_context=256, episode_timeout=1.0, **limits),
    )


def test_a_call_that_never_returns_costs_one_attempt_and_is_counted(chat):
    env = type("Fresh", (Stuck,), {"stuck": {0}, "release": threading.Event()})
    running = quick(chat, env)
    try:
        groups = play(running)
        metrics = RolloutStats(groups, 1.0).metrics()
        assert (metrics["rollout/env_timeouts"], metrics["rollout/retried"]) == (1, 1)
        (fault,) = [fault for e in episodes(groups) for fault in e.faults]
        assert fault.message.startswith("step(")
        assert "had not returned when the 1 s of its episode were over" in fault.message
        assert not any(e.failed for e in episodes(groups))
    finally:
        env.release.set()
        running.pool.close()


def test_too_many_threads_that_hang_stop_the_run(chat):
    env = type("Fresh", (Stuck,), {"stuck": set(range(5)), "release": threading.Event()})
    running = quick(chat, env)
    running.pool.max_stuck = 2
    try:
        with pytest.raises(RolloutError, match=r"[345] environments hang.*rollout.isolation"):
            play(running)
    finally:
        env.release.set()
        running.pool.close()


def test_a_process_with_a_stuck_environment_ends():
    program = """
    import asyncio, threading
    from gspo_env.env.base import TextEnv
    from gspo_env.rollout.play import look
    from gspo_env.rollout.pool import EnvPool, play_pooled
    from gspo_env.types import Task

    class Stuck(TextEnv):
        def reset(self, *, seed=None, options=None):
            threading.Event().wait()

    async def main():
        task = Task(env_id="x", seed=0)
        return (await play_pooled(pool, task, look, timeout=0.1)).stop_reason

    pool = EnvPool(Stuck, close_timeout=0.1)
    print(asyncio.run(main()))
    pool.close()
    """
    done = run_python("-c", textwrap.dedent(program), check=True)
    assert done.stdout.strip() == "env_timeout"


@pytest.mark.parametrize(("seconds", "stop"), [(0.02, "timeout"), (30.0, "env_timeout")])
def test_a_call_that_lasts_as_the_time_runs_out_is_a_hang_only_if_it_goes_on(seconds, stop):
    class Quick(Small):
        def step(self, action):
            done.wait(seconds)
            return "on", 0.0, False, False, {}

    async def compute():  # as the engine does on the event loop
        while True:
            time.sleep(0.06)
            await asyncio.sleep(0)

    async def act(now):
        await asyncio.sleep(0)
        return "yes"

    async def main():
        engine, task = asyncio.create_task(compute()), Task(env_id="x", seed=0)
        calls = [EnvThread().call for _ in range(8)]
        playing = [play_episode(Quick(), task, act, timeout=0.5, call=call) for call in calls]
        try:
            return {episode.stop_reason for episode in await asyncio.gather(*playing)}
        finally:
            done.set()
            engine.cancel()

    done = threading.Event()
    assert asyncio.run(main()) == {stop}


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (KeyError("room"), "expert_action() raised KeyError: 'room' ("),
        (None, "expert_action() is None of type NoneType, expected a str."),
        (5, "expert_action() is 5 of type int, expected a str."),
    ],
)
def test_an_expert_without_an_action_is_a_failure_of_its_environment(action, words):
    from gspo_env.rollout.play import demonstrator

    class Expert(counted(blocking=False)):
        def expert_action(self, noise=0.0):
            if isinstance(action, Exception):
                raise action
            return action

    episode = play_now(Expert(), Task(env_id="x", seed=0), demonstrator())
    assert episode.stop_reason in FAILURES
    assert words in episode.error
