"""Time limits and garbage collection of a rollout."""

import asyncio
import gc
import time

import pytest

from gspo_env.runtime.loops import ActiveTimeout, rare_garbage_collection


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
