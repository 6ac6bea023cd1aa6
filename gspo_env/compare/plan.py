"""What is compared: problems, arms, seeds, from a file's table and the command line."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_env.config import Config, override
from gspo_env.errors import ConfigError
from gspo_env.tracking.base import NoTracker

_ALIASES = {"advantage": "advantage.estimator"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One setting among those compared."""

    name: str
    changes: Mapping[str, Any]
    """Values by config field: a dotted path, or a name that only one section has."""
    cell: tuple[str, ...] = ()
    """Its place in the grid: one value for each axis; empty outside of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What to compare, on what, how often."""

    problems: Mapping[str, Config]
    """Configs by name; their seed is replaced by each of the seeds."""
    arms: tuple[Arm, ...]
    """The first is what the others are compared with."""
    axes: tuple[str, ...] = ()
    seeds: int = 5
    metric: str = "eval/success"
    """The metric that is compared; `train/...` has a value at every step."""
    target: float = 0.0
    """Count the episodes until the metric first reaches this; 0 does not."""
    match_rms: bool = False
    """Scale every arm's advantages to a root mean square of 1."""
    workers: int = 0
    """Processes; 0 is one for each core."""

    def __post_init__(self) -> None:
        """Refuses what cannot be compared."""
        names = [arm.name for arm in self.arms]
        twice = next((n for n in names if names.count(n) > 1), None)
        if len(names) < 2 or twice is not None:
            raise ConfigError(f"arms are {names}; expected two or more, each with its own name")
        if self.seeds < 1 or self.workers < 0:
            raise ConfigError("seeds has to be at least 1 and workers at least 0")
        for name in self.problems:
            budgets = {arm.name: self.budget(name, arm) for arm in self.arms}
            if len(set(budgets.values())) > 1:
                raise ConfigError(
                    f"arms of {name} differ in (episodes, updates): {budgets}; expected the same"
                )

    def config(self, problem: str, arm: Arm, seed: int) -> Config:
        """The config of one run."""
        config = change(self.problems[problem], arm.changes)
        if self.match_rms:
            config = change(config, {"advantage.rms": 1.0})
        return dataclasses.replace(config, seed=seed, tracker=NoTracker(), output="")

    def budget(self, problem: str, arm: Arm) -> tuple[int, int]:
        """Training episodes and optimiser steps of a run."""
        config = self.config(problem, arm, 0)
        episodes = config.steps * config.tasks_per_step * config.rollout.group_size
        return episodes, config.steps * config.learner.minibatches


def grid(axes: Mapping[str, Sequence[Any]]) -> tuple[Arm, ...]:
    """Every combination of the axes' values.

    Example:
        >>> [arm.name for arm in grid({"advantage": ["outcome"], "gamma": [0.0, 1.0]})]
        ['outcome · 0.0', 'outcome · 1.0']
    """
    return tuple(
        Arm(
            name=" · ".join(map(str, values)),
            changes=dict(zip(axes, values, strict=True)),
            cell=tuple(map(str, values)),
        )
        for values in itertools.product(*axes.values())
    )


def parse(
    table: Mapping[str, Any], axes: Sequence[str], own: Mapping[str, str], base: Config
) -> Comparison:
    """A comparison from a file's `[compare]` table and the command line, which wins.

    Args:
        table: `seeds`, `metric`, ..., `grid`, `arms` and `problems`.
        axes: `name=value,value`, each an axis of the grid.
        own: Text of the options that were given, empty where one was not.
        base: What the problems change.

    Raises:
        ConfigError: Something is unknown or impossible.
    """
    kinds: dict[str, Any] = {
        "seeds": int,
        "workers": int,
        "target": float,
        "metric": str,
        "match_rms": bool,
    }
    unknown = sorted({*table} - {*kinds, "grid", "arms", "problems"})
    if unknown:
        allowed = ", ".join([*kinds, "grid", "arms", "problems"])
        raise ConfigError(f"unknown field compare.{unknown[0]!r}; expected one of: {allowed}")
    _check_table(table, kinds)
    settings = {name: table[name] for name in kinds if name in table}
    for name, kind in kinds.items():
        if own.get(name):
            settings[name] = _value(name, own[name], kind)
    lists = {**table.get("grid", {}), **dict(map(_axis, axes))}
    arms = list(grid(lists)) if lists else []
    arms += [Arm(name=name, changes=said) for name, said in table.get("arms", {}).items()]
    named = table.get("problems") or {base.env.rpartition(":")[2].rpartition("/")[2]: {}}
    problems = {name: override(base, tree) for name, tree in named.items()}
    return Comparison(problems=problems, arms=tuple(arms), axes=tuple(lists), **settings)


def _check_table(table: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Refuses values of another type than a comparison has."""
    for name, kind in kinds.items():
        value = table.get(name, kind())
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"compare.{name} is {value!r}; expected {kind.__name__}")
    for name, inner, said in (("grid", list, "lists"), ("arms", dict, "tables")):
        section = table.get(name, {})
        if not isinstance(section, dict) or not all(isinstance(v, inner) for v in section.values()):
            raise ConfigError(f"compare.{name} is {section!r}; expected {said} by name")
    problems = table.get("problems", {})
    if not isinstance(problems, dict) or not all(isinstance(v, dict) for v in problems.values()):
        raise ConfigError(f"compare.problems is {problems!r}; expected tables by name")


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or not all(values.split(",")):
        raise ConfigError(f"--arm got {text!r}; expected name=value,value")
    return name, [_json(value) for value in values.split(",")]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        return text == "true" if kind is bool else kind(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; expected {kind.__name__}") from error


def change(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with fields replaced, each named by a dotted path or an unambiguous last part.

    Raises:
        ConfigError: No field or several have that name, or the value is impossible.
    """
    for name, value in changes.items():
        path = _path(config, _ALIASES.get(name, name)).split(".")
        tree: Any = value
        for part in reversed(path):
            tree = {part: tree}
        if path[:2] == ["advantage", "args"] and len(path) > 2:
            tree = {"advantage": {"args": {**config.advantage.args, path[2]: value}}}
        config = override(config, tree)
    return config


def _path(config: Config, name: str) -> str:
    if "." in name or name in {f.name for f in dataclasses.fields(config)}:
        return f"advantage.{name}" if name.startswith("args.") else name
    found = [
        f"{section.name}.{name}"
        for section in dataclasses.fields(config)
        if dataclasses.is_dataclass(getattr(config, section.name))
        and name in {f.name for f in dataclasses.fields(getattr(config, section.name))}
    ]
    if len(found) != 1:
        said = f"could be {' or '.join(found)}" if found else "is no field of the config"
        raise ConfigError(f"arm {name!r} {said}; expected a path such as 'advantage.gamma'")
    return found[0]
