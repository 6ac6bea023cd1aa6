"""The report of a comparison: scores with intervals, tests and learning curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import gspo_env
from gspo_env.compare import Arm, Comparison, Result, slug, stats
from gspo_env.config import to_toml
from gspo_env.episodes import read_episodes, render_episode
from gspo_env.episodes.schema import episode_files
from gspo_env.redaction import redact, redact_text, write_text
from gspo_env.report import plots
from gspo_env.report.page import Section, html_page, markdown_page
from gspo_env.types import BoolArray, FloatArray

METHODS = "Statistics and methods"
"""Title of the section behind the results."""
_TAIL = 0.1
"""The final score is the mean of the last points of a curve, this fraction of them."""
_TIMES, _SHOWN = ("time/rollout", "time/update", "time/eval", "time/sync"), 3
"""Metrics of what a run spends, and tasks whose episodes are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A value with its interval; see `gspo_env.compare.stats.interval_name`."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: FloatArray) -> Score:
        """Returns the interquartile mean over seeds with its bootstrap interval."""
        low, high = stats.interquartile_interval(values)
        middle = float(stats.interquartile_mean(values))
        return cls(middle=middle, low=float(low), high=float(high))

    def __str__(self) -> str:
        """Formats the value with three decimals and its interval."""
        return f"{self.middle:z.3f} ({self.low:z.3f} to {self.high:z.3f})"

    @property
    def bounds(self) -> str:
        """The interval of a difference, empty if it is infinite."""
        return f" ({self.low:+z.3f} to {self.high:+z.3f})" if np.isfinite(self.high) else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One arm on one problem."""

    arm: Arm
    finals: FloatArray
    """(S,) the mean of the end of each seed's curve."""
    areas: FloatArray
    """(S,) mean of each seed's curve over the episodes, by the trapezoidal rule."""
    curves: FloatArray
    """(S, points) A failed run is just below the lowest value of all runs of the problem."""
    episodes: tuple[float, ...]
    """(points,) Training episodes, the same for all arms of a problem."""
    played: float
    """Training episodes of a run, the mean of those that did not fail."""
    failed: int
    to_target: tuple[float, ...]
    """Episodes until each seed first reached the target; infinite if it never did. Empty without a
    target."""
    difference: Score
    """The paired difference in area from the first arm, with Student's interval."""
    improvement: float
    """Probability that a run has a larger area than a run of the first arm."""
    p_value: float
    """P-value of the paired difference in area to the first arm, after Holm's correction over all
    arms of all problems."""

    @property
    def direction(self) -> int:
        """1 if the arm is shown to be better than the first, -1 if worse, else 0."""
        if self.p_value >= 0.05:
            return 0
        return int(self.difference.low > 0) - int(self.difference.high < 0)


def summarise(comparison: Comparison, results: Sequence[Result]) -> dict[str, list[Row]]:
    """Returns the rows of each problem, one per arm."""
    problems = {name: _rows(comparison, name, results) for name in comparison.problems}
    tests = [row.p_value for rows in problems.values() for row in rows[1:]]
    # what a look decides may not depend on the other tests, so Bonferroni's is its correction
    sequential = [min(1.0, p * len(tests)) for p in tests]
    corrected = iter(sequential if comparison.sequential else stats.holm(tests))
    return {
        name: [rows[0], *(replace(row, p_value=next(corrected)) for row in rows[1:])]
        for name, rows in problems.items()
    }


def is_decided(comparison: Comparison, results: Sequence[Result]) -> bool:
    """Returns whether every arm is better or worse than the first, or equal to it."""
    problems = summarise(comparison, results).values()
    return all(row.direction or _equals(row, rows[0]) for rows in problems for row in rows[1:])


