"""Controlled comparison: arms over problems and paired seeds, in parallel, resumable.

A problem is a config; an arm is a set of changes to it. Every arm of a problem starts, for a seed,
from the same warmed-up model and meets the same tasks, with the same number of episodes and
updates. Each run writes its own file when it ends, so a comparison that was stopped goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gspo_env.checkpoint import load_model
from gspo_env.config import Config, override, to_toml
from gspo_env.errors import ConfigError, OutputError
from gspo_env.tracking import ParentRun, TrackingConfig

logger = logging.getLogger(__name__)

_ALIASES = {"advantage": "advantage.estimator"}
_AGENT = "gspo_agents.gspo:GSPOAgent"
_ATTEMPTS = 2
"""How often a run is tried whose worker process dies."""


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
        quiet = dataclasses.replace(config.tracking, enabled=False)
        return dataclasses.replace(config, seed=seed, tracking=quiet, output="")

    def budget(self, problem: str, arm: Arm) -> tuple[int, int]:
        """Training episodes and optimiser steps of a run."""
        config = self.config(problem, arm, 0)
        episodes = config.steps * config.tasks_per_step * config.rollout.group_size
        return episodes, config.steps * config.learner.minibatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run: a problem, an arm, a seed."""

    problem: str
    arm: Arm
    seed: int
    config: Config
    start: Path | None
    """Folder of the model that all arms start from; None where the config names a model."""
    folder: Path

    @property
    def name(self) -> str:
        """What a reader calls it."""
        return f"{self.problem} · {self.arm.name} · seed {self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of a run."""

    run: Run
    history: tuple[tuple[int, dict[str, float]], ...]
    seconds: float
    error: str = ""
    """Why it failed; empty where it did not."""

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric."""
        points = [(step, m[metric]) for step, m in self.history if metric in m]
        return [p[0] for p in points], [p[1] for p in points]


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


def compare(
    comparison: Comparison,
    output: Path,
    tracking: TrackingConfig,
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Runs whatever has no result yet; returns all results, failed runs included.

    Raises:
        OutputError: The folder cannot be written, or holds another comparison.
    """
    _claim(comparison, output)
    runs = list(_runs(comparison, output))
    waiting = [run for run in runs if not (run.folder / "result.json").exists()]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs have a result already")
    with ParentRun(tracking, output) as parent:
        parent.start(_describe(comparison))
        for run in runs:
            if run not in waiting:
                parent.child(run.name, run.config, *_track(read(run)))
        workers = comparison.workers or os.cpu_count() or 1
        begun = time.perf_counter()
        jobs = _starts(waiting)
        for done, _ in enumerate(_parallel(_prepare, jobs, workers), 1):
            say(f"warmed up {done}/{len(jobs)}")
        for done, run in enumerate(_parallel(_play, waiting, workers), 1):
            result = read(run)
            parent.child(run.name, run.config, *_track(result))
            _, values = result.curve(comparison.metric)
            score = f"failed: {result.error}" if result.error else f"{values[-1]:.3f}"
            left = (time.perf_counter() - begun) / done * (len(waiting) - done)
            say(f"{done}/{len(waiting)}  {run.name}: {score}  ({left / 60:.0f} min left)")
    return [read(run) for run in runs]


def read(run: Run) -> Result:
    """The result that a run left."""
    kept = json.loads((run.folder / "result.json").read_text())
    history = tuple((int(step), metrics) for step, metrics in kept["history"])
    return Result(run=run, history=history, seconds=kept["seconds"], error=kept["error"])


def _track(result: Result) -> tuple[Sequence[tuple[int, dict[str, float]]], str]:
    return result.history, result.error


def _describe(comparison: Comparison) -> dict[str, Any]:
    return {
        "arms": [arm.name for arm in comparison.arms],
        "problems": list(comparison.problems),
        "seeds": comparison.seeds,
        "metric": comparison.metric,
        "match_rms": comparison.match_rms,
    }


