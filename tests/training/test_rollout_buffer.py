"""The rollout buffer in virtual time: no group is too old, who waits for whom, how it ends."""

import asyncio
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_clock import run

from gspo_env.batch.padded import bare_episode
from gspo_env.config import Config
from gspo_env.credit import ReturnsToGo, Scores
from gspo_env.errors import RolloutError
from gspo_env.rollout.settings import RolloutConfig, SupplyConfig
from gspo_env.training import TaskSampler
from gspo_env.training.rollout_buffer import RolloutBuffer
from gspo_env.types import Group, Task


class Scripted:
    """Plays groups that take given seconds, with the version of the weights as it is."""

    def __init__(self, seconds, flat=(), lag=lambda number: 0, raises=None):
        self.seconds, self.flat, self.lag, self.raises = seconds, set(flat), lag, raises
        self.version, self.jobs, self.ended, self.most = 0, [], [], 0
        self.playing, self.counter = 0, None
        self.idle = lambda: math.inf

    async def play_group(self, job, gate):
        number = len(self.jobs)
        self.jobs.append(job)
        self.playing += 1
        self.most = max(self.most, self.playing)
        try:
            version = max(0, self.version - self.lag(number))
            async with gate:
                await asyncio.sleep(self.seconds[number % len(self.seconds)])
            if self.raises == number:
                raise RolloutError("the environments hang")
        finally:
            self.playing -= 1
        self.ended.append(number)
        rewards = [0.0, 0.0 if number in self.flat else 1.0]
        episodes = tuple(episode(job.task, version, reward) for reward in rewards)
        seconds = self.seconds[number % len(self.seconds)]
        return Group(task=job.task, episodes=episodes, seconds=seconds)

    def check(self, groups):
        pass


def episode(task, version, reward):
    bare = bare_episode(task, [1], [reward])
    turns = tuple(replace(turn, weights_version=version) for turn in bare.turns)
    return replace(bare, turns=turns)


def buffer_of(player, staleness=0, batch=2, steps=4, **settings):
    concurrency = settings.pop("concurrency", 999)
    config = Config(
        steps=steps,
        tasks_per_step=batch,
        rollout=RolloutConfig(group_size=2, concurrency=concurrency, episode_timeout=50.0),
        supply=SupplyConfig(max_staleness=staleness, **settings),
    )

    tasks = Numbered(config.curriculum, {"x": 1.0}, config.seed, batch)
    tasks.steps = []
    return RolloutBuffer(config, player, tasks, Scores({}, ReturnsToGo()))


class Numbered(TaskSampler):
    def draw(self, step):
        self.steps.append(step)
        return [Task(env_id="x", seed=100 * step + n) for n in range(self.tasks_per_step)]


async def train(buffer, player, update=1.0, first=1, steps=4):
    """Takes all batches; an update takes some seconds. Returns the batches."""
    batches = []
    try:
        for step in range(first, steps + 1):
            batches.append(await buffer.take())
            await asyncio.sleep(update)
            player.version = step
            buffer.advance(step)
    finally:
        await buffer.close()
    return batches


def seeds(batches):
    return [group.task.seed for batch in batches for group in batch.groups]


def every(steps=4, batch=2):
    return [100 * step + place for step in range(1, steps + 1) for place in range(batch)]


def test_in_turn_groups_are_played_only_while_the_learner_waits_for_them():
    player = Scripted([3.0, 5.0])
    buffer = buffer_of(player)

    async def work():
        for step in range(1, 5):
            batch = await buffer.take()
            assert player.playing == 0
            assert [group.task.seed for group in batch.groups] == [100 * step, 100 * step + 1]
            assert batch.seconds == 5.0
            await asyncio.sleep(2.0)
            assert player.playing == 0
            buffer.advance(step)
            player.version = step
            assert player.playing == 0
            assert batch.supply["rollout/staleness_max"] == 0.0
        assert batch.supply["time/learner_idle"] == pytest.approx(5 / 7)
        assert batch.supply["time/rollout_idle"] == pytest.approx(1 - 8 / (4 * 7))

    run(work())