def _rows(comparison: Comparison, problem: str, results: Sequence[Result]) -> list[Row]:
    """Returns the rows of a problem, whose p-values are not corrected."""
    runs = [
        [r for r in results if r.run.problem == problem and r.run.arm.name == arm.name]
        for arm in comparison.arms
    ]
    failed = [np.array([bool(r.error) for r in arm]) for arm in runs]
    episodes, curves_A = _curves(runs, comparison.metric)
    # rounded, so that errors of rounding decide nothing
    size = max(float(np.abs(rows).max()) for rows in curves_A) or 1.0
    areas = [np.round(_heights(rows, episodes) / size, 12) * size for rows in curves_A]
    tail = max(1, round(_TAIL * len(episodes)))
    ranks = [np.where(f, -np.inf, area) for f, area in zip(failed, areas, strict=True)]
    rows = []
    for n, arm in enumerate(comparison.arms):
        differences = areas[n] - areas[0]
        low, high, p_value = _test(comparison, differences)
        row = Row(
            arm=arm,
            finals=curves_A[n][:, -tail:].mean(axis=1),
            areas=areas[n],
            curves=curves_A[n],
            episodes=episodes,
            played=float(np.mean([r.episodes for r in runs[n] if not r.error] or [0.0])),
            failed=int(failed[n].sum()),
            to_target=_to_target(curves_A[n], failed[n], episodes, comparison.target),
            difference=Score(middle=float(differences.mean()), low=low, high=high),
            improvement=stats.probability_of_improvement(ranks[n], ranks[0]),
            p_value=p_value,
        )
        rows.append(row)
    return rows


def _test(comparison: Comparison, differences: FloatArray) -> tuple[float, float, float]:
    """Returns the interval of a mean paired difference and the p-value of its test."""
    if not comparison.sequential:
        p_value = stats.paired_permutation_test(differences, np.zeros(len(differences)))
        return *stats.paired_interval(differences), p_value
    looks = comparison.looks
    p_value, _ = stats.sequential_test(differences, looks, 0.05 / comparison.tests)
    return *stats.sequential_interval(differences, looks), p_value


def _heights(curves: FloatArray, episodes: Sequence[float]) -> FloatArray:
    """Returns the area under each curve divided by its length, (S,)."""
    if len(episodes) == 1:
        return curves[:, 0]
    areas: FloatArray = np.asarray(np.trapezoid(curves, episodes))
    return areas / (episodes[-1] - episodes[0])


def _curves(
    runs: Sequence[Sequence[Result]], metric: str
) -> tuple[tuple[float, ...], list[FloatArray]]:
    """Returns the points that all arms are compared at, and the curves of each arm's runs.

    A failed run is constant, and lower than all values of the others by a hair.

    Shapes:
        points: (points,) training episodes; curves: (S, points) for each arm.
    """
    curves = [[None if r.error else r.curve(metric) for r in arm] for arm in runs]
    points = [sorted({x for curve in arm if curve for x in curve[0]}) for arm in curves]
    episodes = _common_points([xs for xs in points if xs])
    values = [np.interp(episodes, *curve) for arm in curves for curve in arm if curve]
    low, high = (float(np.min(values)), float(np.max(values))) if values else (0.0, 0.0)
    hair = max(1e-6 * (high - low), 1e-9 * max(abs(low), abs(high))) or 1e-6
    lost = np.full(len(episodes), low - hair)
    return episodes, [
        np.array([np.interp(episodes, *curve) if curve else lost for curve in arm])
        for arm in curves
    ]


def _common_points(points: Sequence[Sequence[float]]) -> tuple[float, ...]:
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


def table(comparison: Comparison, rows: Sequence[Row]) -> list[list[str]]:
    """Returns the header and a line for each arm."""
    kind = stats.interval_name(len(rows[0].areas))
    head = ["arm", "difference from the first, over training (95 % interval)"]
    head += [f"area under the curve ({kind})", f"final ({kind})"]
    correction = "Bonferroni" if comparison.sequential else "Holm"
    head += ["P(better than first)", f"p ({correction})", "failed"]
    if comparison.target:
        head.append(f"median episodes to {comparison.target:g}")
    lines = [head]
    for n, row in enumerate(rows):
        lost = not _has_curve(row)
        difference = f"{row.difference.middle:+z.3f}{row.difference.bounds}"
        difference = "equal" if _equals(row, rows[0]) else difference
        scores = [str(Score.of(row.areas)), str(Score.of(row.finals))]
        line = [
            row.arm.name,
            difference if n and not lost else "",
            *(["all runs failed"] * 2 if lost else scores),
            f"{row.improvement:.2f}" if n else "",
            f"{row.p_value:.3f}" if n else "",
            f"{row.failed}/{len(row.finals)}",
        ]
        if comparison.target:
            middle = float(np.median(row.to_target))
            line.append(f"{middle:,.0f}" if np.isfinite(middle) else "not reached")
        lines.append(line)
    return lines


