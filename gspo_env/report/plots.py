"""The pictures of a report: curves with bands, episodes, credit by turn, and the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.episodes.schema import EpisodeRecord
from gspo_env.report.arms import RunArm, band
from gspo_env.report.curves import INK, frame, plain
from gspo_env.types import StopReason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1f5fa8", "#d9722e", "#2e8b57", "#8e44ad", "#b03060", "#5f6b76", "#c9a227", "#17a2b8")
_ENDS = {
    StopReason.TERMINATED: "#9bb8d9",
    StopReason.TRUNCATED: "#c9a227",
    StopReason.MAX_TURNS: "#d9722e",
    StopReason.MAX_TURN_TOKENS: "#b03060",
    StopReason.MAX_CONTEXT: "#8e44ad",
    StopReason.TIMEOUT: "#5f6b76",
    StopReason.ERROR: "#333333",
    StopReason.INVALID: "#6b4423",
    StopReason.ENV_TIMEOUT: "#a0522d",
    StopReason.CRASH: "#000000",
}
_MOST_PANELS = 4
"""Arms whose end reasons are drawn."""
_UPDATE = {
    "train/entropy": "entropy (nats a token)",
    "train/clipped_fraction": "clipped tokens",
    "train/grad_norm": "norm of the gradient",
    "rollout/zero_variance_groups": "groups without variance",
    "train/advantage_rms": "size of the advantages",
    "train/logprob_diff_mean": "engine and trainer apart (nats)",
}
_WIDTH = 90
"""Characters of the names in a line of the legend."""
_FAR = 100
"""Factor between values from which the axis is logarithmic."""
_FEWEST = 2
"""Episodes that a turn index needs."""


def learning_figure(arms: Sequence[RunArm]) -> Figure:
    """Draws success and return of the evaluations, each with its band."""
    figure, axes = _panels(2)
    for axis, metric, title in (
        (axes[0], "eval/success", "success of evaluations"),
        (axes[1], "eval/return", "return of evaluations"),
    ):
        drawn = [_line(axis, arm, metric, n) for n, arm in enumerate(arms)]
        _dress(axis, title, any(drawn))
        if metric == "eval/success":
            _rates(axis)
            if len(arms) == 1 and _line(axis, arms[0], "rollout/success", 0, alpha=0.35):
                _legend(axis)
    return _finish(figure, arms)


def episodes_figure(arms: Sequence[RunArm]) -> Figure:
    """Draws the end reasons of training episodes, and their turns and tokens."""
    shown = arms[:_MOST_PANELS]
    figure, axes = _panels(len(shown) + 2)
    seen: dict[StopReason, Any] = {}
    for axis, arm in zip(axes, shown, strict=False):
        seen |= _ends(axis, arm)
        _dress(axis, _shortened(arm.name) if len(arms) > 1 else "end reasons", bool(seen))
        _rates(axis)
    if seen:
        axes[0].legend(
            seen.values(), [r.value for r in seen], loc="lower left", fontsize=9, framealpha=0.8
        )
    for axis, metric, title in (
        (axes[-2], "rollout/turns", "turns of an episode"),
        (axes[-1], "rollout/tokens", "sampled tokens of an episode"),
    ):
        drawn = [
            _line(axis, arm, metric, n, scale=_per_episode(arm) if "tokens" in metric else 1.0)
            for n, arm in enumerate(arms)
        ]
        _dress(axis, title, any(drawn))
        axis.set_ylim(bottom=0)
    return _finish(figure, arms)


def _shortened(name: str) -> str:
    name = f"ends: {name}"
    return name if len(name) <= _WIDTH // 2 else f"{name[: _WIDTH // 2 - 3]}..."


def _per_episode(arm: RunArm) -> float:
    return 1 / float(np.mean([run.episodes_per_step for run in arm.runs]))


def _ends(axis: Axes, arm: RunArm) -> dict[StopReason, Any]:
    """Draws the shares of the end reasons on top of each other, as the mean over the runs."""
    bands = {reason: band(arm, f"rollout/stop/{reason}") for reason in _ENDS}
    found = {r: b for r, b in bands.items() if b is not None and b.middle.max() > 0}
    if not found:
        return {}
    steps = next(iter(found.values())).steps
    rows = [b.middle for b in found.values() if len(b.steps) == len(steps)]
    colours = [_ENDS[reason] for reason in found]
    if len(steps) == 1:
        bottoms = np.cumsum([0.0, *(float(row[0]) for row in rows[:-1])])
        made: Any = [
            axis.bar(steps, row, bottom=bottom, color=colour)
            for row, bottom, colour in zip(rows, bottoms, colours, strict=False)
        ]
    else:
        made = axis.stackplot(steps, rows, colors=colours, linewidth=0)
    return dict(zip(found, made, strict=False))


def credit_figure(arms: Sequence[RunArm], episodes: Sequence[Sequence[EpisodeRecord]]) -> Figure:
    """Draws the advantages by the index of the turn: the mean size, and how they spread.

    Args:
        arms: The arms.
        episodes: For each arm, kept training episodes.
    """
    figure, axes = _panels(2)
    for n, kept in enumerate(episodes):
        rows = _by_index(kept)
        if not rows:
            continue
        turns, colour = np.arange(1, len(rows) + 1), COLOURS[n % len(COLOURS)]
        sizes = np.array([np.abs(row).mean() for row in rows])
        errors = np.array([1.96 * np.abs(row).std() / np.sqrt(len(row)) for row in rows])
        axes[0].fill_between(turns, sizes - errors, sizes + errors, color=colour, alpha=0.15, lw=0)
        axes[0].plot(turns, sizes, color=colour, linewidth=2, marker="o", markersize=5)
        low, high = (np.array([np.quantile(row, q) for row in rows]) for q in (0.1, 0.9))
        axes[1].fill_between(turns, low, high, color=colour, alpha=0.15, linewidth=0)
        means = [row.mean() for row in rows]
        axes[1].plot(turns, means, color=colour, linewidth=2, marker="o", markersize=5)
    known = any(_by_index(kept) for kept in episodes)
    _dress(axes[0], "mean size of a turn's advantage", known, "turn")
    _dress(axes[1], "mean advantage, and 80 % of the turns", known, "turn")
    axes[0].set_ylim(bottom=0)
    axes[1].axhline(0, color=INK, linewidth=0.8)
    return _finish(figure, arms)


def _by_index(episodes: Sequence[EpisodeRecord]) -> list[np.ndarray]:
    """Returns the advantages of each turn index, up to where too few episodes have that turn."""
    found = [
        [float(np.mean([v for v in t.advantages or () if v is not None] or [0.0])) for t in e.turns]
        for e in episodes
        if e.trained
    ]
    longest = max((len(row) for row in found), default=0)
    rows = [np.array([row[k] for row in found if len(row) > k]) for k in range(longest)]
    return [row for row in rows if len(row) >= _FEWEST]


def update_figure(arms: Sequence[RunArm]) -> Figure:
    """Draws what the update measured."""
    figure, axes = _panels(len(_UPDATE))
    for axis, (metric, title) in zip(axes, _UPDATE.items(), strict=True):
        drawn = [_line(axis, arm, metric, n) for n, arm in enumerate(arms)]
        _dress(axis, title, any(drawn))
        low, high = axis.dataLim.intervaly
        if low > 0 and high > _FAR * low:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=min(0.0, low) if any(drawn) else 0)
    return _finish(figure, arms)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(
        figsize=(4.7 * columns, 3.7 * rows + 0.5), dpi=100, facecolor="white", layout="constrained"
    )
    axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _line(
    axis: Axes,
    arm: RunArm,
    metric: str,
    number: int,
    *,
    scale: float = 1.0,
    alpha: float = 1.0,
) -> bool:
    """Draws the curve of an arm, its band and, thin, its runs; returns whether it has any."""
    colour, found = COLOURS[number % len(COLOURS)], band(arm, metric)
    if len(arm.runs) > 1:
        for run in arm.runs:
            if (one := run.series.get(metric)) is not None:
                axis.plot(one.steps, one.values * scale, color=colour, linewidth=0.7, alpha=0.3)
    if found is None:
        return False
    if found.kind != "none":
        low, high = found.low * scale, found.high * scale
        axis.fill_between(found.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    few = len(found.steps) <= 12 and alpha == 1.0
    style: dict[str, Any] = {"marker": "o", "markersize": 4} if few else {}
    axis.plot(found.steps, found.middle * scale, color=colour, linewidth=2, alpha=alpha, **style)
    return True


def _dress(axis: Axes, title: str, known: bool, label: str = "training step") -> None:
    frame(axis, size=10, label=label)
    axis.set_title(plain(title), loc="left", fontsize=11, color=INK)
    axis.margins(x=0.02)
    if not known:
        axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes, color=INK)


def _legend(axis: Axes) -> None:
    """Names the solid line and the pale one."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLOURS[0], linewidth=2, alpha=a) for a in (1.0, 0.35)]
    axis.legend(handles, ["evaluation", "training"], frameon=False, fontsize=10, labelcolor=INK)


def _rates(axis: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_ylim(-0.01, 1.01)
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))


def _finish(figure: Figure, arms: Sequence[RunArm]) -> Figure:
    """Adds a legend of the arms, if there are several."""
    from matplotlib.lines import Line2D

    if len(arms) > 1:
        handles = [
            Line2D([], [], color=COLOURS[n % len(COLOURS)], linewidth=2) for n in range(len(arms))
        ]
        # a label that begins with _ would be left out
        counts = [f" ({len(arm.runs)})" if len(arm.runs) > 1 else "" for arm in arms]
        names = [f"\u200a{plain(arm.name)}{n}" for arm, n in zip(arms, counts, strict=True)]
        figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=min(len(arms), max(1, _WIDTH // max(map(len, names)))),
            frameon=False,
            fontsize=10,
            labelcolor=INK,
        )
    return figure
