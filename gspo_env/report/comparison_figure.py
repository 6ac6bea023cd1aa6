"""The picture of a comparison: learning curves of all arms on a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.compare import Comparison, stats
from gspo_env.report.curves import INK, frame, plain
from gspo_env.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gspo_env.report.comparison import Row

_COLOURS = ("#1f5fa8", "#d9722e", "#2e8b57", "#8e44ad", "#b03060", "#5f6b76", "#c9a227", "#17a2b8")
_DASHES = ("-", (0, (5, 3)), (0, (5, 3, 1, 3)), (0, (3, 5)))
"""Lines that coincide are told apart by these."""


def curves_figure(comparison: Comparison, name: str, rows: Sequence[Row]) -> Figure:
    """Draws learning curves: a panel per value of the last axis, a colour per other setting."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, Row]] = {}
    for row in rows:
        *setting, value = row.arm.cell if len(row.arm.cell) > 1 else (row.arm.name, "")
        panels.setdefault(value, {})[" · ".join(setting)] = row
    labels = dict.fromkeys(label for panel in panels.values() for label in panel)
    colours = {label: _COLOURS[n % len(_COLOURS)] for n, label in enumerate(labels)}
    figure = Figure(
        figsize=(4.6 * len(panels) + 1.4, 4.6), dpi=100, facecolor="white", layout="constrained"
    )
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axis, (value, panel) in zip(axes, panels.items(), strict=True):
        drawn: list[FloatArray] = []
        for label, row in panel.items():
            handles[label] = _draw(axis, row, colours[label], drawn)
        others = "other arms" if len(panels) > 1 else ""
        title = f"{comparison.axes[-1]}: {value}" if value else others
        axis.set_title(plain(title), loc="left", fontsize=12, color=INK)
        frame(axis, size=11, label="training episodes")
    axes[0].set_ylabel(plain(comparison.metric), color=INK, fontsize=11)
    figure.suptitle(plain(name), x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.legend(
        handles.values(),
        [plain(label) for label in handles],
        loc="outside lower center",
        ncols=min(len(handles), 5),
        frameon=False,
        fontsize=11,
        labelcolor=INK,
    )
    return figure


def _draw(axes: Axes, row: Row, colour: str, drawn: list[FloatArray]) -> Any:
    """Draws the curve of an arm; dots if all its runs failed, dashes if it covers another curve."""
    low, high = stats.interquartile_interval(row.curves.T, resamples=1000)
    axes.fill_between(row.episodes, low, high, color=colour, alpha=0.15, linewidth=0)
    middle = stats.interquartile_mean(row.curves.T)
    same = sum(np.allclose(middle, other, rtol=0, atol=1e-9) for other in drawn)
    drawn.append(middle)
    style = ":" if row.failed == len(row.finals) else _DASHES[min(same, len(_DASHES) - 1)]
    return axes.plot(row.episodes, middle, linestyle=style, color=colour, linewidth=2)[0]
