"""Requests wait until vLLM's cache has room for them, by the metrics that vLLM gives."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from gspo_env.engines.vllm.cache_limit import CacheLimit, read_cache_metrics
from gspo_env.errors import EngineError

BLOCK = 4
SHORT = {"prompt": 15, "tokens": 1, "most": 1}
"""Requests that hardly grow, so that it does not matter how long they have run."""
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:cache_config_info{{block_size="4",engine="0",num_gpu_blocks="{blocks}"}} 1.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {usage}
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 7.0
vllm:num_preemptions_total{{engine="0",model_name="tiny"}} {preemptions}
"""


@dataclass(eq=False)
class Copy:
    """A copy of a model whose cache holds `tokens`, and what runs on it."""

    tokens: int
    usage: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    preemptions: float = 0.0
    sizes: list = field(default_factory=list)
    """Tokens of the requests that run, if each samples as many as the last ones did."""
    most: int = 0
    """The most of them at once."""

    async def text(self):
        blocks = self.tokens // BLOCK + 1
        return METRICS.format(**{**vars(self), "blocks": blocks})


@asynccontextmanager
async def sampled(limit, copies, number, *, prompt=8, tokens=8, most=8, session=None, shared=False):
    """A request that runs; each has a prompt of its own unless it is `shared`."""
    ids = range(prompt) if shared else range(1000 * number, 1000 * number + prompt)
    async with limit.room(lambda: copies, list(ids), most, session) as room:
        room.copy.sizes.append(prompt + tokens)
        room.copy.most = max(room.copy.most, sum(room.copy.sizes))
        try:
            yield room.copy
        finally:
            room.copy.sizes.remove(prompt + tokens)
            room.tokens = tokens


async def play(limit, copies, count, **how):
    """Plays so many requests at once."""

    async def one(number):
        async with sampled(limit, copies, number, **how):
            await settled()

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(number) for number in range(count)))


async def settled():
    """Lets each task go on until it waits for another one, however slow the machine is."""
    for _ in range(100):
        await asyncio.sleep(0)


@asynccontextmanager
async def held(limit, copies, count, **how):
    """Requests that run meanwhile; those that have no room yet wait."""
    stop = asyncio.Event()

    async def one(number):
        async with sampled(limit, copies, number, **how):
            await stop.wait()

    jobs = [asyncio.create_task(one(number)) for number in range(count)]
    await settled()
    try:
        yield jobs
    finally:
        stop.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*jobs)


def limit_of(share=1.0):
    return CacheLimit(Copy.text, share)


def test_no_more_requests_run_than_each_cache_can_hold_to_their_end_and_all_are_played():
    async def run():
        small, large = Copy(128), Copy(512)
        limit = limit_of()
        await play(limit, [large, small], 100)
        assert 16 <= small.most <= 128
        assert 256 <= large.most <= 512

    asyncio.run(run())


def test_an_action_longer_than_the_cache_runs_alone():
    async def run():
        copy = Copy(BLOCK)
        await play(limit_of(), [copy], 3, prompt=20)
        assert copy.most == 28

    asyncio.run(run())


@pytest.mark.parametrize(("shared", "at_once"), [(False, 7), (True, 21)])
def test_a_prefix_that_requests_share_counts_once(shared, at_once):
    async def run():
        copy, limit = Copy(240), limit_of()
        async with held(limit, [copy], 30, prompt=24, shared=shared):
            assert len(copy.sizes) == at_once

    asyncio.run(run())


def test_the_lengths_of_the_last_actions_tell_what_fits(monkeypatch):
    still = SimpleNamespace(monotonic=lambda: 0.0)  # a slow machine samples no more
    monkeypatch.setattr("gspo_env.engines.vllm.cache_limit.time", still)

    async def run():
        copy, limit = Copy(400), limit_of()
        async with held(limit, [copy], 30, most=100):
            assert len(copy.sizes) == 3  # as if all of them sampled 100 tokens
        async with held(limit, [copy], 30, most=100):
            assert 10 < len(copy.sizes) <= 25

    asyncio.run(run())


@pytest.mark.parametrize("turns", [1, 3])
def test_episodes_leave_each_other_room_for_the_turns_that_will_follow(turns):
    async def run():
        copy, limit = Copy(240), limit_of()
        for n in range(2):
            for turn in range(turns):
                longer = {"prompt": 15 + 16 * turn, "tokens": 1, "most": 1}
                async with sampled(limit, [copy], n, session=f"{n}", **longer):
                    pass
            limit.release(f"{n}")
        async with held(limit, [copy], 20, **SHORT):
            assert len(copy.sizes) == {1: 12, 3: 4}[turns]

    asyncio.run(run())


