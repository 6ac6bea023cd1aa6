"""The pictures of a run and of a comparison.

They do not use pyplot, so they need no display, have no global state and work in any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.compare import Comparison, stats
from gspo_env.health.record import RunRecord
from gspo_env.redaction import visible
from gspo_env.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gspo_env.report.comparison import Row

_INK, _GRID = "#333333", "#e3e6ea"
_COLOURS = ("#1f5fa8", "#d9722e", "#2e8b57", "#8e44ad", "#b03060", "#5f6b76", "#c9a227", "#17a2b8")
_BLUE = _COLOURS[0]
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
_LEGEND_WIDTH = 90
"""Characters of the names in a line of the legend."""
_Z = 1.96
"""Standard errors of a 95 % interval."""


def learning_curve(run: RunRecord, title: str) -> Figure:
    """Draws success and return of a run in training and evaluations, in 1200 by 675 pixels."""
    figure, axes = _panels(2)
    for axis, (name, metrics) in zip(axes, _LEARNING.items(), strict=True):
        drawn: list[FloatArray] = []
        for metric, (label, style) in metrics.items():
            if metric in run.series:
                _line(axis, run, metric, drawn, label=label, **style)
        _dress(axis, name, bool(drawn))
        if name == "success":
            _rates(axis)
        if drawn:
            axis.legend(frameon=False, fontsize=10, labelcolor=_INK)
    figure.set_size_inches(12, 6.75)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=16, color=_INK, fontweight="bold")
    return figure


def comparison_figure(comparison: Comparison, name: str, rows: Sequence[Row]) -> Figure:
    """Draws learning curves: a panel per value of the last axis, a colour per other setting."""
    panels: dict[str, dict[str, Row]] = {}
    for row in rows:
        *setting, value = row.arm.cell if len(row.arm.cell) > 1 else (row.arm.name, "")
        panels.setdefault(value, {})[" · ".join(setting)] = row
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    figure, axes = _panels(len(panels), sharey=True)
    handles: dict[str, Any] = {}
    for axis, (value, panel) in zip(axes, panels.items(), strict=True):
        drawn: list[FloatArray] = []
        for label, row in panel.items():
            low, high = stats.interquartile_interval(row.curves.T, resamples=1000)
            middle = stats.interquartile_mean(row.curves.T)
            colour = _COLOURS[labels.index(label) % len(_COLOURS)]
            axis.fill_between(row.episodes, low, high, color=colour, alpha=0.15, linewidth=0)
            dash = ":" if row.failed == len(row.finals) else _dash(middle, drawn)
            style: dict[str, Any] = {"linestyle": dash, "color": colour, "linewidth": 2}
            handles[plain(label)] = axis.plot(row.episodes, middle, **style)[0]
        others = "other arms" if len(panels) > 1 else comparison.metric
        title = f"{comparison.axes[-1]}: {value}" if value else others
        _dress(axis, title, True, "training episodes")
    figure.suptitle(plain(name), x=0.01, ha="left", fontsize=15, fontweight="bold", color=_INK)
    _legend(figure, handles)
    return figure


def plain(text: str) -> str:
    """Returns a text that Matplotlib draws as it is, not as a formula."""
    return visible(text).replace("$", r"\$")


def _panels(count: int, **options: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    size = (4.7 * columns, 3.7 * rows + 0.5)
    figure = Figure(figsize=size, dpi=100, facecolor="white", layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).ravel())
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _line(axis: Axes, run: RunRecord, metric: str, drawn: list[FloatArray], **style: Any) -> None:
    """Draws a curve, with its 95 % interval over the episodes of an evaluation."""
    steps, values = run.series[metric].steps, run.series[metric].values
    count, spread = int(run.number("eval_tasks") or 0), run.series.get("eval/return_std")
    if count and metric in ("eval/success", "eval/success_greedy"):
        wins = [min(count, max(0, round(value * count))) for value in values]
        pairs = [stats.success_interval([[1.0]] * w + [[0.0]] * (count - w)) for w in wins]
        axis.fill_between(steps, *np.asarray(pairs).T, color=_BLUE, alpha=0.15, linewidth=0)
    elif count and metric == "eval/return" and spread and len(spread.values) == len(values):
        half = _Z * spread.values / np.sqrt(count)
        axis.fill_between(steps, values - half, values + half, color=_BLUE, alpha=0.15, linewidth=0)
    if len(values) == 1:  # a line through a single point is invisible
        style.setdefault("marker", "o")
    style = {"linewidth": 2, "markersize": 4, "linestyle": _dash(values, drawn), **style}
    axis.plot(steps, values, color=_BLUE, **style)


def _dash(curve: FloatArray, drawn: list[FloatArray]) -> Any:
    """Adds a curve to those that were drawn; returns dashes if it covers one of them."""
    same = sum(len(curve) == len(other) and np.allclose(curve, other) for other in drawn)
    drawn.append(curve)
    return _DASHES[min(same, len(_DASHES) - 1)]


def _dress(axis: Axes, title: str, recorded: bool, label: str = "training step") -> None:
    """Adds title and label, draws horizontal grid lines and removes the box."""
    from matplotlib.ticker import MaxNLocator

    axis.set_title(plain(title), loc="left", fontsize=11, color=_INK)
    axis.set_xlabel(label, fontsize=10, color=_INK)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.grid(axis="y", color=_GRID)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_INK, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_GRID)
    axis.margins(x=0.02)
    if not recorded:
        axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes, color=_INK)


def _rates(axis: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_ylim(-0.01, 1.01)  # a line at 0 or 1 is seen whole
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))


def _legend(figure: Figure, handles: dict[str, Any]) -> None:
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), max(1, _LEGEND_WIDTH // max(map(len, handles)))),
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
    )
