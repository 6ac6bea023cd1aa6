"""The learning curve of a run, and what pictures of curves share.

They do not use pyplot, so they need no display, have no global state and work in any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.redaction import visible
from gspo_env.runs.run import Run
from gspo_env.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, _GRID = "#333333", "#e3e6ea"
COLOURS = ("#1f5fa8", "#d9722e", "#2e8b57", "#8e44ad", "#b03060", "#5f6b76", "#c9a227", "#17a2b8")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 3)), (0, (5, 3, 1, 3)), (0, (3, 5)))
"""Lines that coincide are told apart by these."""
_LEARNING: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "success": {
        "rollout/success": ("training", {"alpha": 0.35}),
        "eval/success": ("evaluation", {"marker": "o"}),
        "eval/success_greedy": ("evaluation, greedy", {"marker": "s", "linewidth": 1.2}),
    },
    "return": {
        "rollout/return": ("training", {"alpha": 0.35}),
        "eval/return": ("evaluation", {"marker": "o"}),
    },
}
"""Metrics of each panel of learning curves, with their labels and styles."""
_LONGEST_LABEL = 300
"""Characters of a name that are drawn; a picture of a hundred thousand takes ten seconds."""


def learning_curve(run: Run, title: str) -> Figure:
    """Draws success and return of a run, in training and evaluations, in 1200 by 675 pixels."""
    from matplotlib.ticker import PercentFormatter

    figure, axes = panels(2)
    for axis, (name, metrics) in zip(axes, _LEARNING.items(), strict=True):
        drawn: list[FloatArray] = []
        for metric, (label, style) in metrics.items():
            if metric in run.series:
                _line(axis, run, metric, drawn, {"label": label, **style})
        dress(axis, name, bool(drawn))
        if name == "success":
            axis.set_ylim(-0.01, 1.01)  # a line at 0 or 1 is seen whole
            axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
        if drawn:
            axis.legend(frameon=False, fontsize=10, labelcolor=INK)
    # a layout engine would draw everything once more
    figure.set(size_inches=(12, 6.75), layout_engine=None)
    figure.subplots_adjust(left=0.05, bottom=0.08, right=0.98, top=0.88, wspace=0.15)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=16, color=INK, fontweight="bold")
    return figure


def _line(
    axis: Axes, run: Run, metric: str, drawn: list[FloatArray], style: dict[str, Any]
) -> None:
    """Draws a curve, and the interval of an evaluation's means; adds the curve to `drawn`."""
    curve = run.series[metric]
    bounds = run.interval(metric)
    if bounds is not None:
        axis.fill_between(curve.steps, *bounds, color=COLOURS[0], alpha=0.15, linewidth=0)
    if len(curve.values) == 1:  # a line through a single point is invisible
        style.setdefault("marker", "o")
    style = {"linewidth": 2, "markersize": 4, "linestyle": dash(curve.values, drawn), **style}
    axis.plot(curve.steps, curve.values, color=COLOURS[0], **style)


def plain(text: str) -> str:
    """Returns a text, or its beginning, that Matplotlib draws as it is, not as a formula."""
    return visible(text[:_LONGEST_LABEL]).replace("$", r"\$")


def panels(count: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """Returns a figure with this many panels, in rows."""
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    size = (4.7 * columns, 3.7 * rows + 0.5)
    figure = Figure(figsize=size, dpi=100, facecolor="white", layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).ravel())
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def dash(curve: FloatArray, drawn: list[FloatArray]) -> Any:
    """Adds a curve to those that were drawn; returns dashes if it covers one of them."""
    same = sum(len(curve) == len(other) and np.allclose(curve, other) for other in drawn)
    drawn.append(curve)
    return _DASHES[min(same, len(_DASHES) - 1)]


def dress(axis: Axes, title: str, recorded: bool, label: str = "training step") -> None:
    """Adds title and label, draws horizontal grid lines and removes the box."""
    from matplotlib.ticker import MaxNLocator

    axis.set_title(plain(title), loc="left", fontsize=11, color=INK)
    axis.set_xlabel(label, fontsize=10, color=INK)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.grid(axis="y", color=_GRID)
    axis.set_axisbelow(True)
    axis.tick_params(colors=INK, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_GRID)
    axis.margins(x=0.02)
    if not recorded:
        axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes, color=INK)
