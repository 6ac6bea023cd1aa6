"""A rollout without progress logs what it is waiting for; one with progress does not."""

import asyncio
import logging
import threading
import time

import pytest
from support.scripted_engine import Scripted

from gspo_env.env.base import TextEnv
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.progress import Heartbeat
from gspo_env.types import Task


class Held(TextEnv):
    """Waits in its second step, or not at all."""

    def __init__(self, blocking, gate=None):
        self.blocking, self.gate, self.turn = blocking, gate, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "go on", {}

    def step(self, action):
        self.turn += 1
        if self.gate is not None and self.turn == 2:
            self.gate.wait(20)
        return "go on", 0.0, self.turn == 3, False, {}


class Engine(Scripted):
    """Answers at once, or when it is allowed to."""

    def __init__(self, gate=None):
        super().__init__(lambda prompt_ids, sampling: sampling.stop_ids[:1])
        self.gate = gate

    async def generate(self, prompt_ids, sampling, session=None):
        while self.gate is not None and not self.gate.is_set():
            await asyncio.sleep(0.01)
        return await super().generate(prompt_ids, sampling, session)


def collected(chat, engine, make, seconds, caplog, release=None):
    """Plays two groups; returns the lines of the heartbeat. `release` is set after the first."""
    settings = RolloutConfig(max_turn_tokens=8, max_context=256)
    running = Collector(engine, chat, EnvPool(make), settings, stall_seconds=seconds)
    tasks = [Task(env_id="test/Held", seed=n) for n in range(2)]
    caplog.set_level(logging.WARNING)

    def let_go():
        while not lines(caplog) and threading.main_thread().is_alive():
            time.sleep(0.01)
        release.set()

    if release is not None:
        threading.Thread(target=let_go, daemon=True).start()
    asyncio.run(running.collect(tasks, seed=0, group_size=2))
    running.pool.close()
    return lines(caplog)


def lines(caplog):
    return [line for line in caplog.messages if line.startswith("no progress")]


@pytest.mark.parametrize(
    ("waits", "blocking", "words"),
    [
        ("engine", False, "wait for the engine (longest: 0 s, test/Held with seed 0, turn 0)"),
        ("environment", True, "4 episodes wait for their environments (longest"),
        ("environment", False, "wait for their environments"),  # it holds up the event loop
    ],
)
def test_what_the_episodes_wait_for_is_named(chat, caplog, waits, blocking, words):
    gate = threading.Event()
    engine, held = (gate, None) if waits == "engine" else (None, gate)
    lines = collected(chat, Engine(engine), lambda: Held(blocking, held), 0.1, caplog, gate)
    assert words in lines[0]
    holds = "tests/rollout/test_progress.py:"
    assert (holds in lines[0] and " in step holds the event loop" in lines[0]) == (
        waits == "environment" and not blocking
    )


def test_synchronous_code_in_an_asynchronous_judge_is_named(chat, caplog):
    gate = threading.Event()

    class Judged(Held):
        async def group_reward(self, group):
            gate.wait(20)
            return group

    lines = collected(chat, Engine(), lambda: Judged(False), 0.1, caplog, gate)
    assert "test_progress.py:" in lines[0]
    assert "in group_reward holds the event loop, where no limit can end it" in lines[0]


def test_nothing_is_said_while_something_comes(chat, caplog):
    assert collected(chat, Engine(), lambda: Held(False), 5.0, caplog) == []


def test_the_thread_ends_with_what_it_watches():
    beat, before = Heartbeat(lambda: 0.0, str, 60.0), set(threading.enumerate())
    with beat.watching(), beat.watching():
        (thread,) = set(threading.enumerate()) - before
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(ValueError, match="over"), beat.watching():
        raise ValueError("over")
