"""The report of a comparison: scores with intervals, tests and learning curves."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import gspo_env
from gspo_env.compare import Arm, Comparison, Result, stats
from gspo_env.config import to_toml
from gspo_env.redaction import redact, redact_text, write_text
from gspo_env.report.curves import INK, frame, plain
from gspo_env.types import BoolArray, FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#1f5fa8", "#d9722e", "#2e8b57", "#8e44ad", "#b03060", "#5f6b76", "#c9a227", "#17a2b8")
_DASHES = ("-", (0, (5, 3)), (0, (5, 3, 1, 3)), (0, (3, 5)))
"""Lines that coincide are told apart by these."""
_TAIL = 0.1
"""The final score is the mean of the last points of a curve, this fraction of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """An interquartile mean over seeds with its 95 % bootstrap interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        """Formats the score with three decimals and its interval."""
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
    """(S,) final score of each seed."""
    areas: FloatArray
    """(S,) mean of each seed's curve."""
    curves: FloatArray
    """(S, points) A failed run is just below the lowest value of all runs of the problem."""
    episodes: tuple[float, ...]
    """(points,) Training episodes, the same for all arms of a problem."""
    failed: int
    to_target: tuple[float, ...]
    """Episodes until each seed first reached the target; infinite if it never did. Empty without a
    target."""
    improvement: float
    """Probability that a run has a larger area than a run of the first arm."""
    p_value: float
    """P-value of the paired difference in area to the first arm, after Holm's correction."""


def summarise(comparison: Comparison, results: Sequence[Result]) -> dict[str, list[Row]]:
    """Returns the rows of each problem, one per arm."""
    return {name: _rows(comparison, name, results) for name in comparison.problems}


def _rows(comparison: Comparison, problem: str, results: Sequence[Result]) -> list[Row]:
    runs = [r for r in results if r.run.problem == problem]
    by_arm = [[r for r in runs if r.run.arm.name == arm.name] for arm in comparison.arms]
    failed = [np.array([bool(r.error) for r in arm]) for arm in by_arm]
    episodes, curves = _curves(by_arm, comparison.metric)
    size = max(float(np.abs(rows).max()) for rows in curves) or 1.0
    # rounding errors must not decide between equal runs
    areas = [np.round(rows.mean(axis=1) / size, 12) * size for rows in curves]
    p_values = stats.holm([stats.paired_permutation_test(a, areas[0]) for a in areas[1:]])
    tail = max(1, round(_TAIL * len(episodes)))
    finals = [rows[:, -tail:].mean(axis=1) for rows in curves]
    ranks: list[FloatArray] = [
        np.where(lost, -np.inf, area) for lost, area in zip(failed, areas, strict=True)
    ]
    return [
        Row(
            arm=arm,
            final=_score(finals[n]),
            area=_score(areas[n]),
            finals=finals[n],
            areas=areas[n],
            curves=curves[n],
            episodes=episodes,
            failed=int(failed[n].sum()),
            to_target=_to_target(curves[n], failed[n], episodes, comparison.target),
            improvement=stats.probability_of_improvement(ranks[n], ranks[0]),
            p_value=[1.0, *p_values][n],
        )
        for n, arm in enumerate(comparison.arms)
    ]


def _curves(
    by_arm: Sequence[Sequence[Result]], metric: str
) -> tuple[tuple[float, ...], list[FloatArray]]:
    """Returns the points that all arms are compared at, and the curves of each arm's runs.

    A failed run is constant, and lower than all values of the others by a hair.
    """
    known = [[None if r.error else r.curve(metric) for r in arm] for arm in by_arm]
    points = [sorted({x for curve in arm if curve for x in curve[0]}) for arm in known]
    episodes = _common([xs for xs in points if xs])
    found = [np.interp(episodes, *curve) for arm in known for curve in arm if curve]
    low, high = (float(np.min(found)), float(np.max(found))) if found else (0.0, 0.0)
    hair = max(1e-6 * (high - low), 1e-9 * max(abs(low), abs(high))) or 1e-6
    lost = np.full(len(episodes), low - hair)
    return episodes, [
        np.array([np.interp(episodes, *curve) if curve else lost for curve in arm]) for arm in known
    ]


