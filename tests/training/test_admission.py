"""The admission rule: no group is too old, nobody waits for ever, every group is counted once."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from gspo_env.training.rollout_buffer import StalenessGate

SECONDS = st.floats(0.01, 100.0)


@given(
    batch=st.integers(1, 5),
    staleness=st.integers(0, 4),
    steps=st.integers(1, 8),
    update=st.floats(0.0, 10.0),
    data=st.data(),
)
def test_no_group_is_too_old_and_every_one_is_trained_on_once(
    batch, staleness, steps, update, data
):
    """Groups of any times, some of which give their place back, against a simulated clock."""
    admission = StalenessGate(batch, staleness)
    times = data.draw(st.lists(SECONDS, min_size=1, max_size=40))
    again = data.draw(st.sets(st.integers(0, batch * steps * 3), max_size=batch * steps))
    now, free, played, tries, given_back = 0.0, 0.0, 0, 0, 0
    running: list[tuple[float, int]] = []  # a heap of end times
    ready: set[int] = set()
    waiting = list(range(batch * steps))
    trained: dict[int, int] = {}

    def admit():
        nonlocal tries
        while waiting and admission.room > 0:
            number = waiting.pop(0)
            admission.admit(number)
            heapq.heappush(running, (now + times[tries % len(times)], number))
            tries += 1

    admit()
    while len(trained) < batch * steps:
        chosen = admission.choose(ready) if now >= free else None
        assert admission.admitted - admission.dropped == len(trained) + len(admission.ages)
        assert len(admission.ages) <= batch * (staleness + 1)
        if chosen is not None:
            assert len(chosen) == len(set(chosen)) == batch
            for number in chosen:
                assert number not in trained
                assert admission.version - admission.ages[number] <= staleness
                trained[number] = admission.version
                ready.discard(number)
            free = now + update
            admission.train(chosen, admission.version + 1)
            admit()
            continue
        # the learner waits for a group or for its own update: one of both has to be under way
        assert running or free > now
        if running and (free <= now or running[0][0] <= free):
            now, number = heapq.heappop(running)
            played += 1
            if played in again:
                admission.drop(number)
                waiting.insert(0, number)
                given_back += 1
                admit()
            else:
                ready.add(number)
        else:
            now = free
    assert admission.version == steps
    assert admission.dropped == given_back
    assert admission.admitted == batch * steps + given_back == tries
    assert admission.ages == {}


def test_a_learner_that_takes_what_is_ready_first_leaves_no_time_for_the_slow_ones():
    """Two groups of the first version are slow: the second update waits for one of them."""
    admission = StalenessGate(1, 2)
    for number in (0, 1, 2):
        admission.admit(number)
    assert admission.room == 0
    assert admission.choose({2}) == [2]
    admission.train([2], 1)
    admission.admit(3)
    # with 3 now, 0 and 1 would both have to be in the update after, which has one group
    assert admission.choose({3}) is None
    assert admission.choose({1, 3}) == [1]


def test_without_staleness_the_learner_takes_a_whole_batch_of_its_own_version():
    admission = StalenessGate(3, 0)
    for number in range(3):
        admission.admit(number)
    assert admission.room == 0
    assert admission.choose({0, 2}) is None
    assert admission.choose({2, 0, 1}) == [0, 1, 2]
    admission.train([0, 1, 2], 1)
    assert admission.room == 3
