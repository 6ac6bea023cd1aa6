"""Runs of the same settings as one arm, and their curves with bands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from gspo_env.compare import stats
from gspo_env.health.record import RunRecord, Series
from gspo_env.types import FloatArray, IntArray

_NOT_AN_ARM = ("seed", "output", "tracker", "checkpoints", "episodes")
"""Settings in which the runs of an arm may differ, with those below them."""
_MAX_NAMED = 3
"""Differing settings in the name of an arm."""
_Z = 1.96
"""Standard errors of a 95 % interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArm:
    """Runs whose settings differ in the seed only."""

    name: str
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A curve with its 95 % interval, or with the range of fewer than 6 runs."""

    steps: IntArray
    """(N,)"""
    middle: FloatArray
    """(N,)"""
    low: FloatArray
    """(N,)"""
    high: FloatArray
    """(N,)"""
    kind: Literal["seeds", "tasks", "none"]
    """What the interval covers: other seeds, or other episodes of the one run."""


def arms_of(runs: Sequence[RunRecord]) -> list[RunArm]:
    """Groups runs by their settings; a run without settings is an arm of its own.

    An arm has the name of its run if all arms are single runs, else of the settings that differ.
    """
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_key(run), sort_keys=True, default=str), []).append(run)
    trees = [json.loads(text) for text in groups]
    names = [members[0].name for members in groups.values()]
    if len(groups) < len(runs):
        differing = _differences(trees)
        names = [
            name if "folder" in tree else _arm_name(tree, differing)
            for name, tree in zip(names, trees, strict=True)
        ]
    arms = [RunArm(name=n, runs=(*m,)) for n, m in zip(names, groups.values(), strict=True)]
    return [
        replace(arm, name=f"{arm.name} ({n})") if names.count(arm.name) > 1 else arm
        for n, arm in enumerate(arms, start=1)
    ]


def _key(run: RunRecord) -> dict[str, Any]:
    if not run.settings:
        return {"folder": str(run.folder)}
    return {k: v for k, v in run.settings.items() if k.partition(".")[0] not in _NOT_AN_ARM}


def _differences(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the settings that differ: choices first, without the settings of other choices."""
    names = dict.fromkeys(name for tree in trees for name in tree)
    differing = [n for n in names if len({str(tree.get(n)) for tree in trees}) > 1]
    choices = [n for n in differing if n.endswith(".name") or n == "env"]
    sections = tuple(n.removesuffix("name") for n in choices if n != "env")
    return [*choices, *(n for n in differing if n not in choices and not n.startswith(sections))]


def _arm_name(tree: Mapping[str, Any], differing: Sequence[str]) -> str:
    shown = []
    for name in differing[:_MAX_NAMED]:
        value = str(tree.get(name, "none"))
        value = value if len(value) <= 24 else f"{value[:10]}...{value[-11:]}"
        shown.append(f"{name.removesuffix('.name')} {value}")
    return ", ".join(shown) or str(tree.get("env", "all runs"))


def band(arm: RunArm, metric: str) -> Band | None:
    """Returns the curve of an arm; None if a run lacks the metric.

    Several runs: the interquartile mean and its interval or range, at the steps that all of them
    have. One run: its values, with the interval of a mean over the episodes of an evaluation.
    """
    if any(metric not in run.series for run in arm.runs):
        return None
    series = [run.series[metric] for run in arm.runs]
    if len(series) == 1:
        return _band_of_run(arm.runs[0], metric, series[0])
    steps = series[0].steps
    for each in series[1:]:
        steps = np.intersect1d(steps, each.steps)
    if not len(steps):
        return None
    values = np.stack([each.values[np.isin(each.steps, steps)] for each in series], axis=-1)
    low, high = stats.interquartile_interval(values, resamples=1000)
    middle = np.asarray(stats.interquartile_mean(values))
    return Band(steps=steps, middle=middle, low=low, high=high, kind="seeds")


def _band_of_run(run: RunRecord, metric: str, series: Series) -> Band:
    values, count = series.values, int(run.number("eval_tasks") or 0)
    spread = run.series.get("eval/return_std")
    curve = Band(steps=series.steps, middle=values, low=values, high=values, kind="none")
    if count and metric in ("eval/success", "eval/success_greedy"):
        wins = [min(count, max(0, round(value * count))) for value in values]
        pairs = [stats.success_interval([[1.0]] * w + [[0.0]] * (count - w)) for w in wins]
        low, high = np.asarray(pairs).T
        return replace(curve, low=low, high=high, kind="tasks")
    if count and metric == "eval/return" and spread and len(spread.values) == len(values):
        half = _Z * spread.values / np.sqrt(count)
        return replace(curve, low=values - half, high=values + half, kind="tasks")
    return curve
