"""Code that calls an environment has a limit on each call, and says where a call hangs."""

import asyncio
import gc
import logging
import threading
import time
from functools import partial

import pytest

from gspo_agents.gspo import GSPOAgent
from gspo_agents.scripted import ScriptedAgent
from gspo_env.config import Config
from gspo_env.errors import EnvironmentHangError
from gspo_env.recipes.tiny import Tiny
from gspo_env.runtime import threads
from gspo_env.runtime.loops import ActiveTimeout, rare_garbage_collection
from gspo_env.runtime.threads import EnvThread, call_env, in_thread

HANGS = '''
import time
from gspo_env import TextEnv

class Hangs(TextEnv):
    """Hangs where its argument says, unless the number of calls before is not yet reached."""

    def __init__(self, where, after=0):
        self.where, self.left = where, after
        self.hang("__init__")

    def hang(self, where):
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                time.sleep(1000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.hang("reset")
        return "begin", {}

    def step(self, action):
        self.hang("step")
        return "end", 1.0, True, False, {}

    def expert_action(self, noise=0.0):
        self.hang("expert_action")
        return "yes"

    def close(self):
        self.hang("close")
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    (tmp_path / "hangs.py").write_text(HANGS)


def config(isolation="thread", **kwargs):
    return Config.from_recipe(
        Tiny(hidden_size=16, demonstrations=8, imitation_steps=1),
        env="hangs.py:Hangs",
        env_kwargs=kwargs,
        rollout={"episode_timeout": 1.0, "isolation": isolation},
    )


@pytest.mark.parametrize(
    ("where", "after"),
    [("__init__", 0), ("reset", 0), ("step", 0), ("step", 3), ("expert_action", 2), ("close", 0)],
)
def test_a_hang_before_training_ends_with_the_line_of_the_environment(monkeypatch, where, after):
    monkeypatch.setattr("gspo_agents.environments._CLOSE_SECONDS", 0.2)
    with pytest.raises(EnvironmentHangError) as error:
        GSPOAgent(config=config(where=where, after=after))
    said = str(error.value)
    assert "custom/Hangs-v0: " in said
    assert "has not returned within 1 s (hangs.py:16 in hang)" in said
    assert len(said.splitlines()) == 1


def test_a_hang_in_a_process_names_the_environment_and_no_line_of_ours():
    with pytest.raises(EnvironmentHangError) as error:
        GSPOAgent(config=config("process", where="step"))
    said = str(error.value)
    assert said.startswith("custom/Hangs-v0: step")
    assert "isolated.py" not in said


def test_a_demonstrator_that_hangs_ends_the_scripted_agent(monkeypatch):
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.01)
    agent = ScriptedAgent("hangs.py:Hangs", where="expert_action", after=2)
    agent._guard = partial(in_thread(agent).guard, agent.env_id, 0.2)
    with pytest.raises(EnvironmentHangError, match=r"expert_action\(0\.0\) has not returned"):
        agent.evaluate(4)


def test_a_call_that_takes_long_is_mentioned_once_and_is_no_failure(caplog, monkeypatch):
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(threads, "_LONG", 0.05)

    def wait():
        call_env(time.sleep, 0.3)
        call_env(time.sleep, 0.3)
        return 5

    with caplog.at_level(logging.WARNING):
        assert EnvThread().guard("slow", 60.0, wait) == 5
    (line,) = caplog.text.splitlines()
    assert "slow: sleep(0.3) has not returned for 0 s" in line


def test_a_function_that_was_left_behind_ends_when_its_call_returns(monkeypatch):
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.01)
    free, calls = threading.Event(), []

    def play():
        for n in range(1000):
            calls.append(n)
            call_env(free.wait)

    thread = EnvThread()
    with pytest.raises(EnvironmentHangError, match=r"x: wait\(\) has not returned within 0\.05 s"):
        thread.guard("x", 0.05, play)
    thread.stop()
    free.set()
    thread._thread.join(30)
    assert not thread.alive
    assert calls == [0, 1]


def test_a_call_takes_its_time_where_it_says_so_and_only_there(monkeypatch):
    """The images of terminal tasks take longer to build than an episode may hang."""
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 0.01)
    free = threading.Event()

    def build(then):
        with threads.without_limit():
            threading.Event().wait(1.0)
        return then(60.0)

    thread = EnvThread()
    with threads.without_limit():
        pass  # outside of any call
    assert thread.guard("x", 0.5, call_env, build, lambda _: 5) == 5
    with pytest.raises(EnvironmentHangError, match="x: build"):
        thread.guard("x", 0.5, call_env, build, free.wait)
    free.set()


def test_an_error_of_the_function_is_raised_to_its_caller_and_the_thread_goes_on():
    thread = EnvThread()
    with pytest.raises(ZeroDivisionError):
        thread.guard("x", 1.0, lambda: 1 / 0)
    assert thread.guard("x", 1.0, lambda: 5) == 5


def test_the_thread_of_an_agent_ends_with_the_agent():
    class Owner:
        pass

    owner = Owner()
    thread = in_thread(owner)
    own = thread.guard("x", 1.0, threading.current_thread)
    assert own is not threading.current_thread()
    del owner, thread
    own.join(30)
    assert not own.is_alive()


def fails_after_many_objects():
    found = []
    gc.callbacks.append(lambda phase, info: found.append(phase))
    try:
        with rare_garbage_collection():
            kept = [[n] for n in range(20_000)]
            raise KeyError(len(found), len(kept))
    finally:
        gc.callbacks.pop()


def test_a_rollout_makes_many_objects_without_a_search_and_leaves_the_users_settings():
    before = gc.get_threshold()
    with pytest.raises(KeyError) as error:
        fails_after_many_objects()
    assert error.value.args == (0, 20_000)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_time_limit_stands_still_while_the_event_loop_does():
    async def suspended(then):
        async with ActiveTimeout(0.8):
            time.sleep(1.5)  # as Ctrl-Z would stop the process
            await asyncio.sleep(then)

    asyncio.run(suspended(0.3))
    with pytest.raises(TimeoutError):
        asyncio.run(suspended(2.0))
