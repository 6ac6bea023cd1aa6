"""The report of a comparison: scores with intervals, tests and learning curves."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import gspo_env
from gspo_env.compare import Arm, Comparison, Result, stats
from gspo_env.compare.areas import areas as areas_of
from gspo_env.compare.areas import by_arm, curves
from gspo_env.compare.sequential import Difference
from gspo_env.config import to_toml
from gspo_env.env.registration import format_env
from gspo_env.episodes import page_html
from gspo_env.redaction import redact, redact_text, write_text
from gspo_env.report.comparison_figure import curves_figure
from gspo_env.types import BoolArray, FloatArray

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
    difference: Difference
    """The paired difference in area from the first arm, with its 95 % interval."""
    sequential: bool
    """Whether the interval holds for all looks of a comparison that added seeds."""
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

    @property
    def shown(self) -> int:
        """1 if the arm is shown to be better than the first, -1 if worse, else 0."""
        if not self.sequential and self.p_value >= 0.05:
            return 0
        return int(self.difference.low > 0) - int(self.difference.high < 0)


def summarise(
    comparison: Comparison,
    results: Sequence[Result],
    looks: Mapping[str, Sequence[Difference]] | None = None,
) -> dict[str, list[Row]]:
    """Returns the rows of each problem, one per arm.

    Args:
        comparison: What was compared.
        results: Its runs.
        looks: The differences from the first arm, by problem, if seeds were added by looks.
    """
    return {
        name: _rows(comparison, name, results, None if looks is None else looks.get(name, ()))
        for name in comparison.problems
    }


def _rows(
    comparison: Comparison,
    problem: str,
    results: Sequence[Result],
    looks: Sequence[Difference] | None,
) -> list[Row]:
    runs = by_arm(comparison, problem, results)
    failed = [np.array([bool(r.error) for r in arm]) for arm in runs]
    episodes, curves_A = curves(runs, comparison.metric)
    areas = areas_of(curves_A)
    # a pruned arm has fewer seeds
    pairs = [(a, areas[0][: len(a)]) for a in areas]
    p_values = stats.holm([stats.paired_permutation_test(*pair) for pair in pairs[1:]])
    tail = max(1, round(_TAIL * len(episodes)))
    finals = [rows[:, -tail:].mean(axis=1) for rows in curves_A]
    first = comparison.arms[0].name
    known = {d.arm: d for d in looks or ()}
    ranks: list[FloatArray] = [
        np.where(lost, -np.inf, area) for lost, area in zip(failed, areas, strict=True)
    ]
    return [
        Row(
            arm=arm,
            final=_score(finals[n]),
            area=_score(areas[n]),
            difference=known.get(arm.name) or _difference(arm.name, first, *pairs[n]),
            sequential=looks is not None,
            finals=finals[n],
            areas=areas[n],
            curves=curves_A[n],
            episodes=episodes,
            failed=int(failed[n].sum()),
            to_target=_to_target(curves_A[n], failed[n], episodes, comparison.target),
            improvement=stats.probability_of_improvement(ranks[n], ranks[0]),
            p_value=[1.0, *p_values][n],
        )
        for n, arm in enumerate(comparison.arms)
    ]


def _to_target(
    curves: FloatArray, failed: BoolArray, episodes: Sequence[float], target: float
) -> tuple[float, ...]:
    if not target:
        return ()
    hits = [np.flatnonzero((curve >= target) & ~f) for curve, f in zip(curves, failed, strict=True)]
    return tuple(episodes[hit[0]] if len(hit) else float("inf") for hit in hits)


def _difference(arm: str, other: str, ours: FloatArray, theirs: FloatArray) -> Difference:
    low, high = stats.paired_interval(ours - theirs)
    mean = float((ours - theirs).mean())
    return Difference(arm=arm, other=other, seeds=len(ours), mean=mean, low=low, high=high)


def _score(values: FloatArray) -> Score:
    low, high = stats.interquartile_interval(values)
    middle = float(stats.interquartile_mean(values))
    return Score(middle=middle, low=float(low), high=float(high))


def table(comparison: Comparison, rows: Sequence[Row]) -> list[list[str]]:
    """Returns the header and a line for each arm."""
    looks = any(row.sequential for row in rows)
    head = ["arm", "difference from the first (95 % interval)", "area under the curve", "final"]
    head += ["P(better than first)", "seeds" if looks else "p (Holm)", "failed"]
    if comparison.target:
        head.append(f"median episodes to {comparison.target:g}")
    lines = [head]
    for n, row in enumerate(rows):
        lost = row.failed == len(row.finals)
        scores = ["all runs failed"] * 2 if lost else [str(row.area), str(row.final)]
        test = str(len(row.finals)) if looks else f"{row.p_value:.3f}"
        line = [row.arm.name, _effect(row.difference) if n and not lost else "", *scores]
        line += [f"{row.improvement:.2f}" if n else "", test if n or looks else ""]
        line.append(f"{row.failed}/{len(row.finals)}")
        if comparison.target:
            middle = float(np.median(row.to_target))
            line.append(f"{middle:,.0f}" if np.isfinite(middle) else "not reached")
        lines.append(line)
    return lines


def _effect(difference: Difference) -> str:
    d = difference
    if not np.isfinite(d.high):
        return f"{d.mean:+.3f}"
    return f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f})"


def verdict(rows: Sequence[Row]) -> str:
    """Says which arms are shown to be better or worse than the first; the others are not."""
    names = {sign: [row.arm.name for row in rows[1:] if row.shown == sign] for sign in (1, -1, 0)}
    first = rows[0].arm.name
    found = [
        f"{word} than {first}: {', '.join(names[sign])}"
        for sign, word in ((1, "better"), (-1, "worse"))
        if names[sign]
    ]
    shown = f"Shown to be {'; '.join(found)}." if found else ""
    rest = f"No difference from {first} is shown for {', '.join(names[0])}." if names[0] else ""
    return " ".join(filter(None, (shown, rest)))


def markdown(comparison: Comparison, summary: dict[str, list[Row]]) -> str:
    """Formats the tables of all problems in Markdown."""
    parts = [_method(comparison, summary), ""]
    for name, rows in summary.items():
        head, *lines = table(comparison, rows)
        about = f"{_about(comparison, name, rows)} {verdict(rows)}"
        parts += [f"### {name}", "", about, "", _line(head), _line(["---"] * len(head))]
        parts += [*map(_line, lines), ""]
    return "\n".join(parts)


def _about(comparison: Comparison, name: str, rows: Sequence[Row]) -> str:
    """Describes a problem: the environment, the lengths of runs, and what arms do not share."""
    budgets = {row.arm.name: comparison.budget(name, row.arm) for row in rows}
    texts = {
        arm: f"{_many(e, 'episode')} and {_many(u, 'update')}" for arm, (e, u) in budgets.items()
    }
    text = f"`{format_env(comparison.problems[name].env)}`, {texts[rows[0].arm.name]} a run"
    if len(set(texts.values())) > 1:
        listed = "; ".join(f"{arm}: {length}" for arm, length in texts.items())
        first, last = rows[0].episodes[0], rows[0].episodes[-1]
        text = (
            f"`{format_env(comparison.problems[name].env)}`. Runs have different lengths "
            f"({listed}), so everything is compared from episode {first:,.0f} to {last:,.0f}, "
            "which all have. "
            "Between its evaluations, a run is read off a straight line"
        )
    other = [row.arm.name for row in rows if not comparison.same_start(name, row.arm)]
    if other:
        text += f". {', '.join(other)}: another start than the first arm"
    return f"{text}."


_LOOKS = (
    "Seeds were added until the intervals were tight enough. The intervals of differences hold for "
    "all looks, all pairs of arms and all problems together (alpha spending, repeated confidence "
    "intervals); a p-value would not. "
)


def _method(comparison: Comparison, summary: dict[str, list[Row]]) -> str:
    looks = any(row.sequential for rows in summary.values() for row in rows)
    most = max(len(row.finals) for rows in summary.values() for row in rows)
    seeds, pairs = (_many(most, what) for what in ("seed", "pair"))
    smallest = 2 / 2**most
    tests = (
        "p is from a two-sided "
        "paired permutation test of the area against the first arm, after Holm's correction; the "
        f"smallest p of {pairs} is {smallest:.3f} before the correction. "
    )
    matched = all(config.credit.rms for config in comparison.problems.values())
    rms = ", advantages at the same root mean square" if matched else ""
    return (
        f"`{comparison.metric}`, interquartile mean over {seeds} with its 95 % "
        f"bootstrap interval; the final score is the mean of the last {_TAIL:.0%} of the curve. "
        "Curves are over training episodes. "
        f"Arms are paired by seed: the same initial weights and tasks{rms}. The difference is in "
        "area, with Student's interval. "
        f"{_LOOKS if looks else tests}A failed "
        "run ranks below all others: its curve is just below their lowest value, "
        "and dotted if all runs of the arm failed."
    )


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write_report(
    comparison: Comparison,
    results: Sequence[Result],
    folder: Path,
    command: str = "",
    looks: Mapping[str, Sequence[Difference]] | None = None,
) -> list[Path]:
    """Writes `report.html`, `tables.md` and a picture of each problem; returns their paths.

    Args:
        comparison: What was compared.
        results: Its runs.
        folder: Where the files go.
        command: The command that made the report, which the page shows.
        looks: The differences from the first arm, by problem, if seeds were added by looks.
    """
    summary = summarise(comparison, results, looks)
    paths = [folder / "tables.md"]
    write_text(paths[0], markdown(comparison, summary))
    method = html.escape(_method(comparison, summary).replace("`", ""))
    body = [f"<h1>Comparison</h1><p>{method}</p>"]
    for name, rows in summary.items():
        picture = folder / f"curves-{name.replace('/', '-')}.png"
        curves_figure(comparison, name, rows).savefig(picture)
        paths.append(picture)
        body.append(f"<h2>{html.escape(name)}</h2>")
        body.append(f"<p>{html.escape(_about(comparison, name, rows).replace('`', ''))}</p>")
        body.append(f"<p><strong>{html.escape(verdict(rows))}</strong></p>")
        body.append(page_html.picture(picture, f"Learning curves of {name}"))
        body.append(page_html.table(table(comparison, rows), "first"))
    failed = [r for r in results if r.error]
    if failed:
        items = "".join(f"<li>{html.escape(f'{r.run.name}: {r.error}')}</li>" for r in failed)
        body.append(f"<h2>Failed runs</h2><ul>{items}</ul>")
    body.append(_origin(comparison, command))
    page = folder / "report.html"
    write_text(page, page_html.page("Comparison", body))
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
        page_html.folded(name, to_toml(config)) for name, config in comparison.problems.items()
    )
    return (
        f"<h2>How it was made</h2><p>gspo_env {gspo_env.__version__}, {made}{by}.</p>"
        f"<p>Arms</p><ul>{arms}</ul><p>Settings of each problem</p>{settings}"
    )
