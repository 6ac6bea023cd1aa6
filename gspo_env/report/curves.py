"""The learning curve of a run: success rates over training steps, as a Matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gspo_env.redaction import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[tuple[int, dict[str, float]]]
"""(step, metrics) pairs that the training loop collects."""

INK = "#333333"
_GRID = "#e3e6ea"


_TRAIN: dict[str, Any] = {"color": "#9bb8d9", "linewidth": 1.8}
_EVAL: dict[str, Any] = {"color": "#1f5fa8", "linewidth": 2.4, "marker": "o", "markersize": 6}
_GREEDY: dict[str, Any] = {"color": "#d9722e", "linewidth": 2.0, "marker": "s", "markersize": 5}
_SUCCESS = {
    "rollout/success": ("train", _TRAIN),
    "eval/success": ("evaluation", _EVAL),
    "eval/success_greedy": ("evaluation, greedy", _GREEDY),
}
_REWARDS = {
    "rollout/return": ("return, train", _TRAIN),
    "eval/return": ("return, evaluation", _EVAL),
    "rollout/outcome": ("outcome, train", _TRAIN | {"color": "#d9b49b"}),
    "eval/outcome": ("outcome, evaluation", _GREEDY),
}
"""Label and line style of each metric."""
_PART = "rollout/reward/"
_PARTS = ("#2e8b57", "#8e44ad", "#b03060", "#5f6b76", "#c9a227", "#17a2b8")
"""Colours of the parts of the reward."""
_DASHES = ("-", (0, (5, 3)), (0, (1, 2)))
"""Lines that coincide are told apart by these."""


def plain(text: str) -> str:
    """Returns a text that Matplotlib draws as it is, not as a formula."""
    return visible(text).replace("$", r"\$")


def learning_curve(history: History, title: str) -> Figure:
    """Draws the success rates over training steps, and beside them the rewards, if any differ.

    The picture has 1200 by 675 pixels. It does not use pyplot, so it needs no display, has no
    global state and works in any thread.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.75), dpi=100, facecolor="white", layout="constrained")
    panels = _panels(history)
    row = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, series in zip(row, panels, strict=False):
        rates = series.keys() <= _SUCCESS.keys()
        _draw(axes, history, series, ".0%" if rates else ".3g")
        _style(axes, rates)
        axes.legend(frameon=False, loc="best", fontsize=13 - len(panels), labelcolor=INK)
    if not panels:
        _style(row[0], True)
        row[0].text(0.5, 0.5, "nothing recorded yet", ha="center", transform=row[0].transAxes)
    figure.suptitle(plain(title), x=0.01, ha="left", fontsize=18, color=INK, fontweight="bold")
    return figure


Series = dict[str, tuple[str, dict[str, Any]]]


def _panels(history: History) -> list[Series]:
    """Returns the series of each panel.

    Rewards have a panel if one of them varies and says more than the success rates. A success rate
    that is always 0 has none beside rewards that vary.
    """
    known = {name for _, metrics in history for name in metrics}
    parts = sorted(name for name in known if name.startswith(_PART))[: len(_PARTS)]
    more = {
        name: (name.removeprefix(_PART), {"color": colour, "linewidth": 1.6})
        for name, colour in zip(parts, _PARTS, strict=False)
    }
    success = {name: style for name, style in _SUCCESS.items() if _points(history, name)}
    rewards: Series = {}
    for name, style in (_REWARDS | more).items():
        kind = name.partition("/")[0]
        shown = [_points(history, other) for other in (f"{kind}/success", f"{kind}/return")]
        values = _points(history, name)
        varies = len({value for _, value in values}) > 1
        if varies and values not in (shown[:1] if name == f"{kind}/return" else shown):
            rewards[name] = style
    flat = all(value == 0 for name in success for _, value in _points(history, name))
    return [series for series in ({} if rewards and flat else success, rewards) if series]


def _points(history: History, metric: str) -> list[tuple[int, float]]:
    """Returns the finite values of a metric by step."""
    return sorted(
        (step, metrics[metric])
        for step, metrics in history
        if math.isfinite(metrics.get(metric, math.nan))
    )


def _draw(axes: Axes, history: History, panel: Series, form: str) -> None:
    """Draws the series of a panel; one that coincides with others has dashes."""
    drawn: list[list[tuple[int, float]]] = []
    for name, (label, given) in panel.items():
        points = _points(history, name)
        style = dict(given)
        same = sum(_coincide(points, other) for other in drawn)
        style["linestyle"] = _DASHES[min(same, len(_DASHES) - 1)]
        drawn.append(points)
        if len(points) == 1:  # a line through a single point is invisible
            style.setdefault("marker", "o")
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, label=plain(f"{label} ({values[-1]:{form}})"), **style)


def _coincide(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    """Returns whether two series have equal values at all steps that both have."""
    known = dict(other)
    pairs = [(value, known[step]) for step, value in one if step in known]
    return bool(pairs) and all(math.isclose(a, b, abs_tol=1e-9) for a, b in pairs)


def _style(axes: Axes, rates: bool) -> None:
    """Sets the labels and scales of a panel of success rates or of rewards."""
    from matplotlib.ticker import PercentFormatter

    frame(axes, size=13)
    axes.set_title(
        "episodes solved" if rates else "rewards", loc="left", fontsize=14, color=INK, pad=12
    )
    axes.margins(x=0.02)
    if rates:
        axes.set_ylim(-0.01, 1.01)  # a line at 0 or 1 is seen whole
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    else:
        axes.margins(y=0.08)


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