def short_table(comparison: Comparison, rows: Sequence[Row]) -> list[list[str]]:
    """Returns the columns of `table` that answer most questions."""
    lines = table(comparison, rows)
    columns = [0, 3, 1]
    if any(row.failed for row in rows):
        columns.append(6)
    if comparison.target:
        columns.append(7)
    return [[line[n] for n in columns] for line in lines]


def conclusion(metric: str, rows: Sequence[Row], tests: int = 0) -> str:
    """Says in plain words where each arm ends, and whether the seeds show a difference.

    Args:
        metric: The metric that is compared.
        rows: The arms of a problem.
        tests: Number of tests over all problems; by default those of this one.
    """
    first, others, pairs = rows[0].arm.name, rows[1:], len(rows[0].areas)
    if not any(map(_has_curve, rows)):
        return "All runs failed."
    sentences = [f"{metric} ends at {', at '.join(map(_end, rows))}."]
    # a run that failed is constant, and lower than the others
    rises = [float((row.finals - row.curves[:, 0]).mean()) for row in rows]
    if len(rows[0].episodes) > 1 and max(rises) <= 0:
        starts = np.concatenate([np.sort(row.curves[:, 0])[row.failed :] for row in rows])
        sentences.append(f"It rises with no arm: the runs begin at {_range(starts)}.")
    if equal := [row.arm.name for row in others if _equals(row, rows[0])]:
        sentences.append(
            f"{', '.join(equal)}: equal to {first} in every value, so what differs had no effect."
        )
    for sign, word in ((1, "better"), (-1, "worse")):
        if names := [row.arm.name for row in others if row.direction == sign]:
            sentences.append(f"{', '.join(names)}: {word} than {first}.")
    unclear = [row.arm.name for row in others if not row.direction and row.arm.name not in equal]
    if unclear:
        about = f" for {', '.join(unclear)}" if len(unclear) < len(others) else ""
        seeds = f"{pairs} seed{'s'[: pairs > 1]}"
        needed = stats.fewest_pairs(0.05 / (tests or len(others)))
        sentences.append(
            f"{seeds} cannot show a difference{about}. {needed} seeds can."
            if pairs < needed
            else f"No difference is shown{about}; more than {seeds} can show a smaller one."
        )
    return " ".join(sentences)


def _has_curve(row: Row) -> bool:
    """Returns whether a run of an arm did not fail."""
    return row.failed < len(row.finals)


def _equals(row: Row, first: Row) -> bool:
    """Returns whether the runs of an arm have the same values as those of the first."""
    return _has_curve(row) and np.array_equal(row.curves, first.curves)


def _range(scores: FloatArray) -> str:
    low, high = f"{scores.min():z.2f}", f"{scores.max():z.2f}"
    return low if low == high else f"{low} to {high}"


def _end(row: Row) -> str:
    """Returns the range of the final scores of the runs that did not fail."""
    scores = np.sort(row.finals)[row.failed :]
    if not len(scores):
        return f"nothing with {row.arm.name}, whose runs all failed"
    return f"{_range(scores)} with {row.arm.name}"


def limits(rows: Sequence[Row], tests: int) -> str:
    """Says which differences the seeds can show, and how many seeds can show more.

    Args:
        rows: The arms of a problem.
        tests: Number of tests over all problems.
    """
    if not any(map(_has_curve, rows)) or all(_equals(row, rows[0]) for row in rows):
        return ""
    pairs, level = len(rows[0].areas), 0.05 / tests
    seeds, needed = f"{pairs} seed{'s'[: pairs > 1]}", stats.fewest_pairs(level)
    least = ""
    if pairs > 1:
        spread = _spread(rows)
        count = max(pairs, needed)
        smallest = stats.smallest_difference(spread, count, alpha=level) if spread > 0 else 0.0
        least = f"{smallest:.2g} (power 0.8)" if smallest else ""
    if pairs >= needed:
        return f"{seeds} cannot show a difference{least and f' below {least}'}. More seeds can."
    return (
        f"{seeds} cannot show a difference: the smallest p-value is {min(1.0, 2 / 2**pairs):.3f} "
        f"before the correction. {needed} seeds can show one{least and f' of {least}'}."
    )


