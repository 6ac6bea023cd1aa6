"""The pool of tasks: what it draws, and that a resumed run draws the same."""

import json
from dataclasses import asdict

import pytest

from gspo_env.training.curriculum import StepResult
from gspo_env.training.pool import Pool
from gspo_env.training.split import draw_tasks
from gspo_env.types import Group, bare_episode


def new_tasks(step, count=8):
    return draw_tasks({"x": 1.0}, seed=5, step=step, count=count)


def result_of(*tasks):
    return StepResult({}, 0.0, 0.0, tasks)


def test_tasks_whose_groups_differ_are_drawn_again_and_no_task_twice_in_a_step():
    results = [result_of((1, "never", 0, 8), (2, "always", 8, 8), (3, "sometimes", 4, 8))]
    pool = Pool(share=1.0)
    steps = [pool.draw(new_tasks(step), results) for step in range(200)]
    first = [tasks[0].seed for tasks in steps]
    assert set(first) == {1, 2, 3}
    assert first.count(3) > 4 * max(first.count(1), first.count(2))
    assert all(len({task.seed for task in tasks}) == 8 for tasks in steps)
    assert Pool(share=0.0).draw(new_tasks(0), results) == new_tasks(0)
    assert pool.draw(new_tasks(0), []) == new_tasks(0)


def test_old_counts_are_forgotten():
    solved = [result_of((1, "a", 8, 8), (2, "b", 4, 8))]
    later = [*solved, *[result_of()] * 60]
    seeds = [Pool(share=1.0).draw(new_tasks(s), later)[0].seed for s in range(300)]
    assert seeds.count(1) == pytest.approx(150, abs=45)


def test_a_resumed_run_draws_the_same_tasks():
    results = [result_of((n, f"k{n}", n % 9, 8), (n + 50, "one", 3, 8)) for n in range(20)]
    saved = [StepResult(**r) for r in json.loads(json.dumps([asdict(r) for r in results]))]
    pool = Pool()
    assert pool.draw(new_tasks(21), saved) == pool.draw(new_tasks(21), results)


def test_groups_are_recorded_by_key_or_else_by_seed_and_without_failed_episodes():
    (task,) = new_tasks(0, 1)
    wrong, right = (bare_episode(task, [1], [reward]) for reward in (0.0, 1.0))
    group = Group(task=task, episodes=(right, wrong, wrong))
    assert Pool().record([group]) == [(task.seed, str(task.seed), 1, 3)]
