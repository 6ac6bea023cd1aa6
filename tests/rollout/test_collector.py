"""Rollouts: the trained tokens are the sampled ones, and every episode has a stop reason."""

import asyncio
import math
import threading
from contextlib import AsyncExitStack
from itertools import pairwise

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from support.rollouts import collector, episodes, play
from support.small_env import Small

from gspo_env.batch.sample import to_samples
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.registration import make_env
from gspo_env.errors import RolloutError
from gspo_env.rollout.metrics import EpisodeStats, RolloutStats
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import StopReason, Task


class Echo(Small):
    """Returns the same result for every action, until the rollout stops it."""

    first = 'Follow 2 links from "amber".'
    blocking = None

    def __init__(self, result=None):
        self.result = result or ("go on", 0.5, False, False, {})

    def step(self, action):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Recording(TransformersEngine):
    """An engine that records its requests and completions."""

    async def generate(self, prompt_ids, sampling, session=None):
        done = await super().generate(list(prompt_ids), sampling, session)
        self.__dict__.setdefault("log", {}).setdefault(session, []).append(
            (tuple(prompt_ids), done.token_ids)
        )
        return done


def test_each_prompt_is_the_one_before_with_its_sampled_ids_and_training_sees_exactly_that(player):
    running = collector(player, lambda: make_env(player.env_id), Recording, concurrency=7)
    everything = episodes(play(running, tasks=16, size=4))
    turns = 0
    by_tokens = {e.sequences[0].token_ids.tobytes() for e in everything}
    for log in running.engine.log.values():
        for (before, sampled), (after, _) in pairwise(log):
            assert after[: len(before) + len(sampled)] == before + sampled
            turns += 1
        prompt, action = log[-1]
        assert np.array(prompt + action, dtype=np.int64).tobytes() in by_tokens
    assert turns > 64
    for episode in everything:
        (whole,) = episode.sequences
        sampled = whole.token_ids[whole.turn_ids >= 0].tolist()
        assert sampled == _flat(t.action_ids for t in episode.turns)


def _flat(parts):
    return [i for part in parts for i in part]


@pytest.mark.parametrize(
    ("reason", "result", "limits"),
    [
        (StopReason.TERMINATED, ("done", 1.0, True, False, {}), {}),
        (StopReason.TRUNCATED, ("late", 1.0, False, True, {}), {}),
        (StopReason.MAX_TURNS, None, {"max_turns": 2}),
        (StopReason.MAX_TURN_TOKENS, None, {"max_turn_tokens": 1}),
        (StopReason.MAX_CONTEXT, None, {"max_context": 160, "max_turns": 1000}),
    ],
)
def test_each_limit_ends_an_episode_with_its_name(player, reason, result, limits):
    groups = play(collector(player, lambda: Echo(result), **limits), seed=3)
    metrics = RolloutStats(groups, 1.0).metrics()
    assert metrics[f"rollout/stop/{reason}"] > 0.5
    assert sum(v for k, v in metrics.items() if k.startswith("rollout/stop/")) == pytest.approx(1)
    for episode in episodes(groups):
        assert episode.terminated == (episode.stop_reason is StopReason.TERMINATED)
        assert episode.truncated == (episode.stop_reason is not StopReason.TERMINATED)


@pytest.mark.parametrize("declared", [True, None, False])
def test_environments_that_are_not_declared_quick_run_in_threads(player, declared):
    threads = set()

    class Noted(Echo):
        blocking = declared

        def step(self, action):
            threads.add(threading.current_thread())
            return super().step(action)

    play(collector(player, Noted, max_turns=3), tasks=8)
    if declared is False:
        assert threads == {threading.current_thread()}
    else:
        assert threads
        assert all(thread.name.startswith("env") for thread in threads)


def test_named_parts_are_summed_over_turns_and_averaged_over_the_episodes_that_have_them(player):
    result = ("go on", 0.5, False, False, {"reward_parts": {"style": 0.25}})
    groups = play(collector(player, lambda: Echo(result), max_turns=4, max_turn_tokens=5))
    everything = episodes(groups)
    answered = [sum(t.reward > 0 for t in e.turns) for e in everything]
    # some turns were cut by the token limit
    assert any(n < len(e.turns) for n, e in zip(answered, everything, strict=True))
    expected = 0.25 * np.mean([n for n in answered if n])
    stats = RolloutStats(groups, 1.0)
    assert stats.metrics()["rollout/reward/style"] == pytest.approx(expected)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_pool_closes_every_environment_and_those_that_wait_side_by_side(blocking):
    every = threading.Barrier(8 if blocking else 1, timeout=60)
    closed = []

    class Slow(Echo):
        def close(self):
            every.wait()
            closed.append(threading.current_thread() is threading.main_thread())

    async def fill():
        async with AsyncExitStack() as stack:
            for _ in range(8):
                await stack.enter_async_context(pool.lease())

    pool = EnvPool(Slow, blocking=blocking)
    asyncio.run(fill())
    pool.close()
    pool.close()
    assert closed == [False] * 8