def test_an_episode_under_way_goes_before_one_that_begins():
    async def run():
        copy, limit, order = Copy(64), limit_of(), []
        async with sampled(limit, [copy], 0, session="first"):
            pass

        async def one(number, session):
            async with sampled(limit, [copy], number, prompt=40, session=session):
                order.append(session)

        async with held(limit, [copy], 1, prompt=40):
            new = [asyncio.create_task(one(n, f"new {n}")) for n in range(2, 4)]
            await settled()
            known = asyncio.create_task(one(1, "first"))
            await settled()
            assert order == []
        await asyncio.gather(*new, known)
        assert order[0] == "first"
        limit.release("first")

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["missing", "another prefix", "refused"])
def test_without_metrics_nothing_waits_and_the_log_says_so_once(fault, caplog):
    async def read(copy):
        if fault == "refused":
            raise OSError("503")
        text = await copy.text()
        return text.replace("vllm:", "other:") if fault == "another prefix" else ""

    async def run():
        copies = [Copy(16), Copy(16)]
        async with held(CacheLimit(read), copies, 20):
            assert sum(len(copy.sizes) for copy in copies) == 20

    asyncio.run(run())
    assert caplog.text.count("rollout.concurrency alone limits its requests") == 1


def test_requests_that_wait_get_the_error_when_no_copy_is_left():
    async def run():
        copy, left, limit = Copy(64), True, limit_of()

        def copies():
            if not left:
                raise EngineError("none is left")
            return [copy]

        stop = asyncio.Event()

        async def one(number):
            async with limit.room(copies, [number] * 40, 8, None):
                await stop.wait()

        jobs = [asyncio.create_task(one(number)) for number in range(3)]
        await settled()
        left = False
        stop.set()
        async with asyncio.timeout(60):
            return await asyncio.gather(*jobs, return_exceptions=True)

    first, *others = asyncio.run(run())
    assert first is None
    assert [str(error) for error in others] == ["none is left"] * 2


def test_a_cancelled_request_makes_room_whether_it_waits_or_runs():
    async def run():
        copy, limit = Copy(64), limit_of()
        async with held(limit, [copy], 3, prompt=40) as jobs:
            assert len(copy.sizes) == 1
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            jobs.clear()
        await play(limit, [copy], 2, prompt=40)
        assert copy.sizes == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("metrics", "share", "at_once"),
    [
        ({}, 1.0, 11),
        ({"usage": 0.5, "running": 9.0}, 1.0, 5),
        ({"usage": 0.95, "running": 4.0, "waiting": 2.0}, 1.0, 1),
        ({}, 0.5, 5),
        ({"usage": 0.5, "running": 9.0}, 0.5, 5),
    ],
)
def test_what_others_use_is_left_to_them(metrics, share, at_once):
    """With a share, the others are processes of the same run, which have shares of their own."""

    async def run():
        copy, limit = Copy(200, **metrics), limit_of(share)
        await play(limit, [copy], 1, **SHORT)
        async with held(limit, [copy], 20, **SHORT):
            assert len(copy.sizes) == at_once

    asyncio.run(run())


@pytest.mark.parametrize("updated", [False, True])
def test_a_preemption_makes_the_rule_careful_unless_an_update_of_the_weights_made_it(
    monkeypatch, updated
):
    def read_after(seconds):
        monkeypatch.setattr("gspo_env.engines.vllm.cache_limit._READ_SECONDS", seconds)

    async def run():
        copy, limit = Copy(400), limit_of()
        await play(limit, [copy], 1, **SHORT)
        counts = []
        for _ in range(2):
            async with held(limit, [copy], 40, **SHORT):
                counts.append(len(copy.sizes))
            if updated:
                limit.updated()
            copy.preemptions += 1
            read_after(0.0)
            async with sampled(limit, [copy], 0, **SHORT):
                read_after(3600.0)
        assert limit.metrics() == {"rollout/preemptions": 0.0 if updated else 2.0}
        assert (counts[1] < counts[0]) is not updated

    asyncio.run(run())


def test_engines_behind_one_address_are_added_up():
    first = asyncio.run(Copy(40, usage=0.25, running=1, waiting=0, preemptions=2).text())
    second = asyncio.run(Copy(80, usage=0.75, running=2, waiting=4, preemptions=1).text())
    metrics = read_cache_metrics(first + second.replace('"0"', '"1"'))
    assert (metrics.blocks, metrics.block_size, metrics.usage) == (30, BLOCK, 0.5)
    assert (metrics.running, metrics.waiting, metrics.preemptions) == (3, 4, 3)
    assert read_cache_metrics(first.replace("num_gpu_blocks", "blocks")) is None
