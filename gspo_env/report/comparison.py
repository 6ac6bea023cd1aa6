"""What a comparison found: scores with intervals, tests, learning curves, and a page of it all."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.compare import Arm, Comparison, Result, stats
from gspo_env.report.curves import INK, quiet_frame
from gspo_env.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#1f5fa8", "#d9722e", "#2e8b57", "#8e44ad", "#b03060", "#5f6b76", "#c9a227", "#17a2b8")
_TAIL = 0.1
"""Share of a curve's points that its final score is the mean of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """An interquartile mean over seeds with its 95 % bootstrap interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        """Three decimals and the interval."""
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One arm on one problem."""

    arm: Arm
    final: Score
    """The mean of the curve's end, over seeds."""
    area: Score
    """The mean of the curve, over seeds."""
    finals: FloatArray
    """(S,) final score of each seed; a failed run scores 0."""
    areas: FloatArray
    """(S,) mean of each seed's curve."""
    curves: FloatArray
    """(S, points)"""
    steps: tuple[int, ...]
    failed: int
    to_target: tuple[float, ...]
    """Episodes until the target was first reached, by seed; infinite where it never was."""
    improvement: float
    """Probability that a run has a larger area than one of the first arm."""
    p_value: float
    """Of the paired difference in area from the first arm, after Holm's correction."""


def summarise(comparison: Comparison, results: Sequence[Result]) -> dict[str, list[Row]]:
    """Every arm of every problem, in order."""
    return {name: _problem(comparison, name, results) for name in comparison.problems}


def _problem(comparison: Comparison, name: str, results: Sequence[Result]) -> list[Row]:
    mine = [r for r in results if r.run.problem == name]
    steps = max((tuple(r.curve(comparison.metric)[0]) for r in mine), key=len) or (0,)
    config = comparison.problems[name]
    episodes = config.tasks_per_step * config.rollout.group_size
    curves = {
        arm.name: np.array(
            [_curve(r, comparison.metric, steps) for r in mine if r.run.arm.name == arm.name]
        )
        for arm in comparison.arms
    }
    areas = {arm: rows.mean(axis=1) for arm, rows in curves.items()}
    base = areas[comparison.arms[0].name]
    raw = [
        stats.paired_permutation_test(areas[arm.name].tolist(), base.tolist())
        for arm in comparison.arms[1:]
    ]
    adjusted = [1.0, *stats.holm(raw)]
    tail = max(1, round(_TAIL * len(steps)))
    finals = {arm: rows[:, -tail:].mean(axis=1) for arm, rows in curves.items()}
    return [
        Row(
            arm=arm,
            final=_score(finals[arm.name]),
            area=_score(areas[arm.name]),
            finals=finals[arm.name],
            areas=areas[arm.name],
            curves=curves[arm.name],
            steps=steps,
            failed=sum(bool(r.error) for r in mine if r.run.arm.name == arm.name),
            to_target=_to_target(curves[arm.name], steps, episodes, comparison.target),
            improvement=stats.probability_of_improvement(areas[arm.name].tolist(), base.tolist()),
            p_value=adjusted[n],
        )
        for n, arm in enumerate(comparison.arms)
    ]


def _curve(result: Result, metric: str, steps: Sequence[int]) -> FloatArray:
    """The values at these steps; a run that failed has none: it solved nothing."""
    if result.error:
        return np.zeros(len(steps))
    own, values = result.curve(metric)
    return np.interp(steps, own, values)


def _to_target(
    curves: FloatArray, steps: Sequence[int], episodes: int, target: float
) -> tuple[float, ...]:
    if not target:
        return ()
    hits = [np.flatnonzero(curve >= target) for curve in curves]
    return tuple(steps[hit[0]] * episodes if len(hit) else float("inf") for hit in hits)


def _score(values: FloatArray) -> Score:
    low, high = stats.interquartile_interval([values])
    middle = float(stats.interquartile_mean(values))
    return Score(middle=middle, low=float(low), high=float(high))


def table(comparison: Comparison, rows: Sequence[Row]) -> list[list[str]]:
    """A head and a line for each arm."""
    head = ["arm", "final", "area under the curve", "P(better than first)", "p (Holm)", "failed"]
    if comparison.target:
        head.append(f"median episodes to {comparison.target:g}")
    lines = [head]
    for n, row in enumerate(rows):
        line = [row.arm.name, str(row.final), str(row.area)]
        line += ["", ""] if n == 0 else [f"{row.improvement:.2f}", f"{row.p_value:.3f}"]
        line.append(f"{row.failed}/{len(row.finals)}")
        if comparison.target:
            middle = float(np.median(row.to_target))
            line.append(f"{middle:,.0f}" if np.isfinite(middle) else "not reached")
        lines.append(line)
    return lines


