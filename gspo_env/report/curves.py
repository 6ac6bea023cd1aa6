"""The learning curve of a run: success rates over training steps, as a Matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gspo_env.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[tuple[int, dict[str, float]]]
"""(step, metrics) pairs that the training loop collects."""

INK = "#333333"
_GRID = "#e3e6ea"


_SERIES: dict[str, dict[str, Any]] = {
    "rollout/success": {"label": "train", "color": "#9bb8d9", "linewidth": 1.8},
    "eval/success": {
        "label": "evaluation",
        "color": "#1f5fa8",
        "linewidth": 2.4,
        "marker": "o",
        "markersize": 6,
    },
    "eval/success_greedy": {
        "label": "evaluation, greedy",
        "color": "#d9722e",
        "linewidth": 2.0,
        "marker": "s",
        "markersize": 5,
    },
}
"""Label and line style of each metric."""


def plain(text: str) -> str:
    """Returns a text that Matplotlib draws as it is, not as a formula."""
    return visible(text).replace("$", r"\$")


def learning_curve(history: History, title: str) -> Figure:
    """Draws the success rates over training steps, 1200 by 675 pixels.

    It does not use pyplot, so it needs no display, has no global state and works in any thread.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.75), dpi=100, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    drawn = [_draw(axes, history, metric, **style) for metric, style in _SERIES.items()]
    _style(axes, title)
    if any(drawn):
        axes.legend(frameon=False, loc="best", fontsize=13, labelcolor=INK)
    else:
        axes.text(0.5, 0.5, "no success rate recorded yet", ha="center", transform=axes.transAxes)
    return figure


def _draw(axes: Axes, history: History, metric: str, label: str, **style: Any) -> bool:
    """Draws the finite values of a metric; False if there are none."""
    points = [
        (step, metrics[metric])
        for step, metrics in sorted(history, key=lambda entry: entry[0])
        if math.isfinite(metrics.get(metric, math.nan))
    ]
    if not points:
        return False
    steps, values = zip(*points, strict=True)
    if len(points) == 1:  # a line through a single point is invisible
        style.setdefault("marker", "o")
    axes.plot(steps, values, label=f"{label} ({values[-1]:.0%})", clip_on=False, **style)
    return True


def _style(axes: Axes, title: str) -> None:
    """Sets the title, labels and scales."""
    from matplotlib.ticker import PercentFormatter

    frame(axes, size=13)
    axes.set_title(plain(title), loc="left", fontsize=18, color=INK, pad=16, fontweight="bold")
    axes.set_ylabel("episodes solved", fontsize=13, color=INK)
    axes.set_ylim(0.0, 1.0)
    axes.margins(x=0.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))


def frame(axes: Axes, size: int, label: str = "training step") -> None:
    """Sets up the horizontal axis, draws horizontal grid lines and removes the box."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label, fontsize=size, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=size - 1, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
