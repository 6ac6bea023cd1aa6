"""Every wait for an environment has a limit: what hangs is a fault, and the rollout goes on."""

import asyncio
import math
import threading
import time
from dataclasses import replace
from decimal import Decimal
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from support.scripted_engine import Scripted
from support.small_env import Small

from gspo_env.env.registration import make_env
from gspo_env.errors import EnvironmentContractError
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.play import PolicyOutput
from gspo_env.rollout.pool import EnvPool, play_pooled
from gspo_env.types import StopReason, Task

TASKS = [Task(env_id="test/A-v0", seed=n) for n in range(2)]
RELEASE = threading.Event()


@pytest.fixture(autouse=True)
def release():
    RELEASE.clear()
    yield
    RELEASE.set()


def collector(chat, make, **limits):
    engine = Scripted(lambda prompt_ids, sampling: (chat.stop_ids[0],))
    settings = {"max_turn_tokens": 8, "max_context": 256, "episode_timeout": 1.0, **limits}
    pool = EnvPool(make, blocking=getattr(make, "blocking", None), close_timeout=1.0)
    return Collector(engine, chat, pool, RolloutConfig(**settings))


def collect(running, size=2):
    try:
        return asyncio.run(running.collect(TASKS, seed=0, group_size=size))
    finally:
        running.pool.close()


class Cut(Small):
    """Never ends by itself."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.number = self.made

    def step(self, action):
        return "on", 1.0, False, False, {}


class Abandoned(Cut):
    """The first one never returns from `abandon`."""

    def abandon(self):
        if self.number == 1:
            RELEASE.wait()


@pytest.mark.parametrize("blocking", [False, True])
def test_a_hanging_abandon_costs_its_environment_and_no_episode(chat, blocking):
    make = type("Fresh", (Abandoned,), {"blocking": blocking})
    running = collector(chat, make, max_turns=2, concurrency=1)
    groups = collect(running)
    assert [e.stop_reason for g in groups for e in g.episodes] == [StopReason.MAX_TURNS] * 4
    assert running.pool.faults.counts == {StopReason.ENV_TIMEOUT: 1}
    assert "abandon() had not returned when the 1 s" in running.pool.faults.first.message
    assert make.made == 2


async def waits(self, group):
    if group.task.seed == 0:
        await asyncio.sleep(1000)
    return group


def blocks(self, group):
    if group.task.seed == 0:
        RELEASE.wait()
    return group


def raises(self, group):
    if group.task.seed == 0:
        raise KeyError("rank")
    return group


async def shorter(self, group):
    return replace(group, episodes=group.episodes[group.task.seed == 0 :])


def worth(wrong, field="reward"):
    """Rewards of another kind for the first task, as a reward, a part of it or the outcome."""

    async def group_reward(self, group):
        value = np.float32(0.5) if group.task.seed else wrong

        def rated(episode):
            (turn,) = episode.turns
            if field == "outcome":
                return replace(episode, ending=replace(episode.ending, outcome=value))
            info = replace(turn.info, reward_parts={"x": value} if field == "parts" else {})
            reward = value if field == "reward" else 0.5
            return replace(episode, turns=(replace(turn, reward=reward, info=info),))

        return replace(group, episodes=tuple(map(rated, group.episodes)))

    return group_reward


async def without_turns(self, group):
    seed = group.task.seed
    episodes = [replace(e, turns=e.turns[seed == 0 :]) for e in group.episodes]
    return replace(group, episodes=tuple(episodes))


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(
    ("reward", "reason", "words"),
    [
        (waits, StopReason.ENV_TIMEOUT, "group_reward() had not returned when the 1 s"),
        (blocks, StopReason.ENV_TIMEOUT, "group_reward() had not returned when the 1 s"),
        (raises, StopReason.ERROR, "group_reward() raised KeyError: 'rank' (tests/rollout/test_w"),
        (
            shorter,
            StopReason.INVALID,
            "group_reward() result has episodes of [1] turns, expected [1,",
        ),
        (without_turns, StopReason.INVALID, "has episodes of [0, 0] turns, expected [1, 1]"),
        *(
            (worth(value), StopReason.INVALID, f"group_reward() reward is {value!r} of type ")
            for value in (1e39, None, math.nan, True, "1", Decimal(1), [1.0])
        ),
        (worth(1j, "outcome"), StopReason.INVALID, "group_reward() outcome is 1j of type complex"),
        (worth(math.nan, "parts"), StopReason.INVALID, "group_reward() reward_parts is {'x': nan}"),
    ],
)
def test_a_group_reward_that_hangs_or_fails_costs_its_group(chat, blocking, reward, reason, words):
    make = type("Fresh", (Small,), {"blocking": blocking, "group_reward": reward})
    limit = 1.0 if reason is StopReason.ENV_TIMEOUT else 60.0
    running = collector(chat, make, episode_timeout=limit)
    lost, played = collect(running)
    assert [e.stop_reason for e in lost.episodes] == [reason] * 2
    assert all(words in e.error and not e.success for e in lost.episodes)
    assert all(e.success and type(e.outcome) is float for e in played.episodes)
    assert running.pool.faults.counts == {reason: 1}


@pytest.mark.parametrize("kind", [lambda f: f, lambda f: staticmethod(lambda g: f(None, g))])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_plain_function_may_add_the_rewards_of_a_group(chat, blocking, kind):
    def ranks(self, group):
        rows = [
            replace(e, turns=tuple(replace(turn, reward=float(g)) for turn in e.turns))
            for g, e in enumerate(group.episodes)
        ]
        return replace(group, episodes=tuple(rows))

    make = type("Fresh", (Small,), {"blocking": blocking, "group_reward": kind(ranks)})
    groups = collect(collector(chat, make), size=3)
    assert [[e.outcome for e in g.episodes] for g in groups] == [[0.0, 1.0, 2.0]] * 2


@pytest.mark.parametrize("blocking", [False, True])
def test_closing_a_pool_takes_no_longer_than_its_limit(chat, blocking, caplog):
    class Stays(Small):
        def close(self):
            RELEASE.wait()

    collect(collector(chat, type("Fresh", (Stays,), {"blocking": blocking})))
    assert "environments have not closed within 1 s" in caplog.text


@pytest.mark.parametrize("broken", [1, 4])
def test_environments_that_hang_as_they_are_made_cost_the_limit_at_the_same_time(broken):
    class Slow(Cut):
        def __init__(self):
            super().__init__()
            if self.number <= broken:
                RELEASE.wait()

    async def one(pool, task):
        look = PolicyOutput(stop=StopReason.MAX_TURNS)
        episode = await play_pooled(pool, task, lambda now: look, timeout=1.0)
        return episode.failed, make.made

    async def main(pool):
        return await asyncio.gather(*(one(pool, task) for task in TASKS * 2))

    make = type("Fresh", (Slow,), {"blocking": None})
    pool = EnvPool(make, close_timeout=0.1)
    (first, *others) = asyncio.run(main(pool))
    assert first[0]
    assert sum(failed for failed, _ in others) == broken - 1
    assert broken == 1 or {made for _, made in others} == {4}
    pool.close()


@pytest.mark.parametrize("trl", [False, True])
def test_a_reward_function_that_hangs_costs_its_episode(chat, trl):
    calls = []

    def reward(attempt):
        calls.append(threading.current_thread())
        if len(calls) == 2:
            RELEASE.wait()
        return 1.0

    def batch(completions):
        return [reward(text) for text in completions]

    rows = [{"prompt": f"Say {n}"} for n in range(20)]

    def make():
        return make_env("gspo/Dataset-v0", data=rows, rewards=[batch if trl else reward])

    running = collector(chat, make)
    groups = collect(running)
    assert all(e.success for g in groups for e in g.episodes)
    assert len(calls) == 5
    assert running.pool.faults.counts == {StopReason.ENV_TIMEOUT: 1}


class Slides(gymnasium.Env):
    """An environment from elsewhere, of which one call never returns."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)
    calls: ClassVar[list[str]] = []
    hangs = ""

    def note(self, name):
        self.calls.append(name)
        if name == self.hangs and self.calls.count(name) == 2:
            RELEASE.wait()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.note("reset")
        return 0, {}

    def step(self, action):
        self.note("step")
        return 1, 1.0, True, False, {}