def noise(rows: Sequence[Row], tests: int, difference: float = 0.05) -> str:
    """Says how much paired runs differ by chance, and how many seeds show a difference.

    Args:
        rows: The arms of a problem.
        tests: Number of tests over all problems.
        difference: The difference in area that is to be shown.
    """
    spread = _spread(rows)
    if not spread:
        return ""
    needed = stats.pairs_needed(spread, difference, alpha=0.05 / tests)
    return (
        f" Areas of a pair of runs differ by {spread:.2g} (standard deviation over "
        f"{len(rows[0].areas)} seeds), so about {needed:,} seeds show a difference of "
        f"{difference:g} (power 0.8)."
    )


def _spread(rows: Sequence[Row]) -> float:
    """Returns the standard deviation of the paired differences in area, 0 from a single pair."""
    if len(rows[0].areas) < 2:
        return 0.0
    variances = [float((row.areas - rows[0].areas).var(ddof=1)) for row in rows[1:]]
    return float(np.sqrt(np.mean(variances)))


def _about(comparison: Comparison, name: str, rows: Sequence[Row]) -> str:
    """Says how long the runs are and which arms have another start than the first."""
    texts = {}
    finished = [row for row in rows if _has_curve(row)]
    for row in finished:
        config = comparison.config(name, row.arm, 0)
        updates = config.steps * config.learner.minibatches
        texts[row.arm.name] = f"{row.played:,.0f} episodes and {updates:,} updates"
    different = len(set(texts.values())) > 1
    listed = "; ".join(f"{arm}: {text}" for arm, text in texts.items())
    text = f"Runs of {listed if different else texts[finished[0].arm.name]}." if finished else ""
    if different:
        first, last = rows[0].episodes[0], rows[0].episodes[-1]
        text += f" Everything is compared from episode {first:,.0f} to {last:,.0f}, which all have."
    if finished and len(rows[0].episodes) < 3:
        config = comparison.problems[name]
        text += (
            f" The curves have no more than two points, since runs of {config.steps} steps are "
            f"evaluated at the start, at the end and every {config.eval_every} steps; "
            f"--eval-every {max(1, config.steps // 5)} gives more."
            if comparison.metric.startswith("eval/")
            else " The curves have no more than two points, since the runs have so few steps."
        )
    other = [row.arm.name for row in rows if not comparison.same_start(name, row.arm)]
    if other:
        text += f" {', '.join(other)}: another start than the first arm."
    return f"{text} {comparison.left_out}".strip()


def _price(results: Sequence[Result]) -> str:
    """Says how long the runs of each arm took, as far as they were timed."""
    minutes: dict[str, list[float]] = {}
    for result in results:
        seconds = sum(result.recorded.total(name) for name in _TIMES)
        if seconds and not result.error:
            minutes.setdefault(result.run.arm.name, []).append(seconds / 60)
    listed = [f"{np.mean(times):.2g} min with {arm}" for arm, times in minutes.items()]
    return f" A run takes {', '.join(listed)}." if listed else ""


def _side_by_side(results: Sequence[Result]) -> Iterator[dict[str, str]]:
    """Yields episodes of each arm that play the same task after the last step, by arm.

    They are of the first seed of which all arms finished, first tasks that only some arms solve.
    """
    seeds = {r.run.seed for r in results} - {r.run.seed for r in results if r.error}
    runs = [r.run for r in results if r.run.seed == min(seeds, default=None)]
    runs = [run for run in runs if episode_files(run.folder)]
    last = []
    for run in runs:
        episodes = read_episodes(run.folder, phases="eval", steps=[run.config.steps])
        last.append({(e.env, e.seed, e.options): e for e in episodes})
    tasks = [task for task in (last[0] if len(last) > 1 else ()) if all(task in e for e in last)]
    tasks.sort(key=lambda task: len({e[task].success for e in last}) < 2)
    for task in tasks[:_SHOWN]:
        yield {run.arm.name: render_episode(e[task]) for run, e in zip(runs, last, strict=True)}