def markdown(comparison: Comparison, summary: dict[str, list[Row]]) -> str:
    """The tables as Markdown."""
    parts = [_facts(comparison), ""]
    for name, rows in summary.items():
        episodes, updates = comparison.budget(name, comparison.arms[0])
        env = comparison.problems[name].env
        parts += [
            f"### {name}",
            "",
            f"`{env}`, {episodes:,} episodes and {updates:,} updates a run",
        ]
        lines = table(comparison, rows)
        parts += ["", _line(lines[0]), _line(["---"] * len(lines[0]))]
        parts += [*map(_line, lines[1:]), ""]
    return "\n".join(parts)


def _facts(comparison: Comparison) -> str:
    least = 2 / 2**comparison.seeds
    rms = ", advantages at the same root mean square" if all(c.credit.rms for c in comparison.problems.values()) else ""
    return (
        f"`{comparison.metric}`, interquartile mean over {comparison.seeds} seeds with its 95 % "
        f"bootstrap interval; the final score is the mean of the last {_TAIL:.0%} of the curve. "
        f"Arms are paired by seed: the same start, the same tasks{rms}. p is of a two-sided paired "
        "permutation test of the area against the first arm, after Holm's correction; "
        f"{comparison.seeds} pairs cannot give less than {least:.3f} before it. A failed run "
        "scores 0."
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def curves_figure(comparison: Comparison, name: str, rows: Sequence[Row]) -> Figure:
    """Learning curves: a panel for each value of the last axis, a colour for each other setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[str, list[tuple[str, Row]]] = {}
    for row in rows:
        cell = row.arm.cell
        place = cell[-1] if len(cell) > 1 else ""
        label = " · ".join(cell[:-1]) if len(cell) > 1 else row.arm.name
        panels.setdefault(place, []).append((label, row))
    labels = list(dict.fromkeys(label for panel in panels.values() for label, _ in panel))
    colours = {label: _COLOURS[n % len(_COLOURS)] for n, label in enumerate(labels)}
    figure = Figure(
        figsize=(4.6 * len(panels) + 1.4, 4.6), dpi=100, facecolor="white", layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    handles: dict[str, Any] = {}
    for axis, (place, panel) in zip(axes, panels.items(), strict=True):
        for label, row in panel:
            handles[label] = _band(axis, row, colours[label])
        others = "further arms" if len(panels) > 1 else ""
        _dress(axis, f"{comparison.axes[-1]}: {place}" if place else others)
    axes[0].set_ylabel(comparison.metric, color=INK, fontsize=11)
    figure.suptitle(name, x=0.01, ha="left", fontsize=15, fontweight="bold", color=INK)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), 5),
        frameon=False,
        fontsize=11,
        labelcolor=INK,
    )
    return figure


def _band(axes: Axes, row: Row, colour: str) -> Any:
    low, high = stats.interquartile_interval([row.curves.T], resamples=1000)
    axes.fill_between(row.steps, low, high, color=colour, alpha=0.15, linewidth=0)
    middle = stats.interquartile_mean(row.curves.T)
    return axes.plot(row.steps, middle, color=colour, linewidth=2)[0]


def _dress(axes: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_xlabel("training step", fontsize=11, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    quiet_frame(axes, labelsize=10)


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #333; max-width: 80rem; margin: 2rem auto;
  padding: 0 1rem; }
img { max-width: 100%; }
div.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid #e3e6ea;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.first td { font-weight: 600; }
"""


def write_report(comparison: Comparison, results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes `report.html`, `tables.md` and a picture for each problem; returns their paths."""
    summary = summarise(comparison, results)
    tables = folder / "tables.md"
    tables.write_text(markdown(comparison, summary))
    paths, body = (
        [tables],
        [f"<h1>Comparison</h1><p>{html.escape(_facts(comparison).replace('`', ''))}</p>"],
    )
    for name, rows in summary.items():
        picture = folder / f"curves-{name.replace('/', '-')}.png"
        memory = io.BytesIO()
        curves_figure(comparison, name, rows).savefig(memory, format="png")
        picture.write_bytes(memory.getvalue())
        paths.append(picture)
        data = base64.b64encode(memory.getvalue()).decode()
        alt = html.escape(f"Learning curves of {name}")
        body.append(f"<h2>{html.escape(name)}</h2>")
        body.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
        body.append(_html_table(table(comparison, rows)))
    failed = [r for r in results if r.error]
    if failed:
        items = "".join(f"<li>{html.escape(f'{r.run.name}: {r.error}')}</li>" for r in failed)
        body.append(f"<h2>Failed runs</h2><ul>{items}</ul>")
    page = folder / "report.html"
    page.write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Comparison</title>'
        f"<style>{_STYLE}</style>{''.join(body)}</html>"
    )
    return [page, *paths]


def _html_table(lines: Sequence[Sequence[str]]) -> str:
    def cells(kind: str, line: Sequence[str]) -> str:
        return "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in line)

    rows = "".join(
        f"<tr{' class=first' if n == 0 else ''}>{cells('td', line)}</tr>"
        for n, line in enumerate(lines[1:])
    )
    return f'<div class="scroll"><table><tr>{cells("th", lines[0])}</tr>{rows}</table></div>'
