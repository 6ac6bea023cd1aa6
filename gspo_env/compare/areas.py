"""The curves of a comparison's runs at common points, and the areas under them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_env.compare.plan import Comparison
from gspo_env.compare.runner import Result
from gspo_env.types import FloatArray


def by_arm(comparison: Comparison, problem: str, results: Sequence[Result]) -> list[list[Result]]:
    """Returns the runs of each arm on a problem."""
    runs = [r for r in results if r.run.problem == problem]
    return [[r for r in runs if r.run.arm.name == arm.name] for arm in comparison.arms]


def curves(
    by_arm: Sequence[Sequence[Result]], metric: str
) -> tuple[tuple[float, ...], list[FloatArray]]:
    """Returns the points that all arms are compared at, and the curves of each arm's runs.

    A failed run is constant, and lower than all values of the others by a hair.

    Shapes:
        points: (points,) training episodes; curves: (S, points) for each arm.
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


def areas(curves: Sequence[FloatArray]) -> list[FloatArray]:
    """Returns the mean of each curve, rounded so that errors of rounding decide nothing.

    Shapes:
        curves: (S, points) for each arm; result: (S,) for each arm.
    """
    size = max(float(np.abs(rows).max()) for rows in curves if rows.size) or 1.0
    return [np.round(rows.mean(axis=1) / size, 12) * size for rows in curves]


def areas_by_arm(
    comparison: Comparison, results: Sequence[Result]
) -> dict[str, dict[str, FloatArray]]:
    """Returns the area of each run, by problem and arm, in the order of seeds."""
    found = {}
    for problem in comparison.problems:
        arms = by_arm(comparison, problem, results)
        played = [arm for arm in arms if arm]
        values = areas(curves(played, comparison.metric)[1])
        names = [arm[0].run.arm.name for arm in played]
        found[problem] = dict(zip(names, values, strict=True))
    return found


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
