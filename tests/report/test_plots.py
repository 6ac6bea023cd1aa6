"""The pictures of reports: panels, lines that are told apart, labels that are no formulas."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from gspo_env.compare.stats import success_interval
from gspo_env.config import Config
from gspo_env.health.record import RunRecord
from gspo_env.report import learning_curve


def draw(history):
    return learning_curve(RunRecord.in_progress(Config(), history), "Guess, $x$")


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


def test_the_band_of_an_evaluation_is_wilsons_interval():
    run = RunRecord.in_progress(Config(eval_tasks=256), [(0, {"eval/success": 0.5})])
    axis = learning_curve(run, "Guess").axes[0]
    low, high = success_interval([[1.0]] * 128 + [[0.0]] * 128)
    (band,) = axis.collections
    edges = [float(y) for _, y in band.get_paths()[0].vertices]
    assert (min(edges), max(edges)) == pytest.approx((low, high))
