"""The pictures of reports: curves with bands, episodes, credit by turn, and comparisons.

They do not use pyplot, so they need no display, have no global state and work in any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.compare import Comparison, stats
from gspo_env.episodes.schema import EpisodeRecord
from gspo_env.health.record import RunRecord
from gspo_env.redaction import visible
from gspo_env.report.arms import RunArm, band
from gspo_env.types import FloatArray, StopReason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gspo_env.report.comparison import Row

_INK, _GRID = "#333333", "#e3e6ea"
_COLOURS = ("#1f5fa8", "#d9722e", "#2e8b57", "#8e44ad", "#b03060", "#5f6b76", "#c9a227", "#17a2b8")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 3)), (0, (5, 3, 1, 3)), (0, (3, 5)))
"""Lines that coincide are told apart by these."""
_MAX_PANELS = 4
"""Arms whose stop reasons are drawn."""
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
_UPDATE = {
    "train/entropy": "entropy (nats a token)",
    "train/clipped_fraction": "clipped tokens",
    "train/grad_norm": "norm of the gradient",
    "rollout/zero_variance_groups": "groups without variance",
    "train/advantage_rms": "size of the advantages",
    "train/logprob_diff_mean": "engine and trainer apart (nats)",
}
_LEGEND_WIDTH = 90
"""Characters of the names in a line of the legend."""
_LONGEST_LABEL = 300
"""Characters of a name that are drawn; a picture of a hundred thousand takes ten seconds."""
_FEWEST = 2
"""Episodes that a turn index needs to be drawn."""


def learning_curve(run: RunRecord, title: str) -> Figure:
    """Draws success and return of one run, in 1200 by 675 pixels."""
    figure = learning_figure([RunArm(name=title, runs=(run,))])
    figure.set_size_inches(12, 6.75)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=16, color=_INK, fontweight="bold")
    return figure


def learning_figure(arms: Sequence[RunArm]) -> Figure:
    """Draws success and return: of one arm in training and evaluations, of several the latter."""
    figure, axes = _panels(2)
    for axis, (title, metrics) in zip(axes, _LEARNING.items(), strict=True):
        drawn: list[FloatArray] = []
        for n, arm in enumerate(arms):
            for metric, (label, style) in metrics.items():
                if len(arms) == 1:
                    _line(axis, arm, metric, n, drawn=drawn, label=label, **style)
                elif metric == f"eval/{title}":
                    _line(axis, arm, metric, n, drawn=drawn, **style)
        _dress(axis, title, bool(drawn))
        if title == "success":
            _rates(axis)
        if drawn and len(arms) == 1:
            axis.legend(frameon=False, fontsize=10, labelcolor=_INK)
    return _finish(figure, arms)


def episodes_figure(arms: Sequence[RunArm]) -> Figure:
    """Draws the stop reasons of training episodes, and their turns and tokens."""
    stacked = arms[:_MAX_PANELS]
    figure, axes = _panels(len(stacked) + 2)
    handles: dict[str, Any] = {}
    for axis, arm in zip(axes, stacked, strict=False):
        handles |= _stop_reasons(axis, arm)
        name = f"stop reasons: {arm.name}" if len(arms) > 1 else "stop reasons"
        _dress(axis, name if len(name) <= 45 else f"{name[:42]}...", bool(handles))
        _rates(axis)
    if handles:
        axes[0].legend(handles.values(), handles, loc="lower left", fontsize=9, framealpha=0.8)
    for axis, metric, title in (
        (axes[-2], "rollout/turns", "turns of an episode"),
        (axes[-1], "rollout/tokens", "sampled tokens of an episode"),
    ):
        drawn: list[FloatArray] = []
        for n, arm in enumerate(arms):
            episodes = float(np.mean([run.episodes_per_step for run in arm.runs]))
            scale = 1 / episodes if metric == "rollout/tokens" else 1.0
            _line(axis, arm, metric, n, drawn=drawn, scale=scale)
        _dress(axis, title, bool(drawn))
        axis.set_ylim(bottom=0)
    return _finish(figure, arms)


def _stop_reasons(axis: Axes, arm: RunArm) -> dict[str, Any]:
    """Stacks the shares of the stop reasons, as the mean over the runs; returns the handles."""
    from matplotlib import colormaps

    bands = {reason.value: band(arm, f"rollout/stop/{reason}") for reason in StopReason}
    shares = {name: b for name, b in bands.items() if b is not None and b.middle.max() > 0}
    if not shares:
        return {}
    steps = next(iter(shares.values())).steps
    shares = {name: b for name, b in shares.items() if len(b.steps) == len(steps)}
    colours = [colormaps["tab20"](list(bands).index(name)) for name in shares]
    rows = [b.middle for b in shares.values()]
    if len(steps) == 1:  # an area of one step would be invisible
        steps, rows = np.array([steps[0] - 0.5, steps[0] + 0.5]), [np.repeat(r, 2) for r in rows]
    return dict(zip(shares, axis.stackplot(steps, rows, colors=colours), strict=True))


def credit_figure(arms: Sequence[RunArm], episodes: Sequence[Sequence[EpisodeRecord]]) -> Figure:
    """Draws the advantages by the index of the turn: the mean size, and how they spread.

    Args:
        arms: The arms.
        episodes: For each arm, kept training episodes.
    """
    figure, axes = _panels(2)
    drawn = False
    for n, records in enumerate(episodes):
        rows = _advantages_by_turn(records)
        if not rows:
            continue
        drawn = True
        turns, colour = np.arange(1, len(rows) + 1), _COLOURS[n % len(_COLOURS)]
        sizes = np.array([np.abs(row).mean() for row in rows])
        errors = np.array([1.96 * np.abs(row).std() / np.sqrt(len(row)) for row in rows])
        means = np.array([row.mean() for row in rows])
        low, high = (np.array([np.quantile(row, q) for row in rows]) for q in (0.1, 0.9))
        for axis, middle, bottom, top in (
            (axes[0], sizes, sizes - errors, sizes + errors),
            (axes[1], means, low, high),
        ):
            axis.fill_between(turns, bottom, top, color=colour, alpha=0.15, linewidth=0)
            axis.plot(turns, middle, color=colour, linewidth=2, marker="o", markersize=5)
    _dress(axes[0], "mean size of a turn's advantage", drawn, "turn")
    _dress(axes[1], "mean advantage, and 80 % of the turns", drawn, "turn")
    axes[0].set_ylim(bottom=0)
    axes[1].axhline(0, color=_INK, linewidth=0.8)
    return _finish(figure, arms)


def _advantages_by_turn(episodes: Sequence[EpisodeRecord]) -> list[FloatArray]:
    """Returns the advantages of each turn index, up to where too few episodes have that turn."""
    by_turn: dict[int, list[float]] = {}
    for episode in episodes:
        for index, turn in enumerate(episode.turns if episode.trained else ()):
            values = [v for v in turn.advantages or () if v is not None]
            by_turn.setdefault(index, []).append(float(np.mean(values)) if values else 0.0)
    return [np.array(row) for _, row in sorted(by_turn.items()) if len(row) >= _FEWEST]


def update_figure(arms: Sequence[RunArm]) -> Figure:
    """Draws what the update measured."""
    figure, axes = _panels(len(_UPDATE))
    for axis, (metric, title) in zip(axes, _UPDATE.items(), strict=True):
        drawn: list[FloatArray] = []
        for n, arm in enumerate(arms):
            _line(axis, arm, metric, n, drawn=drawn)
        _dress(axis, title, bool(drawn))
        low, high = axis.dataLim.intervaly
        if low > 0 and high > 100 * low:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=min(0.0, low) if drawn else 0)
    return _finish(figure, arms)


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
    """Returns a text, or its beginning, that Matplotlib draws as it is, not as a formula."""
    return visible(text[:_LONGEST_LABEL]).replace("$", r"\$")


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


def _line(
    axis: Axes,
    arm: RunArm,
    metric: str,
    number: int,
    *,
    drawn: list[FloatArray],
    scale: float = 1.0,
    label: str | None = None,
    **style: Any,
) -> None:
    """Draws the curve of an arm, its band and, thin, its runs; adds the curve to `drawn`."""
    curve = band(arm, metric)
    if curve is None:
        return
    colour = _COLOURS[number % len(_COLOURS)]
    if len(arm.runs) > 1:
        for run in arm.runs:
            one = run.series[metric]
            axis.plot(one.steps, one.values * scale, color=colour, linewidth=0.7, alpha=0.3)
    if curve.kind != "none":
        low, high = curve.low * scale, curve.high * scale
        axis.fill_between(curve.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    middle = curve.middle * scale
    if len(middle) == 1:  # a line through a single point is invisible
        style.setdefault("marker", "o")
    style = {"linewidth": 2, "markersize": 4, "linestyle": _dash(middle, drawn), **style}
    axis.plot(curve.steps, middle, color=colour, label=label, **style)


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


def _finish(figure: Figure, arms: Sequence[RunArm]) -> Figure:
    """Adds a legend of the arms, if there are several."""
    from matplotlib.lines import Line2D

    if len(arms) > 1:
        handles: dict[str, Any] = {}
        for n, arm in enumerate(arms):
            count = f" ({len(arm.runs)})" if len(arm.runs) > 1 else ""
            line = Line2D([], [], color=_COLOURS[n % len(_COLOURS)], linewidth=2)
            # a label that begins with _ would be left out
            handles[f"\u200a{plain(arm.name)}{count}"] = line
        _legend(figure, handles)
    return figure


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
