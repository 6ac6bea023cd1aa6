"""Plans a comparison (problems, arms, seeds) from a file's table and the command line."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge

from gspo_env.compare.stats import fewest_pairs, looks_of
from gspo_env.config import (
    CheckpointConfig,
    Config,
    check_estimator,
    convert,
    override,
    resolve,
    to_dict,
)
from gspo_env.env.registration import label
from gspo_env.errors import ConfigError
from gspo_env.runs.names import METRICS
from gspo_env.settings import settings
from gspo_env.tracking.base import NoTracker

_PROBLEM = ("env", "env_kwargs", "eval_tasks", "seed", "output", "tracker")
"""Fields that no arm may change: they decide the tasks, or the comparison sets them."""
_START = ("env", "env_kwargs", "eval_tasks", "model", "recipe", "rewritten_history")
"""Fields that decide the model that a run starts from, beside the seed and the adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One setting among those compared."""

    name: str
    changes: Mapping[str, Any]
    """Values by config field: a dotted path, or a name that only one section has."""
    cell: tuple[str, ...] = ()
    """Its place in the grid: one value for each axis; empty outside of it."""


@settings
class Comparison:
    """The problems, arms and seeds to compare."""

    problems: Mapping[str, Config]
    """Configs by name; their seed is replaced by each of the seeds."""
    arms: tuple[Arm, ...]
    """The first is the baseline of the others."""
    axes: tuple[str, ...] = ()
    seeds: Annotated[int, Ge(1)] = 8
    first_seed: Annotated[int, Ge(0)] = 0
    """The seeds are this one and the next; another one makes a study on fresh seeds."""
    metric: str = "eval/success"
    """The metric that is compared; `rollout/...` has a value at every step."""
    target: float = 0.0
    """Count the episodes until the metric first reaches this; 0 turns this off."""
    workers: Annotated[int, Ge(0)] = 0
    """Worker processes; 0 is one per core."""
    pilot: bool = False
    """Whether it only measures how much the runs scatter, so that fewer seeds are enough."""
    sequential: bool = False
    """Whether it ends once all arms are decided; see `looks`."""

    def __post_init__(self) -> None:
        """Rejects arms that cannot be compared."""
        names = [arm.name for arm in self.arms]
        twice = next((n for n in names if names.count(n) > 1), None)
        for problem in self.problems.values():
            for arm in self.arms:
                changed = change(problem, arm.changes)
                _refuse_other_tasks(problem, changed, arm.name)
                if changed.stop_at_success:
                    raise ConfigError(
                        f"stop_at_success is {changed.stop_at_success} in arm {arm.name!r}, whose "
                        "last step would be another than that of other runs; expected 0, and "
                        "--target to count the episodes until a success"
                    )
                check_estimator(changed)
        if len(names) < 2 or twice is not None:  # after the arms, one of which may be misspelled
            raise ConfigError(
                f"arms are {names}; expected at least two with different names, such as those of "
                "`--arm loss=gspo,grpo`"
            )

    def config(self, problem: str, arm: Arm, seed: int) -> Config:
        """Returns the config of one run."""
        return replace(untracked(change(self.problems[problem], arm.changes)), seed=seed)

    @property
    def tests(self) -> int:
        """The number of tests: arms against the first, of all problems."""
        return len(self.problems) * (len(self.arms) - 1)

    @property
    def fewest(self) -> int:
        """The fewest seeds whose tests can show a difference."""
        return fewest_pairs(0.05 / self.tests)

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of seeds after which is tested."""
        return looks_of(self.seeds) if self.sequential else (self.seeds,)

    @property
    def left_out(self) -> str:
        """Says which arms' groups the metric does not cover; empty if it covers all."""
        base = self.metric.startswith("rollout/") and "_played" not in self.metric
        configs = [
            change(problem, arm.changes) for problem in self.problems.values() for arm in self.arms
        ]
        most = max(config.supply.max_resamples for config in configs)
        if not base or not most:
            return ""
        return (
            f"{self.metric} covers only the groups that are trained on, and with "
            f"supply.max_resamples {most} others are played and left out: it is no measure of the "
            "policy; --metric eval/success is one."
        )

    def same_start(self, problem: str, arm: Arm) -> bool:
        """Returns whether an arm starts from the same model as the first one."""
        first = self.config(problem, self.arms[0], 0)
        return start_settings(self.config(problem, arm, 0)) == start_settings(first)


def untracked(config: Config) -> Config:
    """Returns a config without what the comparison decides: the folder, tracker and checkpoints.

    A run that was stopped is played again, so it needs no checkpoints.
    """
    return replace(config, tracker=NoTracker(), output="", checkpoints=CheckpointConfig(keep=0))


def imitates(config: Config) -> bool:
    """Returns whether the model that a config names imitates before it is trained."""
    return bool(config.model) and getattr(config.recipe, "demonstrates", False)