def _claim(comparison: Comparison, output: Path) -> None:
    """Makes the folder, or makes sure that it holds this very comparison."""
    tomls = {name: to_toml(config) for name, config in comparison.problems.items()}
    arms = [[arm.name, dict(arm.changes)] for arm in comparison.arms]
    said = json.dumps({"problems": tomls, "arms": arms, "rms": comparison.match_rms}, indent=1)
    note = output / "comparison.json"
    try:
        output.mkdir(parents=True, exist_ok=True)
        if note.exists() and note.read_text() != said:
            raise OutputError(
                f"{str(output)!r} holds another comparison; name a new folder with --output"
            )
        note.write_text(said)
    except OSError as error:
        raise OutputError(f"cannot write to {str(output)!r}: {error.strerror}") from error


def _runs(comparison: Comparison, output: Path) -> Iterator[Run]:
    for seed in range(comparison.seeds):
        for problem, base in comparison.problems.items():
            start = None if base.model else output / "starts" / f"{_slug(problem)}-seed{seed}"
            for arm in comparison.arms:
                folder = output / "runs" / _slug(problem) / _slug(arm.name) / f"seed{seed}"
                yield Run(
                    problem=problem,
                    arm=arm,
                    seed=seed,
                    config=comparison.config(problem, arm, seed),
                    start=start,
                    folder=folder,
                )


def _slug(name: str) -> str:
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return f"{plain[:60]}-{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"


def _starts(runs: Sequence[Run]) -> list[Run]:
    """One run for each start that is still to be made."""
    first = {run.start: run for run in reversed(runs) if run.start and not run.start.exists()}
    return list(first.values())


def _prepare(run: Run) -> None:
    """Warms a model up and leaves it for all arms of a problem and seed."""
    assert run.start is not None
    agent = _agent()(config=run.config)
    agent.warm_up()
    agent.save(run.start)


def _play(run: Run) -> None:
    """One training run; whatever happens, a result is left."""
    begun = time.perf_counter()
    history: list[Any] = []
    error = ""
    shutil.rmtree(run.folder, ignore_errors=True)
    try:
        config = dataclasses.replace(run.config, output=str(run.folder))
        if run.start is None:
            history = _agent()(config=config).train()
        else:
            model, tokenizer = load_model(str(run.start))
            history = _agent()(model=model, tokenizer=tokenizer, config=config).train()
        shutil.rmtree(run.folder / "model")  # hundreds of runs would fill a disk
    except Exception as problem:
        logger.exception("%s failed", run.name)
        error = f"{type(problem).__name__}: {problem}"
    _leave(run, history, time.perf_counter() - begun, error)


def _leave(run: Run, history: Sequence[Any], seconds: float, error: str) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    part = run.folder / "result.json.part"
    part.write_text(json.dumps({"history": history, "seconds": seconds, "error": error}))
    part.replace(run.folder / "result.json")


def _agent() -> Any:
    module, _, name = _AGENT.partition(":")
    return getattr(importlib.import_module(module), name)


def _quiet(threads: int) -> None:
    """Prepares a worker process."""
    import sys

    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def _parallel(work: Callable[[Run], None], runs: Sequence[Run], workers: int) -> Iterator[Run]:
    """Does the work in processes, yielding each run that is done.

    A worker that dies takes its pool along: what was left is tried again in a new one.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    left = list(runs)
    for _ in range(_ATTEMPTS):
        if not left:
            return
        with ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_quiet, initargs=(threads,)
        ) as pool:
            futures: dict[Future[None], Run] = {pool.submit(work, run): run for run in left}
            try:
                for future in as_completed(futures):
                    future.result()
                    left.remove(futures[future])
                    yield futures[future]
            except BrokenProcessPool:
                logger.warning("a worker process died; what it left is tried again")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    for run in left:
        _leave(run, [], 0.0, "the worker process died")
        yield run
