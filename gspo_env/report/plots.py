"""The picture of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gspo_env.compare import Comparison, stats
from gspo_env.runs.plots import COLOURS, INK, dash, dress, panels, plain
from gspo_env.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gspo_env.report.comparison import Row


def comparison_figure(comparison: Comparison, name: str, rows: Sequence[Row]) -> Figure:
    """Draws learning curves: a panel per value of the last axis, a colour per other setting."""
    by_value: dict[str, dict[str, Row]] = {}
    for row in rows:
        *setting, value = row.arm.cell if len(row.arm.cell) > 1 else (row.arm.name, "")
        by_value.setdefault(value, {})[" · ".join(setting)] = row
    labels = list(dict.fromkeys(label for panel in by_value.values() for label in panel))
    figure, axes = panels(len(by_value), sharey=True)
    handles: dict[str, Any] = {}
    for axis, (value, panel) in zip(axes, by_value.items(), strict=True):
        drawn: list[FloatArray] = []
        for label, row in panel.items():
            low, high = stats.interquartile_interval(row.curves.T, resamples=1000)
            middle = stats.interquartile_mean(row.curves.T)
            colour = COLOURS[labels.index(label) % len(COLOURS)]
            axis.fill_between(row.episodes, low, high, color=colour, alpha=0.15, linewidth=0)
            line = ":" if row.failed == len(row.finals) else dash(middle, drawn)
            style: dict[str, Any] = {"linestyle": line, "color": colour, "linewidth": 2}
            handles[plain(label)] = axis.plot(row.episodes, middle, **style)[0]
        others = "other arms" if len(by_value) > 1 else comparison.metric
        title = f"{comparison.axes[-1]}: {value}" if value else others
        dress(axis, title, True, "training episodes")
    figure.suptitle(plain(name), x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    _legend(figure, handles)
    return figure


_LEGEND_WIDTH = 90
"""Characters of the names in a line of the legend."""


def _legend(figure: Figure, handles: dict[str, Any]) -> None:
    """Draws the legend of all panels below them."""
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), max(1, _LEGEND_WIDTH // max(map(len, handles)))),
        frameon=False,
        fontsize=10,
        labelcolor=INK,
    )
