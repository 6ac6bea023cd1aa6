"""An environment in a process of its own gives the same episodes and dies alone."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from support.jails import eventually, is_alive

from gspo_env.env.isolated import IsolatedEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, UnknownEnvironmentError
from gspo_env.rollout.play import demonstrator, play_now
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import StopReason, Task

FILE = '''
import ctypes, os, sys, time
import numpy as np
from gspo_env import TextEnv

class Odd(TextEnv):
    """Does what the action says."""
    gives_outcome = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.system_prompt = f"Task {seed}."
        return "begin", {"task_key": seed, "object": object(), 3: {1, 2}}

    def step(self, action):
        print("printed to stdout")
        if action == "segfault":
            ctypes.string_at(0)
        if action == "exit":
            os._exit(5)
        if action == "system":
            sys.exit(3)
        if action == "hang":
            time.sleep(1000)
        if action == "long":
            return "a" * 10_000_000, 0.0, False, False, {}
        if action == "image":
            return np.zeros(3), 0.0, False, False, {}
        if action == "flood":
            return "x", 0.0, False, False, {"extra": "a" * (80 * 2**20)}
        if action == "raise":
            raise OSError("lost")
        info = {"success": np.bool_(True), "token_mask": np.ones(2, bool)}
        return "na\\u00efve \\ud800", np.float32(0.5), True, False, info
'''


@pytest.fixture
def odd(tmp_path):
    (tmp_path / "odd.py").write_text(FILE)
    env = IsolatedEnv(f"{tmp_path}/odd.py:Odd", timeout=3.0)
    yield env
    env.close()


def task(n=0):
    return Task(env_id="test", seed=n)


def test_plain_data_crosses_and_the_episode_has_its_prompt(odd):
    episode = play_now(odd, task(4), lambda now: "go")
    assert (episode.stop_reason, episode.success) == (StopReason.TERMINATED, True)
    assert episode.prompt.system == "Task 4."
    assert episode.reset.task_key == "4"
    assert episode.reset.extra["object"].startswith("<object")
    assert episode.final_observation == "naïve \ud800"
    assert episode.turns[0].info.token_mask == (True, True)
    assert episode.rewards.tolist() == [0.5]
    assert odd.gives_outcome is False


@pytest.mark.parametrize(
    ("action", "reason", "words"),
    [
        ("segfault", StopReason.CRASH, "step: the process of the environment ended with signal 11"),
        ("exit", StopReason.CRASH, "ended with exit code 5"),
        ("system", StopReason.ERROR, r"step\('system'\) raised SystemExit: 3 \(.*odd.py:\d+ in st"),
        ("raise", StopReason.ERROR, r"step\('raise'\) raised OSError: lost \(.*odd.py:\d+ in step"),
        ("hang", StopReason.ENV_TIMEOUT, "step did not return within 3 s"),
        ("long", StopReason.INVALID, "with 10,000,000 characters"),
        ("image", StopReason.INVALID, "step.. observation is array"),
        ("flood", StopReason.CRASH, "bad message length"),
    ],
)
def test_whatever_a_child_does_costs_one_episode(odd, action, reason, words):
    episode = play_now(odd, task(), lambda now: action)
    assert episode.stop_reason is reason
    (fault,) = episode.faults
    assert re.search(words, fault.message), fault.message
    assert play_now(odd, task(), lambda now: "go").success


def test_an_isolated_tool_environment_is_the_same_with_its_demonstrator():
    here, there = make_env("gspo/Lookup-v0"), IsolatedEnv("gspo/Lookup-v0", {})
    for n in range(3):
        one, two = (play_now(env, task(n), demonstrator(0.3)) for env in (here, there))
        assert [t.text for t in one.turns] == [t.text for t in two.turns]
        assert one.rewards.tolist() == two.rewards.tolist()
        assert [tool.schema for tool in one.prompt.tools] == [t.schema for t in two.prompt.tools]
        assert one.prompt.system == two.prompt.system
        assert (one.outcome, one.success) == (two.outcome, two.success)
    there.close()


def test_what_cannot_be_made_is_an_error_of_the_same_kind(tmp_path):
    with pytest.raises(ConfigError, match="hops"):
        IsolatedEnv("gspo/Lookup-v0", {"hops": -4})
    with pytest.raises(UnknownEnvironmentError):
        IsolatedEnv("gspo/Nothing-v0")


def test_a_child_dies_with_its_parent_even_if_it_hangs(tmp_path):
    (tmp_path / "odd.py").write_text(FILE)
    program = f"""
    import threading
    from gspo_env.env.isolated import IsolatedEnv
    env = IsolatedEnv("{tmp_path}/odd.py:Odd")
    env.reset(seed=0)
    print(env._process.pid, flush=True)
    env.step("hang")
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    child = parent.stdout.readline().strip()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: not is_alive(child))


def test_the_start_of_a_process_does_not_count_as_time_of_an_episode():
    def make():
        return IsolatedEnv("gspo/Lookup-v0", timeout=0.05)  # imports take longer

    async def use():
        pool.give_back(await pool.acquire(0.05))

    sample = make()
    pool = EnvPool(make, sample)
    asyncio.run(use())
    assert not pool.faults.counts
    pool.close()
    sample.close()