def _common(points: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns the points of the arm that has the fewest, within the range that all arms cover.

    A curve with more points says more between the points of the others, which would be taken for
    better or worse learning.
    """
    if not points:
        return (0.0,)
    last = min(xs[-1] for xs in points)
    first = min(last, max(xs[0] for xs in points))
    inside = [[x for x in xs if first <= x <= last] for xs in points]
    return tuple(sorted({first, last, *min(inside, key=len)}))


def _to_target(
    curves: FloatArray, failed: BoolArray, episodes: Sequence[float], target: float
) -> tuple[float, ...]:
    if not target:
        return ()
    hits = [np.flatnonzero((curve >= target) & ~f) for curve, f in zip(curves, failed, strict=True)]
    return tuple(episodes[hit[0]] if len(hit) else float("inf") for hit in hits)


def _score(values: FloatArray) -> Score:
    low, high = stats.interquartile_interval([values])
    middle = float(stats.interquartile_mean(values))
    return Score(middle=middle, low=float(low), high=float(high))


def table(comparison: Comparison, rows: Sequence[Row]) -> list[list[str]]:
    """Returns the header and a line for each arm."""
    head = ["arm", "final", "area under the curve", "P(better than first)", "p (Holm)", "failed"]
    if comparison.target:
        head.append(f"median episodes to {comparison.target:g}")
    lines = [head]
    for n, row in enumerate(rows):
        lost = row.failed == len(row.finals)
        scores = ["all runs failed"] * 2 if lost else [str(row.final), str(row.area)]
        line = [row.arm.name, *scores]
        line += ["", ""] if n == 0 else [f"{row.improvement:.2f}", f"{row.p_value:.3f}"]
        line.append(f"{row.failed}/{len(row.finals)}")
        if comparison.target:
            middle = float(np.median(row.to_target))
            line.append(f"{middle:,.0f}" if np.isfinite(middle) else "not reached")
        lines.append(line)
    return lines


def markdown(comparison: Comparison, summary: dict[str, list[Row]]) -> str:
    """Formats the tables of all problems in Markdown."""
    parts = [_method(comparison), ""]
    for name, rows in summary.items():
        head, *lines = table(comparison, rows)
        about = _about(comparison, name, rows)
        parts += [f"### {name}", "", about, "", _line(head), _line(["---"] * len(head))]
        parts += [*map(_line, lines), ""]
    return "\n".join(parts)


def _about(comparison: Comparison, name: str, rows: Sequence[Row]) -> str:
    """Describes a problem: the environment, the lengths of runs, and what arms do not share."""
    budgets = {row.arm.name: comparison.budget(name, row.arm) for row in rows}
    texts = {
        arm: f"{_many(e, 'episode')} and {_many(u, 'update')}" for arm, (e, u) in budgets.items()
    }
    text = f"`{comparison.problems[name].env}`, {texts[rows[0].arm.name]} a run"
    if len(set(texts.values())) > 1:
        listed = "; ".join(f"{arm}: {length}" for arm, length in texts.items())
        first, last = rows[0].episodes[0], rows[0].episodes[-1]
        text = (
            f"`{comparison.problems[name].env}`. Runs have different lengths ({listed}), so "
            f"everything is compared from episode {first:,.0f} to {last:,.0f}, which all have. "
            "Between its evaluations, a run is read off a straight line"
        )
    other = [row.arm.name for row in rows if not comparison.same_start(name, row.arm)]
    if other:
        text += f". {', '.join(other)}: another start than the first arm"
    return f"{text}."


def _method(comparison: Comparison) -> str:
    seeds, pairs = (_many(comparison.seeds, what) for what in ("seed", "pair"))
    smallest = 2 / 2**comparison.seeds
    matched = all(config.credit.rms for config in comparison.problems.values())
    rms = ", advantages at the same root mean square" if matched else ""
    return (
        f"`{comparison.metric}`, interquartile mean over {seeds} with its 95 % "
        f"bootstrap interval; the final score is the mean of the last {_TAIL:.0%} of the curve. "
        "Curves are over training episodes. "
        f"Arms are paired by seed: the same initial weights and tasks{rms}. p is from a two-sided "
        "paired permutation test of the area against the first arm, after Holm's correction; the "
        f"smallest p of {pairs} is {smallest:.3f} before the correction. A failed "
        "run ranks below all others: its curve is just below their lowest value, "
        "and dotted if all runs of the arm failed."
    )


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


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
    low, high = stats.interquartile_interval([row.curves.T], resamples=1000)
    axes.fill_between(row.episodes, low, high, color=colour, alpha=0.15, linewidth=0)
    middle = stats.interquartile_mean(row.curves.T)
    same = sum(np.allclose(middle, other, rtol=0, atol=1e-9) for other in drawn)
    drawn.append(middle)
    style = ":" if row.failed == len(row.finals) else _DASHES[min(same, len(_DASHES) - 1)]
    return axes.plot(row.episodes, middle, linestyle=style, color=colour, linewidth=2)[0]


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #333; max-width: 80rem; margin: 2rem auto;
  padding: 0 1rem; }
img { max-width: 100%; }
div.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid #e3e6ea;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
tr:nth-child(2) td { font-weight: 600; }
"""


def write_report(
    comparison: Comparison, results: Sequence[Result], folder: Path, command: str = ""
) -> list[Path]:
    """Writes `report.html`, `tables.md` and a picture of each problem; returns their paths.

    Args:
        comparison: What was compared.
        results: Its runs.
        folder: Where the files go.
        command: The command that made the report, which the page shows.
    """
    summary = summarise(comparison, results)
    paths = [folder / "tables.md"]
    write_text(paths[0], markdown(comparison, summary))
    method = html.escape(_method(comparison).replace("`", ""))
    body = [f"<h1>Comparison</h1><p>{method}</p>"]
    for name, rows in summary.items():
        picture = folder / f"curves-{name.replace('/', '-')}.png"
        curves_figure(comparison, name, rows).savefig(picture)
        paths.append(picture)
        data = base64.b64encode(picture.read_bytes()).decode()
        alt = html.escape(f"Learning curves of {name}")
        body.append(f"<h2>{html.escape(name)}</h2>")
        body.append(f"<p>{html.escape(_about(comparison, name, rows).replace('`', ''))}</p>")
        body.append(f'<img alt="{alt}" src="data:image/png;base64,{data}">')
        body.append(_html_table(table(comparison, rows)))
    failed = [r for r in results if r.error]
    if failed:
        items = "".join(f"<li>{html.escape(f'{r.run.name}: {r.error}')}</li>" for r in failed)
        body.append(f"<h2>Failed runs</h2><ul>{items}</ul>")
    body.append(_origin(comparison, command))
    page = folder / "report.html"
    write_text(
        page,
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Comparison</title>'
        f"<style>{_STYLE}</style>{''.join(body)}</html>",
    )
    return [page, *paths]


def _origin(comparison: Comparison, command: str) -> str:
    """Says with which command, version and settings the results were made, and when."""
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    by = f" by <code>{html.escape(redact_text(command))}</code>" if command else ""
    changes = {
        arm.name: json.dumps(redact(dict(arm.changes)), default=repr) for arm in comparison.arms
    }
    arms = "".join(
        f"<li>{html.escape(name)}: <code>{html.escape(text)}</code></li>"
        for name, text in changes.items()
    )
    settings = "".join(
        f"<details><summary>{html.escape(name)}</summary>"
        f"<pre>{html.escape(to_toml(config))}</pre></details>"
        for name, config in comparison.problems.items()
    )
    return (
        f"<h2>How it was made</h2><p>gspo_env {gspo_env.__version__}, {made}{by}.</p>"
        f"<p>Arms</p><ul>{arms}</ul><p>Settings of each problem</p>{settings}"
    )


def _html_table(lines: Sequence[Sequence[str]]) -> str:
    def row(kind: str, line: Sequence[str]) -> str:
        cells = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in line)
        return f"<tr>{cells}</tr>"

    rows = row("th", lines[0]) + "".join(row("td", line) for line in lines[1:])
    return f'<div class="scroll"><table>{rows}</table></div>'