@pytest.mark.parametrize("hangs", ["reset", "step"])
def test_an_environment_in_gym_text_that_hangs_costs_its_episode(chat, hangs):
    kind = type("Fresh", (Slides,), {"calls": [], "hangs": hangs})
    gymnasium.register("test/Slides-v0", kind)

    def make():
        return make_env("gspo/GymText-v0", env="test/Slides-v0", invalid_steps=True)

    running = collector(chat, make)
    groups = collect(running)
    assert [e.turns[-1].reward for g in groups for e in g.episodes] == [1.0] * 4
    assert running.pool.faults.counts == {StopReason.ENV_TIMEOUT: 1}
    gymnasium.registry.pop("test/Slides-v0")


def test_the_tools_of_a_dataset_have_the_limit_of_its_rewards(chat):
    env = make_env("gspo/Dataset-v0", data=[{"prompt": "Say"}], tools=[as_text])
    assert env.get_wrapper_attr("limits_steps")
    assert not make_env("gspo/GymText-v0").get_wrapper_attr("limits_steps")


def as_text(number: int) -> str:
    """Write a number."""
    return str(number)


class Counted(Cut):
    """Counts the copies that play at the same time."""

    blocking = True
    playing: ClassVar[list[int]] = []
    most = 0

    def reset(self, *, seed=None, options=None):
        self.playing.append(self.number)
        type(self).most = max(self.most, len(self.playing))
        return super().reset(seed=seed, options=options)

    def step(self, action):
        time.sleep(0.01)
        if action == "raise":
            self.playing.remove(self.number)
            raise ValueError("a fault")
        return "on", 1.0, False, False, {}

    def abandon(self):
        self.playing.remove(self.number)


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (2, 2), (None, 6)])
@pytest.mark.parametrize("known", [False, True])
def test_no_more_copies_play_at_once_than_an_environment_declares(limit, most, known):
    make = type("Few", (Counted,), {"max_copies": limit, "playing": [], "most": 0})
    pool = EnvPool(make, make() if known else None, close_timeout=1.0)
    actions = [["on", "on"], ["raise"], ["on", "on"], ["raise"], ["on"], ["on", "raise"]]

    async def play_all():
        players = [
            play_pooled(pool, TASKS[0], lambda now, a=a: a[now.turn], timeout=9.0, max_turns=len(a))
            for a in actions
        ]
        return await asyncio.gather(*players)

    for _ in range(2):  # in event loops of their own, as before and in a training
        episodes = asyncio.run(play_all())
        assert [e.failed for e in episodes] == ["raise" in a for a in actions]
    pool.close()
    assert 1 <= make.most <= most
    assert not make.playing


@pytest.mark.parametrize("value", [0, -1, 2.5, "two", True])
def test_a_wrong_limit_of_copies_is_one_sentence(value):
    make = type("Odd", (Cut,), {"max_copies": value})
    with pytest.raises(EnvironmentContractError, match=f"max_copies is {value!r}; expected"):
        EnvPool(make, make())
    pool = EnvPool(make)
    episode = asyncio.run(play_pooled(pool, TASKS[0], lambda now: "go", timeout=9.0))
    pool.close()
    assert f"max_copies is {value!r}" in episode.ending.fault.message
