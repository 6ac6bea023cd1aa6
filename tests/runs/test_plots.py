"""The learning curve of a run, and the intervals in it."""

import io
import math

import numpy as np
import pytest
from support.turns import episode, turn

from gspo_env.config import Config
from gspo_env.rollout.metrics import Evaluation
from gspo_env.runs import Run, learning_curve
from gspo_env.runs.evaluations import success_interval
from gspo_env.types import Group, ResetInfo, StopReason, Task


def draw(history):
    return learning_curve(Run.in_progress(Config(), history), "Guess, $x$")


def test_a_learning_curve_has_success_and_return_of_training_and_evaluations():
    history = [(step, {"rollout/success": step / 10, "train/loss": 1.0}) for step in range(1, 11)]
    history += [(5, {"eval/success": 0.4, "eval/success_greedy": 0.6})]
    history += [(10, {"eval/success": 0.9, "eval/success_greedy": math.nan})]
    figure = draw(history)
    success, returns = figure.axes
    steps = [list(np.asarray(line.get_xdata())) for line in success.get_lines()]
    assert steps == [list(range(1, 11)), [5, 10], [5]]
    assert [line.get_label() for line in success.get_lines()] == [
        "training",
        "evaluation",
        "evaluation, greedy",
    ]
    assert [text.get_text() for text in returns.texts] == ["not recorded"]
    figure.savefig(image := io.BytesIO(), format="png")
    width, height = image.getvalue()[16:20], image.getvalue()[20:24]
    assert (int.from_bytes(width), int.from_bytes(height)) == (1200, 675)


def test_lines_that_coincide_are_told_apart_and_those_at_the_edge_are_visible():
    alike = {"rollout/success": 1.0, "eval/success": 1.0, "eval/success_greedy": 1.0}
    axis = draw([(n, alike) for n in range(3)]).axes[0]
    assert len({str(line.get_linestyle()) for line in axis.get_lines()}) > 1
    assert axis.get_ylim()[1] > 1.0


def test_an_empty_history_is_drawn():
    assert [len(axis.get_lines()) for axis in draw([]).axes] == [0, 0]


def evaluation(tasks, seeds):
    """An evaluation in which every other seed succeeds, and each group has a lost episode too."""
    groups = []
    for seed in range(seeds):
        task, key = Task(env_id="x", seed=seed), ResetInfo(task_key=f"task-{seed % tasks}")
        played = episode(turn(), task=task, reset=key, success=seed % 2 == 0)
        lost = episode(task=task, reason=StopReason.ERROR, error="it broke")
        groups.append(Group(task=task, episodes=(played, lost)))
    return Evaluation(groups=groups, greedy_groups=groups, seconds=1.0)


@pytest.mark.parametrize("tasks", [100, 10])
def test_an_interval_is_as_wide_as_the_number_of_different_tasks_makes_it(tasks):
    metrics = evaluation(tasks, 100).metrics()
    assert metrics["eval/tasks"] == tasks
    run = Run.in_progress(Config(), [(0, metrics), (5, metrics)])
    for name in ("eval/success", "eval/success_greedy"):
        low, high = run.interval(name)
        half = [[1.0]] * (tasks // 2) + [[0.0]] * (tasks // 2)
        assert (low[1], high[1]) == success_interval(half)
    low, high = run.interval("eval/return")
    assert np.allclose(high - low, 2 * 1.96 * metrics["eval/return_std"] / np.sqrt(tasks))
    assert run.interval("eval/outcome") is None


def test_a_lost_evaluation_and_one_of_before_eval_tasks_have_no_interval():
    """Every episode of an evaluation may be lost, so that no task was played."""
    lost = Evaluation(groups=[], greedy_groups=[], seconds=1.0).metrics()
    run = Run.in_progress(Config(), [(0, lost), (5, evaluation(2, 4).metrics())])
    assert np.isfinite(run.interval("eval/success")).all()
    old = {k: v for k, v in lost.items() if k != "eval/tasks"}
    assert Run.in_progress(Config(), [(0, old)]).interval("eval/success") is None
    learning_curve(run, "lost")