def _method(comparison: Comparison, seeds: int) -> str:
    matched = all(config.credit.rms for config in comparison.problems.values())
    rms = ", advantages at the same root mean square" if matched else ""
    correction = "Holm's correction over all problems"
    if comparison.sequential:
        looks = ", ".join(map(str, comparison.looks))
        correction = (
            f"Bonferroni's, at looks after {looks} seeds that share the level and the 5 % of the "
            "interval in proportion to their seeds"
        )
    return (
        f"{comparison.metric}, interquartile mean over {seeds} seeds with their "
        f"{stats.interval_name(seeds)}; the area is the mean of the curve by the "
        f"trapezoidal rule, the final score the mean of its last {_TAIL:.0%}. "
        "Curves are over training episodes. "
        f"Arms are paired by seed: the same initial weights and tasks{rms}. The difference is in "
        "area, with Student's interval; p is from a two-sided paired permutation test of the area "
        f"against the first arm, after {correction}. It tests whether the two arms of a pair can "
        "be exchanged: an arm with the same mean whose runs scatter in another way, such as one "
        "that rarely collapses, may be called better or worse. A failed run ranks "
        "below all others: its curve is just below their lowest value, and dotted if all runs of "
        "the arm failed."
    )


def write_report(
    comparison: Comparison, results: Sequence[Result], folder: Path, command: str = ""
) -> list[Path]:
    """Writes `report.html`, `report.md` and a picture of each problem; returns their paths.

    Args:
        comparison: What was compared.
        results: Its runs.
        folder: Where the files go.
        command: The command that made the report, which the page shows.
    """
    sections = [
        Section(
            title="Arms",
            text="What differs between them:",
            items=[
                f"{arm.name}: {json.dumps(redact(dict(arm.changes)), default=repr)}"
                for arm in comparison.arms
            ],
        )
    ]
    problems, tests = summarise(comparison, results), comparison.tests
    seeds = len({result.run.seed for result in results})
    folded = [Section(title=METHODS, text=_method(comparison, seeds), folded=True)]
    for name, rows in problems.items():
        runs = [result for result in results if result.run.problem == name]
        picture = folder / f"curves-{slug(name)}.png"
        plots.comparison_figure(comparison, name, rows).savefig(picture)
        section = Section(
            title=name,
            text=_about(comparison, name, rows) + _price(runs),
            strong=conclusion(comparison.metric, rows, tests)
            + (noise(rows, tests) if comparison.pilot else ""),
            table=short_table(comparison, rows),
            picture=picture,
            caption=f"Learning curves of {name}",
        )
        sections.append(section)
        title, every = f"All statistics of {name}", table(comparison, rows)
        text = limits(rows, tests)
        folded.append(Section(title=title, text=text, table=every, folded=True))
        if episodes := list(_side_by_side(runs)):
            title = f"Episodes of {name}, side by side"
            folded.append(Section(title=title, side_by_side=episodes, folded=True))
    failed = [f"{r.run.name}: {r.error}" for r in results if r.error]
    if failed:
        sections.append(Section(title="Failed runs", items=failed))
    sections += [*folded, *_origin(comparison, command)]
    paths = [folder / "report.html", folder / "report.md"]
    write_text(paths[0], html_page("Comparison", sections))
    write_text(paths[1], markdown_page("Comparison", sections[:-1]))
    return [*paths, *(section.picture for section in sections if section.picture)]


def _origin(comparison: Comparison, command: str) -> Iterator[Section]:
    """Yields with which command, version and settings the results were made, and when."""
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    by = f" by {redact_text(command)}" if command else ""
    settings = {name: to_toml(config) for name, config in comparison.problems.items()}
    yield Section(
        title="How it was made",
        folded=True,
        text=f"gspo_env {gspo_env.__version__}, {created}{by}.",
        blocks=settings,
    )
