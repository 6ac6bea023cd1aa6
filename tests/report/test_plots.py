"""The pictures of reports: panels, lines that are told apart, labels that are no formulas."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from gspo_env.config import Config
from gspo_env.health.record import RunRecord
from gspo_env.report import learning_curve
from gspo_env.report.arms import RunArm
from gspo_env.report.plots import episodes_figure
from gspo_env.types import StopReason


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


@pytest.mark.parametrize("steps", [1, 4])
def test_each_stop_reason_has_a_colour_and_a_label_of_its_own(steps):
    shares = {f"rollout/stop/{reason}": 1 / len(StopReason) for reason in StopReason}
    shares["rollout/success"] = 0.5
    run = RunRecord.in_progress(Config(), [(n + 1, shares) for n in range(steps)])
    axis = episodes_figure([RunArm(name="a", runs=(run,))]).axes[0]
    colours = {tuple(np.ravel(stack.get_facecolor())) for stack in axis.collections}
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert len(colours) == len(labels) == len(StopReason)
    assert labels == [reason.value for reason in StopReason]
