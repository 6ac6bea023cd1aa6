"""Runs of the same settings as one arm, and their curves with bands."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gspo_env.compare import stats
from gspo_env.config import from_dict, to_toml
from gspo_env.errors import ConfigError
from gspo_env.health.record import RunRecord, Series
from gspo_env.registry import BUILTIN
from gspo_env.tracking.base import flatten
from gspo_env.types import FloatArray, IntArray

_NOT_AN_ARM = ("seed", "output", "tracker", "checkpoints", "episodes")
"""Settings in which the runs of an arm may differ, with those below them."""
_MOST_NAMED = 3
"""Differing settings that the name of an arm has."""
_Z = 1.96
"""Standard errors of a 95 % interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArm:
    """Runs whose settings differ in the seed only."""

    name: str
    runs: tuple[RunRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A curve with its 95 % interval."""

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
        key = json.dumps(_key(run), sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    if len(groups) == len(runs):
        return _distinct([RunArm(name=run.name, runs=(run,)) for run in runs])
    trees = [json.loads(text) for text in groups]
    differ = _differences(trees)
    found = []
    for tree, members in zip(trees, groups.values(), strict=True):
        shown = [f"{n.removesuffix('.name')} {_short(tree.get(n))}" for n in differ[:_MOST_NAMED]]
        name = ", ".join(shown) or str(tree.get("env", "all runs"))
        found.append(RunArm(name=members[0].name if "folder" in tree else name, runs=(*members,)))
    return _distinct(found)


def _differences(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the settings that differ, choices first, without those that another choice lacks."""
    names = dict.fromkeys(name for tree in trees for name in tree)
    found = [n for n in names if len({str(tree.get(n)) for tree in trees}) > 1]
    choices = [n for n in found if n.endswith(".name") or n == "env"]
    sections = [n.removesuffix("name") for n in choices if n != "env"]
    rest = [n for n in found if n not in choices and not n.startswith(tuple(sections))]
    return [*choices, *rest]


def _key(run: RunRecord) -> dict[str, Any]:
    if not run.settings:
        return {"folder": str(run.folder)}
    return {
        name: value
        for name, value in run.settings.items()
        if name.partition(".")[0] not in _NOT_AN_ARM
    }


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:10]}...{text[-11:]}"


def _distinct(arms: list[RunArm]) -> list[RunArm]:
    """Gives arms whose names are equal a number."""
    names = [arm.name for arm in arms]
    return [
        RunArm(name=f"{a.name} ({n + 1})" if names.count(a.name) > 1 else a.name, runs=a.runs)
        for n, a in enumerate(arms)
    ]


def band(arm: RunArm, metric: str) -> Band | None:
    """Returns the curve of an arm; None if a run lacks the metric.

    Several runs: the interquartile mean and its bootstrap interval, at the steps that all of them
    have. One run: its values, with the interval of a mean over the episodes of an evaluation.
    """
    series = [run.series.get(metric) for run in arm.runs]
    found = [each for each in series if each is not None]
    if not found or len(found) < len(series):
        return None
    if len(found) == 1:
        return _of_one(arm.runs[0], metric, found[0])
    steps = found[0].steps
    for each in found[1:]:
        steps = np.intersect1d(steps, each.steps)
    if not len(steps):
        return None
    values = np.stack([each.values[np.isin(each.steps, steps)] for each in found], axis=-1)
    low, high = stats.interquartile_interval(values, resamples=1000)
    middle = np.asarray(stats.interquartile_mean(values))
    return Band(steps=steps, middle=middle, low=low, high=high, kind="seeds")


def _of_one(run: RunRecord, metric: str, series: Series) -> Band:
    half: FloatArray | None = None
    values, count = series.values, run.number("eval_tasks")
    low = high = values
    kind: Literal["tasks", "none"] = "none"
    if count and metric in ("eval/success", "eval/success_greedy"):
        pairs = [_wilson(value, int(count)) for value in values]
        low, high = np.asarray(pairs).T
        kind = "tasks"
    elif count and metric == "eval/return" and "eval/return_std" in run.series:
        spread = run.series["eval/return_std"]
        if len(spread.values) == len(values):
            half = _Z * spread.values / np.sqrt(count)
            low, high, kind = values - half, values + half, "tasks"
    return Band(steps=series.steps, middle=values, low=low, high=high, kind=kind)


def _wilson(rate: float, count: int) -> tuple[float, float]:
    wins = min(count, max(0, round(rate * count)))
    return stats.success_interval([[1.0]] * wins + [[0.0]] * (count - wins))


def command(run: RunRecord) -> str:
    """Returns a command that trains with the settings of a run; it names what is no default.

    The settings are read as data: a class of a user's file is named, not loaded.
    """
    usual = _defaults(run.settings)
    flags = []
    for name, value in run.settings.items():
        section, _, rest = name.partition(".")
        if name == "output" or usual.get(name) == value or section == "env_kwargs":
            continue
        flag = section if rest == "name" and section in BUILTIN else name
        if not isinstance(value, dict):
            values = value if isinstance(value, list) else [value]
            flags += [f"--{flag.replace('_', '-')}", *map(str, values)]
    kwargs = {
        name.partition(".")[2]: value
        for name, value in run.settings.items()
        if name.startswith("env_kwargs.")
    }
    if kwargs:
        flags += ["--env-kwargs", *(f"{k}={json.dumps(v)}" for k, v in kwargs.items())]
    return shlex.join(["gspo-env", "train", *flags])


def _defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that the settings would have without flags for them."""
    tree: dict[str, Any] = {}
    for kind, known in BUILTIN.items():
        name = settings.get(f"{kind}.name")
        if name in known:
            tree[kind] = name
    try:
        usual = flatten(tomllib.loads(to_toml(from_dict(tree))))
    except ConfigError:  # the library of a choice is missing
        return {}
    start = flatten(tomllib.loads(to_toml(from_dict({}))))
    names = {f"{kind}.name" for kind in BUILTIN}
    return {k: (start.get(k) if k in names else v) for k, v in usual.items()}