def test_ahead_a_slow_group_holds_nobody_up_until_it_would_be_too_old():
    player = Scripted([1.0, 30.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    buffer = buffer_of(player, staleness=2, steps=4)

    async def work():
        clock = asyncio.get_running_loop().time
        times = []
        batches = []
        for step in range(1, 5):
            batches.append(await buffer.take())
            times.append(clock())
            player.version = step
            buffer.advance(step)
            await asyncio.sleep(0)
        return times, batches

    times, batches = run(work())
    assert times == [1.0, 1.0, 30.0, 30.0]
    assert sorted(seeds(batches)) == every()
    assert [b.supply["rollout/staleness_max"] for b in batches] == [0.0, 1.0, 2.0, 2.0]
    assert sum(b.supply["rollout/dropped_groups"] for b in batches) == 0


@given(
    staleness=st.integers(0, 3),
    batch=st.integers(1, 4),
    seconds=st.lists(st.floats(0.01, 40.0), min_size=1, max_size=30),
    update=st.floats(0.0, 20.0),
    concurrency=st.integers(1, 12),
    flat=st.sets(st.integers(0, 40), max_size=20),
)
def test_every_task_is_trained_on_once_and_never_too_old(
    staleness, batch, seconds, update, concurrency, flat
):
    player = Scripted(seconds, flat)
    buffer = buffer_of(player, staleness, batch, max_resamples=2, concurrency=concurrency)
    batches = run(train(buffer, player, update))
    groups = [group for b in batches for group in b.groups]
    discarded = [group for b in batches for group in b.unused]
    assert len(groups) == 4 * batch
    assert all(len(b.groups) == batch for b in batches)
    assert max(b.supply["rollout/staleness_max"] for b in batches) <= staleness
    assert player.most <= batch * (staleness + 1)
    first = {job.task.seed for job in player.jobs if job.task.seed < 1000}
    assert first == set(every(batch=batch))
    assert len(player.jobs) == len(groups) + len(discarded)
    assert buffer.gate.dropped == len(discarded)
    assert buffer.gate.admitted - buffer.gate.dropped == len(groups)
    resampled = sum(b.supply["rollout/resampled_groups"] for b in batches)
    assert resampled == len(discarded)
    drawn = buffer.sampler.steps
    assert {drawn.count(step) for step in set(drawn)} == {1}


def test_a_group_without_variance_gives_its_place_to_another_task_at_most_so_often():
    player = Scripted([1.0], flat=range(3))
    buffer = buffer_of(player, batch=1, steps=1, max_resamples=2)
    (batch,) = run(train(buffer, player, steps=1))
    assert len(player.jobs) == 3
    assert len({job.task.seed for job in player.jobs}) == 3
    assert len({job.seed for job in player.jobs}) == 3
    assert {job.place for job in player.jobs} == {0}
    assert [group.task for group in batch.groups] == [player.jobs[-1].task]  # the limit
    assert batch.supply["rollout/resampled_groups"] == 2.0
    assert batch.supply["rollout/resampled_tokens"] == 4.0
    assert batch.supply["rollout/resampled_share"] == pytest.approx(2 / 3)
    assert batch.supply["rollout/success_played"] == 0.0


def test_a_group_outside_of_the_difficulty_band_is_sampled_again():
    player = Scripted([1.0])
    buffer = buffer_of(player, batch=1, steps=1, max_resamples=1, min_success=0.6, max_success=0.9)
    (batch,) = run(train(buffer, player, steps=1))  # one of two episodes succeeds
    assert batch.supply["rollout/resampled_groups"] == 1.0


def test_groups_of_weights_that_are_too_old_are_dropped_and_played_again():
    player = Scripted([1.0], lag=lambda number: 2 if number in (4, 5) else 0)
    buffer = buffer_of(player, staleness=1, batch=1, steps=5)
    batches = run(train(buffer, player, steps=5))
    assert seeds(batches) == every(5, batch=1)
    assert sum(b.supply["rollout/dropped_groups"] for b in batches) == 2
    assert buffer.gate.dropped == 2
    assert sum(len(b.unused) for b in batches) == 2
    assert max(b.supply["rollout/staleness_max"] for b in batches) == 1


def test_an_engine_that_never_takes_new_weights_ends_the_run_with_a_sentence():
    player = Scripted([1.0], lag=lambda number: 99)
    buffer = buffer_of(player, staleness=1, batch=1, steps=9)
    with pytest.raises(RolloutError, match=r"2 updates old, for the 4th time.* max_staleness 1"):
        run(train(buffer, player, steps=9))
    assert player.playing == 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_error_of_a_group_ends_the_run_and_leaves_nothing_behind(staleness):
    player = Scripted([1.0, 70.0], raises=0)
    buffer = buffer_of(player, staleness)
    with pytest.raises(RolloutError, match="the environments hang"):
        run(train(buffer, player))
    assert player.playing == 0


def test_a_group_whose_episodes_come_further_elsewhere_may_take_long():
    """A worker says nothing of a group before all of its episodes have ended."""
    player = Scripted([1000.0])
    player.idle = lambda: 1.0
    assert seeds(run(train(buffer_of(player, batch=1, steps=1), player, steps=1))) == [100]


def test_a_rollout_that_stands_still_ends_the_run_and_says_what_is_waited_for(caplog):
    caplog.set_level("INFO")
    player = Scripted([1e9])
    buffer = buffer_of(player, staleness=1)
    sentence = r"no episode made progress for 360 s.*: step 1 waits for groups of x seed 100, x"
    with pytest.raises(RolloutError, match=sentence):
        run(train(buffer, player))
    assert "0 groups are ready, 4 are played" in caplog.text


@pytest.mark.parametrize("left", [1.0, 200.0])
def test_a_run_that_was_suspended_goes_on(left):
    player = Scripted([5100.0 + left])

    async def suspended():
        training = asyncio.create_task(train(buffer_of(player, batch=1, steps=1), player, steps=1))
        await asyncio.sleep(100.0)
        asyncio.get_running_loop().now += 5000.0
        return await training

    assert seeds(run(suspended())) == [100]


@given(
    staleness=st.integers(0, 3),
    cut=st.integers(0, 3),
    seconds=st.lists(st.floats(0.01, 40.0), min_size=1, max_size=9),
    flat=st.sets(st.integers(0, 20), max_size=9),
)
def test_a_resumed_run_replays_what_was_in_flight_and_skips_nothing(staleness, cut, seconds, flat):
    player = Scripted(seconds, flat)
    buffer = buffer_of(player, staleness, max_resamples=2)
    first = run(train(buffer, player, steps=cut))
    saved = buffer.state()
    assert saved["next"] % 2 == 0  # the options of a step are drawn once, for all of its groups
    lost = [task["seed"] for _, _, task in saved["open"]]
    assert len(lost) == (0 if staleness == 0 else min(staleness + 1, 4 - cut) * 2 if cut else 0)
    later = Scripted(seconds)
    later.version = cut
    again = buffer_of(later, staleness, max_resamples=2)
    again.restore(saved, cut)
    second = run(train(again, later, first=cut + 1))
    assert sorted(lost) == sorted(job.task.seed for job in later.jobs[: len(lost)])
    assert len(first) + len(second) == 4
    assert max((b.supply["rollout/staleness_max"] for b in second), default=0) <= staleness
    begun = {j.task.seed for j in player.jobs + later.jobs if j.task.seed < 1000}
    assert begun == set(every())


def test_an_update_runs_beside_the_event_loop_and_its_error_reaches_the_caller():
    buffer = buffer_of(Scripted([1.0]), staleness=1)

    async def work():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        assert await buffer.run(lambda: time.sleep(0.05) or 7) == 7
        assert ticks > 1
        with pytest.raises(ZeroDivisionError):
            await buffer.run(lambda: 1 / 0)
        ticking.cancel()

    asyncio.run(work())
