"""The pool of tasks: what it draws, and that a resumed run draws the same."""

import json
from dataclasses import replace

import pytest

from gspo_env.batch.padded import bare_episode
from gspo_env.training.pool import Pool
from gspo_env.training.split import draw_tasks
from gspo_env.types import Ending, Group, ResetInfo, StopReason, Task


def new_tasks(step, count=8):
    return draw_tasks({"x": 1.0}, seed=5, step=step, count=count)


def played(seed, key, successes, size):
    """A group of a task whose episodes succeed so many times, and one that failed."""
    bare = bare_episode(Task(env_id="x", seed=seed), [1], [0.0])
    bare = replace(bare, reset=ResetInfo(task_key=key))
    ending = Ending(reason=StopReason.TERMINATED)
    episodes = [replace(bare, ending=replace(ending, success=n < successes)) for n in range(size)]
    return Group(task=bare.task, episodes=tuple(episodes))


def after(*steps, pool=Pool()):  # noqa: B008
    state = {}
    for groups in steps:
        state = pool.record(state, [], [played(*group) for group in groups])
    return state


def test_tasks_whose_groups_differ_are_drawn_again_and_no_task_twice_in_a_step():
    state = after([(1, "never", 0, 8), (2, "always", 8, 8), (3, "sometimes", 4, 8)])
    pool = Pool(share=1.0)
    steps = [pool.draw(new_tasks(step), state) for step in range(200)]
    first = [tasks[0].seed for tasks in steps]
    assert set(first) == {1, 2, 3}
    assert first.count(3) > 4 * max(first.count(1), first.count(2))
    assert all(len({task.seed for task in tasks}) == 8 for tasks in steps)
    assert Pool(share=0.0).draw(new_tasks(0), state) == new_tasks(0)
    assert pool.draw(new_tasks(0), {}) == new_tasks(0)


def test_old_counts_are_forgotten():
    later = after([(1, "a", 8, 8), (2, "b", 4, 8)], *[[]] * 60)
    seeds = [Pool(share=1.0).draw(new_tasks(s), later)[0].seed for s in range(300)]
    assert seeds.count(1) == pytest.approx(150, abs=45)


def test_a_resumed_run_draws_the_same_tasks():
    state = after(*[[(n, f"k{n}", n % 9, 8), (n + 50, "one", 3, 8)] for n in range(20)])
    saved = json.loads(json.dumps(state))
    assert list(saved["tasks"]) == list(state["tasks"])
    assert Pool().draw(new_tasks(21), saved) == Pool().draw(new_tasks(21), state)


def test_the_state_has_counts_by_key_or_else_by_seed_and_does_not_grow_with_the_steps():
    twice = [(7, None, 1, 3), (9, "nine", 2, 2)]
    assert after(twice) == {"group_size": 3, "tasks": {"7": [7, 1.0, 2.0], "nine": [9, 2.0, 0.0]}}
    assert len(json.dumps(after(*[twice] * 50))) < 2 * len(json.dumps(after(twice, twice)))
    group = played(7, None, 1, 2)
    failed = replace(group.episodes[0], ending=Ending(reason=StopReason.CRASH))
    group = replace(group, episodes=(*group.episodes, failed))
    assert Pool().record({}, [], [group])["tasks"] == {"7": [7, 1.0, 1.0]}
