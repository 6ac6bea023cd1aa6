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
from support.scripted_engine import Scripted

from gspo_env.env.base import TextEnv
from gspo_env.env.isolated import DECLARED, FORWARDED, LOCAL, IsolatedEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, UnknownEnvironmentError
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.play import demonstrator, play_now
from gspo_env.rollout.pool import EnvPool, play_pooled
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
        async with pool.lease(0.05):
            pass

    sample = make()
    pool = EnvPool(make, sample)
    asyncio.run(use())
    assert not pool.faults.counts
    pool.close()
    sample.close()


GROUP_FILE = '''
from dataclasses import replace
from gspo_env import TextEnv, ToolEnv, tool

class Plain(TextEnv):
    """Two turns, of which the second one pays for a long action."""
    blocking = False
    system_prompt = "Be brief."

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return f"begin {seed}", {"task_key": seed, "state_key": "a", "note": [1, 2]}

    def step(self, action):
        self.turn += 1
        worth = action.count("birch") % 3 if self.turn == 2 else 0.25
        return "on", worth, self.turn == 2, False, {"reward_parts": {"length": worth}}

class Ranked(Plain):
    """Adds the rank of an episode in its group, and a success that only the group tells."""

    async def group_reward(self, group):
        return ranked(group)

class Waiting(Plain):
    def group_reward(self, group):
        return ranked(group)

class Tools(ToolEnv):
    @tool
    def look(self, key: str) -> str:
        """Looks.

        Args:
            key: Where.
        """
        return key

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return f"begin {seed}", {}

    def on_final(self, text):
        return "", 0.0, True

    async def group_reward(self, group):
        assert [t.name for t in group.episodes[0].prompt.tools] == ["look"]
        return ranked(group)

def ranked(group):
    episodes = []
    order = sorted(group.episodes, key=lambda e: e.model_tokens)
    for e in group.episodes:
        *turns, last = e.turns
        info = replace(last.info, success=order.index(e) > 0, reward_parts={"rank": 1.0})
        last = replace(last, reward=last.reward + order.index(e), info=info)
        ending = replace(e.ending, success=info.success)
        episodes.append(replace(e, turns=(*turns, last), ending=ending))
    return replace(group, episodes=tuple(episodes))
'''


@pytest.mark.parametrize("name", ["Plain", "Ranked", "Waiting", "Tools"])
def test_a_group_has_the_same_rewards_with_and_without_isolation(tmp_path, chat, name):
    (tmp_path / "groups.py").write_text(GROUP_FILE)
    spec = f"{tmp_path}/groups.py:{name}"

    def answer(prompt_ids, sampling):
        words = chat.encode("birch " * (1 + sampling.seed % 5))
        return *words[:7], chat.stop_ids[0]

    def collect(make):
        pool, limits = EnvPool(make), RolloutConfig(max_turn_tokens=8, max_context=256)
        tasks = [Task(env_id="test", seed=n) for n in range(2)]
        try:
            return asyncio.run(
                Collector(Scripted(answer), chat, pool, limits).collect(tasks, seed=0, group_size=3)
            )
        finally:
            pool.close()

    def parts(episode):
        return [(t.text, t.action_ids, t.info.reward_parts) for t in episode.turns]

    def shown(groups):
        episodes = [e for g in groups for e in g.episodes]
        return [
            (e.rewards.tolist(), e.outcome, e.success, e.reset.extra, e.prompt.system, parts(e))
            for e in episodes
        ]

    here = shown(collect(lambda: make_env(spec)))
    there = shown(collect(lambda: IsolatedEnv(spec, timeout=30.0)))
    assert here == there
    assert len({tuple(rewards) for rewards, *_ in here}) > 1


def test_the_child_forwards_all_public_names_of_an_environment():
    names = {name for name in vars(TextEnv) if not name.startswith("_")}
    gymnasium_names = {"metadata", "observation_space", "action_space", "reset"}
    assert names - gymnasium_names - {"max_calls_per_turn"} == (
        {*DECLARED, *FORWARDED, *LOCAL} - {"max_calls_per_turn", "snapshot", "restore"}
    )


def test_a_state_is_saved_in_one_process_and_restored_in_another(tmp_path):
    (tmp_path / "count.py").write_text("""
from gspo_env import TextEnv

class Count(TextEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = {(seed,): 0}
        return "begin", {}

    def step(self, action):
        self.seen[action] = self.seen.get(action, 0) + 1
        return str(self.seen), 0.0, False, False, {}

    def snapshot(self):
        return self.seen

    def restore(self, state):
        self.seen = state
""")
    one, two = (IsolatedEnv(f"{tmp_path}/count.py:Count", timeout=30.0) for _ in range(2))
    one.reset(seed=3)
    one.step("a")
    state = one.snapshot()
    seen = one.step("a")[0]
    two.reset(seed=4)
    two.restore(state)
    assert two.step("a")[0] == seen
    for env in (one, two):
        env.close()
    assert not hasattr(IsolatedEnv("gspo/Lookup-v0"), "snapshot")


def test_an_abandoned_episode_is_abandoned_in_the_other_process_too(tmp_path):
    (tmp_path / "left.py").write_text("""
from gspo_env import TextEnv

class Left(TextEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "begin", {}

    def step(self, action):
        return "on", 0.0, False, False, {}

    def abandon(self):
        open(__file__ + ".txt", "a").write("x")
""")
    pool = EnvPool(lambda: IsolatedEnv(f"{tmp_path}/left.py:Left", timeout=30.0))
    asyncio.run(play_pooled(pool, task(), lambda now: "go", timeout=30.0, max_turns=2))
    pool.close()
    assert (tmp_path / "left.py.txt").read_text() == "x"