def start_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that decide the model that a run starts from, except for the seed."""
    tree = to_dict(config)
    adapter = ("lora_rank", *(("lora_alpha", "lora_targets") if imitates(config) else ()))
    return {name: tree[name] for name in _START} | {n: tree["learner"][n] for n in adapter}


def _refuse_other_tasks(problem: Config, changed: Config, arm: str) -> None:
    for name in _PROBLEM:
        if getattr(changed, name) != getattr(problem, name):
            raise ConfigError(
                f"arm {arm!r} changes {name} to {getattr(changed, name)!r}; expected the same in "
                "all arms of a problem, because arms play the same tasks"
            )


def grid(axes: Mapping[str, Sequence[Any]]) -> tuple[Arm, ...]:
    """Makes an arm for every combination of the axes' values.

    Examples:
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


_FIELDS: dict[str, Any] = {
    **{"seeds": int, "first_seed": int, "workers": int, "target": float, "metric": str},
    **{"pilot": bool, "sequential": bool},
    "grid": dict[str, list[Any]],
    **dict.fromkeys(("arms", "problems"), dict[str, dict[str, Any]]),
}
"""The fields of the table [compare] of a file with their types."""


def check_table(table: Any) -> dict[str, Any]:
    """Checks the table [compare] of a file.

    Raises:
        ConfigError: A field is unknown or has a value of another type.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"compare is {table!r}; expected a table")
    for name, value in table.items():
        if name not in _FIELDS:
            expected = f"one of: {', '.join(_FIELDS)}"
            raise ConfigError(f"unknown field compare.{name!r}; expected {expected}")
        convert(f"compare.{name}", value, _FIELDS[name])
    return dict(table)


def parse(
    tables: Mapping[str, Any], axes: Sequence[str], base: Config, **options: Any
) -> Comparison:
    """Makes a comparison from a file's tables and the command line.

    Args:
        tables: `grid`, `arms` and `problems`, as `check_table` gives them.
        axes: `name=value,value`, each an axis of the grid.
        base: The config that the problems change.
        options: `seeds`, `first_seed`, `metric`, `target`, `workers`, `pilot` and
            `sequential`. Without seeds there are 8, more if so few can show nothing, or 2 of a
            pilot.

    Raises:
        ConfigError: A name is unknown or a value invalid, or the seeds can show no difference.
    """
    lists = {**tables.get("grid", {}), **dict(map(read_axis, axes))}
    arms = list(grid(lists)) if lists else []
    arms += [Arm(name=name, changes=changes) for name, changes in tables.get("arms", {}).items()]
    named = tables.get("problems") or {label(base.env): {}}
    problems = {name: override(base, tree) for name, tree in named.items()}
    seeds = options.pop("seeds", None)
    comparison = Comparison(problems=problems, arms=tuple(arms), axes=tuple(lists), **options)
    if seeds is None:
        return replace(
            comparison, seeds=2 if comparison.pilot else max(comparison.seeds, comparison.fewest)
        )
    if seeds < comparison.fewest and not comparison.pilot:
        tests = f"{comparison.tests} tests" if comparison.tests > 1 else "one test"
        raise ConfigError(
            f"seeds is {seeds}, and with {tests} fewer than {comparison.fewest} seeds cannot show "
            f"any difference; expected at least {comparison.fewest}, or --pilot, which measures "
            "how many are needed"
        )
    return replace(comparison, seeds=seeds)


def read_axis(text: str) -> tuple[str, list[Any]]:
    """Reads `name=value,value`; a value is JSON, or else a text without a comma.

    Raises:
        ConfigError: There is no value.
    """
    name, _, rest = text.partition("=")
    values: list[Any] = []
    while rest:
        value, rest = _first_value(rest.lstrip())
        values.append(value)
    if not values or "" in values or text.endswith(","):
        raise ConfigError(f"--arm got {text!r}; expected name=value,value")
    return name, values


def _first_value(text: str) -> tuple[Any, str]:
    """Returns the first of several values, and the text after its comma."""
    with contextlib.suppress(ValueError, RecursionError):  # it is not JSON
        value, end = json.JSONDecoder().raw_decode(text)
        behind = text[end:].lstrip()
        if behind[:1] in ("", ","):
            return value, behind[1:]
    word, _, rest = text.partition(",")
    return word, rest


def change(config: Config, changes: Mapping[str, Any]) -> Config:
    """Replaces fields of a config, each named as `gspo_env.config.resolve` reads it, or tables.

    Raises:
        ConfigError: No field, or more than one, has that name, or the value is invalid.
    """
    for name, value in changes.items():
        tree: Any = value
        is_table = isinstance(value, Mapping) and hasattr(config, name)
        for part in reversed([name] if is_table else resolve(config, name).split(".")):
            tree = {part: tree}
        config = override(config, tree)
    return config


def check_metric(name: str) -> None:
    """Rejects a name that is not a metric, or nearly that of a frequent one, before anything runs.

    Raises:
        ConfigError: It is; the message lists the nearest names.
    """
    if name in METRICS:
        return
    near = difflib.get_close_matches(name, METRICS, cutoff=0.85)
    groups = sorted({metric.partition("/")[0] for metric in METRICS} | {"time"})
    group, slash, rest = name.partition("/")
    if near or group not in groups or not (slash and rest):
        listed = ", ".join(near or difflib.get_close_matches(name, METRICS) or sorted(METRICS))
        raise ConfigError(f"metric is {name!r}; expected a metric of a run, such as {listed}")