class TokenJudge(Echo):
    """Gives each sampled token an advantage by its id, and masks the last one of each action."""

    def step(self, action):
        ids = action.token_ids
        mask = [True] * (len(ids) - 1) + [False]
        info = {"token_advantages": [i / 100 for i in ids], "token_mask": mask}
        return "go on", 0.5, False, False, info


class Long(Echo):
    """Half of its tasks have a prompt that does not fit."""

    every = 2

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return observation * (1 if seed % self.every else 200), info


def test_prompts_that_do_not_fit_the_context_are_counted_once(player, caplog):
    running = collector(player, Long, max_turns=1)
    for _ in range(2):
        groups = play(running, size=1)
        assert [e.stop_reason for e in episodes(groups)].count(StopReason.MAX_CONTEXT) == 2
    assert caplog.text.count("2 of 4 episodes ended before their first turn") == 1
    assert "rollout.max_context 512 with rollout.max_turn_tokens 32" in caplog.text
    groups = play(running, tasks=1, size=2)
    assert not any(e.turns for e in episodes(groups))
    played = RolloutStats(groups, 1.0).played
    assert (played.turns, played.mean_return, played.outcome, played.success) == (0, 0, 0, 0)


def test_what_an_environment_says_of_tokens_reaches_the_sample_unchanged(player):
    running = collector(player, TokenJudge, max_turns=2)
    turns = 0
    for episode in episodes(play(running)):
        (sample,) = to_samples([episode], [np.full(len(episode.turns), 7.0)])
        ids, advantages = sample.token_ids[sample.mask].tolist(), sample.advantages.tolist()
        for turn in episode.turns:
            if turn.info.token_advantages is None:  # cut before the environment received it
                ids, advantages = ids[len(turn.action_ids) :], advantages[len(turn.action_ids) :]
                continue
            kept = len(turn.action_ids) - 1
            assert ids[:kept] == list(turn.action_ids[:-1])
            assert advantages[:kept] == [i / 100 for i in turn.action_ids[:-1]]
            ids, advantages = ids[kept:], advantages[kept:]
            turns += 1
        assert not ids
    assert turns > 8


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 9)])
def test_a_declared_outcome_of_cut_episodes_is_found_through_wrappers(player, wrap):
    class Declared(Echo):
        blocking = False
        gives_outcome = True
        outcome_if_cut = -1.0

    cut = episodes(play(collector(player, lambda: wrap(Declared()), max_turns=1)))
    assert {e.outcome for e in cut} == {-1.0}
    assert {e.success for e in cut} == {False}


def test_threads_give_the_same_episodes_as_the_event_loop(player):
    def ids(blocking, seed=4):
        running = collector(player, lambda: make_env(player.env_id))
        running.pool.blocking = blocking
        return [e.sequences[0].token_ids.tolist() for e in episodes(play(running, seed=seed))]

    assert ids(True) == ids(False) != ids(False, seed=5)


@pytest.mark.parametrize("quick", [True, False])
def test_an_environment_that_runs_out_of_an_iterator_is_an_error_and_does_not_hang(player, quick):
    class Exhausted(Echo):
        blocking = not quick

        def step(self, action):
            return next(iter(()))

    running = collector(player, lambda: Exhausted(), episode_timeout=20.0)
    with pytest.raises(RolloutError, match="StopIteration"):
        play(running, tasks=1)


def test_sampled_and_greedy_episodes_at_the_same_time_are_those_of_one_after_the_other(player):
    def make():
        return make_env(player.env_id)

    tasks = [Task(env_id="test", seed=n) for n in range(6)]
    both = collector(player, make, Recording, concurrency=5)
    sampled, greedy = asyncio.run(both.collect_evaluation(tasks, seed=3))
    apart = collector(player, make, concurrency=5)
    wanted = play(apart, tasks=6, size=1, seed=3), play(apart, 6, 1, seed=3, temperature=0.0)
    for found, expected in zip((sampled, greedy), wanted, strict=True):
        assert [g.task for g in found] == tasks
        actions = [[t.action_ids for t in e.turns] for e in episodes(found)]
        assert actions == [[t.action_ids for t in e.turns] for e in episodes(expected)]
    assert len(both.engine.log) == 12  # no two episodes share a session


def test_no_episodes_have_statistics_without_nan():
    assert all(map(math.isfinite, EpisodeStats.of([]).metrics("rollout").values()))
