"""Plays a comparison's runs in worker processes; each writes its result to a file."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gspo_env.compare.plan import Arm, Comparison, check_metric, imitates, start_settings
from gspo_env.compare.processes import in_processes
from gspo_env.config import CheckpointConfig, Config, read_toml, to_dict, to_toml
from gspo_env.env.registration import load_agent, resolve_env
from gspo_env.errors import ConfigError, GspoEnvError, OutputError
from gspo_env.files import check_folder, read_file, regular_file
from gspo_env.health.evaluation import check_comparison
from gspo_env.redaction import redact, redact_text, visible, write_text
from gspo_env.runtime.processes import usable_cores
from gspo_env.tracking.base import RunInfo, TrackerChoice
from gspo_env.tracking.console import Progress
from gspo_env.tracking.multi import MultiTracker, check_trackers, parts
from gspo_env.training.interrupt import stop_on_signals

logger = logging.getLogger(__name__)

R = TypeVar("R")

_RESULT = "result.json"
"""File of a run that has ended."""
_MOST_BYTES, _MOST_STEPS, _LONGEST_ERROR = 1 << 26, 1 << 53, 4000
"""Bytes of a file, steps and characters of an error that are read from the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run: a problem, an arm, a seed."""

    problem: str
    arm: Arm
    seed: int
    config: Config
    start: Path | None
    """Folder of what the run starts from; None if that is the model that the config names."""
    folder: Path

    @property
    def name(self) -> str:
        """The name of the run in reports."""
        return f"{self.problem} · {self.arm.name} · seed {self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a run."""

    run: Run
    history: Sequence[tuple[int, dict[str, float]]]
    seconds: float
    error: str = ""
    """The error of a failed run, else empty."""

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Returns the values of a metric, and the training episodes played before each."""
        points = [(self._before(step, m), m[metric]) for step, m in self.history if metric in m]
        return [p[0] for p in points], [p[1] for p in points]

    @property
    def episodes(self) -> float:
        """The training episodes of the run."""
        return self._before(*self.history[-1]) if self.history else 0.0

    def _before(self, step: int, metrics: Mapping[str, float]) -> float:
        for name in ("rollout/episodes_before", "eval/episodes_before"):
            if name in metrics:
                return metrics[name]
        config = self.run.config
        return float(step * config.tasks_per_step * config.rollout.group_size)


class Recorder(MultiTracker):
    """Records each run once in each tracker, also when the comparison is resumed later.

    A tracker that failed gets no further runs; the next start of the comparison records them.
    """

    remedy = "start the comparison again to send them"

    def __init__(
        self, tracker: TrackerChoice, folder: Path, params: Any, say: Callable[[str], None]
    ) -> None:
        """Starts the parent run, or resumes the one that was started in the folder."""
        self._path = folder / "tracked.json"
        self._recorded: dict[str, list[str]] = (
            _read_json(self._path, lambda tree: {str(k): list(v) for k, v in tree.items()})
            if self._path.exists()
            else {}
        )
        self._choices, self._say = parts(tracker), say
        self._failed: set[str] = set()
        tags = {"gspo_env.kind": "comparison"}
        super().__init__(
            self._choices,
            RunInfo(name=folder.name, folder=folder, params=params, tags=tags, resume={}),
        )

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Ends the parent run and reports what was not recorded."""
        super().__exit__(exc_type, error)
        for problem in self.problems:
            self._say(problem)

    def child(self, result: Result) -> None:
        """Records a run that ended, in each tracker that has not recorded it yet."""
        run, error = result.run, result.error
        waiting = {
            key: choice
            for key, choice in self._choices.items()
            if key not in self._failed and run.name not in self._recorded.get(key, [])
        }
        if not waiting:
            return
        info = RunInfo(
            name=run.name,
            folder=run.folder,
            params=to_dict(run.config),
            tags={"error": error} if error else {},
            parent=self.folder,
            resume={},
            started=(run.folder / _RESULT).stat().st_mtime - result.seconds,
        )
        try:
            child = MultiTracker(waiting, info)
        except GspoEnvError as problem:  # a tracker never stops a comparison
            self._say(f"{run.name}: {problem}; {self.remedy}")
            self._failed |= waiting.keys()
            return
        child.finish("FAILED" if error else "FINISHED", error)
        for said in child.problems:
            self._say(f"{run.name}: {said}")
        self._failed |= child.failed
        for key in {*waiting} - child.failed:
            self._recorded.setdefault(key, []).append(run.name)
        self._path.write_text(json.dumps(self._recorded, indent=1))


def compare(
    comparison: Comparison,
    output: Path,
    tracker: TrackerChoice,
    say: Callable[[str], None] = print,
    report: Callable[[list[Result]], Sequence[Path]] = lambda results: (),
) -> list[Result]:
    """Plays the runs without a result; returns all results, including failed runs.

    Args:
        comparison: The comparison.
        output: Folder of results; results that it already contains are kept.
        tracker: Records a parent run and a child for each run.
        say: Called with a line for each run.
        report: Called at the end; the files that it returns are kept with the parent run.

    Raises:
        OutputError: The folder cannot be written, or holds another comparison.
        ConfigError: An estimator or the metric does not exist, or a tracker's address does not
            answer.
        ModelError: There is no such model.
        UnknownEnvironmentError: An environment does not exist.
        TrainingError: An arm could learn nothing.
    """
    for config in comparison.problems.values():
        for member in config.environments:
            resolve_env(member.spec)
    check_metric(comparison.metric)
    for name in comparison.problems:
        check_comparison([comparison.config(name, arm, 0) for arm in comparison.arms])
    _check_models(comparison)
    check_trackers(tracker)
    _claim(comparison, output)
    runs = list(planned(comparison, output))
    with Recorder(tracker, output, _describe(comparison), say) as record:
        for result in _results(runs, comparison.workers or usable_cores(), say):
            say(f"{result.run.name}: {_score(result, comparison.metric)}")
            record.child(result)
        results = [read(run) for run in runs]
        for line in mixed_scores(results):
            say(line)
        for path in report(results):
            record.artifact(path)
    return results


def _check_models(comparison: Comparison) -> None:
    """Looks for each arm's model, but opens no file of weights."""
    configs = [comparison.config(n, arm, 0) for n in comparison.problems for arm in comparison.arms]
    for name in sorted({config.model for config in configs if config.model}):
        if not Path(name).is_file():
            from gspo_env.model.load import PACKAGED, load_tokenizer

            if name not in PACKAGED:
                load_tokenizer(name)


def _results(
    runs: Sequence[Run], workers: int, say: Callable[[str], None]
) -> Generator[Result, None, None]:
    """Plays the runs without a result, each from its start; yields all results as they come."""
    waiting = [run for run in runs if not has_result(run)]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs have a result already")
        yield from (read(run) for run in runs if has_result(run))
    # the first run of each missing start makes it
    starts = {r.start: r for r in reversed(waiting) if r.start and not r.start.exists()}
    if waiting:
        say(f"{len(waiting)} runs to play, warm-ups before: {len(starts)}, {workers} at a time")
    began = time.perf_counter()
    # closed at once, because a traceback would keep the workers alive
    first = list(starts.values())
    with stop_on_signals(), closing(_played(first, waiting, workers, say)) as played:
        for done, run in enumerate(played, 1):
            minutes = (time.perf_counter() - began) / done * (len(waiting) - done) / 60
            say(f"played {done}/{len(waiting)}  ({minutes:.0f} min left)")
            yield read(run)


def _played(
    starts: Sequence[Run], waiting: Sequence[Run], workers: int, say: Callable[[str], None]
) -> Generator[Run, None, None]:
    began = time.perf_counter()
    for done, run in enumerate(in_processes(_prepare, starts, workers, _lose), 1):
        minutes = (time.perf_counter() - began) / done * (len(starts) - done) / 60
        say(f"warmed up {done}/{len(starts)}, seed {run.seed}  ({minutes:.0f} min left)")
    yield from in_processes(_play, waiting, workers, _lose)


def _score(result: Result, metric: str) -> str:
    """Returns the line to print for a run that ended.

    Raises:
        ConfigError: The run never logged the metric.
    """
    if result.error:
        return f"failed: {result.error}"
    _, values = result.curve(metric)
    if not values:
        names = sorted({name for _, metrics in result.history for name in metrics})
        near = ", ".join(difflib.get_close_matches(metric, names) or names)
        raise ConfigError(f"metric is {metric!r}; expected one of: {near}")
    return f"{values[-1]:.3f}"


def has_result(run: Run) -> bool:
    """Returns whether a run ended."""
    return (run.folder / _RESULT).exists()


def read(run: Run) -> Result:
    """Reads the result of a run.

    Raises:
        OutputError: It is damaged.
    """

    def convert(tree: Any) -> Result:
        history = [(int(n), {str(k): float(v) for k, v in m.items()}) for n, m in tree["history"]]
        if not all(abs(step) < _MOST_STEPS for step, _ in history):
            raise ValueError("a step is too large")
        seconds, error = float(tree["seconds"]), str(tree["error"])[:_LONGEST_ERROR]
        return Result(run=run, history=history, seconds=seconds, error=error)

    return _read_json(run.folder / _RESULT, convert)


def _read_json(path: Path, convert: Callable[[Any], R]) -> R:
    """Reads a file of a comparison, whose folder may be untrusted.

    Raises:
        OutputError: It is damaged.
    """
    try:
        return convert(json.loads(read_file(path.parent, path.name, _MOST_BYTES)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    except RecursionError:
        reason = "it is nested too deeply"
    raise OutputError(f"{str(path)!r} is damaged ({visible(reason)}); remove it")


def mixed_scores(results: Sequence[Result]) -> Iterator[str]:
    """Yields a warning for each problem whose runs decided to learn from different rewards."""
    scores: dict[str, dict[str, str]] = {}
    for result in results:
        run = result.run
        if run.config.credit.score == "auto" and not result.error:
            try:
                tree = read_toml(regular_file(run.folder, "config.toml", _MOST_BYTES))
                score = str(tree["credit"]["score"])
            except (OSError, LookupError, TypeError):  # of an untrusted folder
                continue
            scores.setdefault(run.problem, {}).setdefault(score, run.name)
    for problem, runs in scores.items():
        decided = {score: name for score, name in runs.items() if score != "auto"}
        if len(decided) > 1:
            examples = ", ".join(f"{score} ({name})" for score, name in decided.items())
            yield f"runs of {problem} learned from different rewards: {examples}; set --score"


def _describe(comparison: Comparison) -> dict[str, Any]:
    return {
        "arms": [arm.name for arm in comparison.arms],
        "problems": list(comparison.problems),
        "seeds": comparison.seeds,
        "first_seed": comparison.first_seed,
        "metric": comparison.metric,
    }


def _claim(comparison: Comparison, output: Path) -> None:
    """Makes the folder, or checks that it belongs to this comparison."""
    placeless = {n: dataclasses.replace(c, output="") for n, c in comparison.problems.items()}
    tomls = {name: to_toml(config) for name, config in placeless.items()}
    arms = [[arm.name, redact(dict(arm.changes))] for arm in comparison.arms]
    plan = redact_text(json.dumps({"problems": tomls, "arms": arms}, indent=1))
    note = output / "comparison.json"
    try:
        output.mkdir(parents=True, exist_ok=True)
        check_folder(output)
        if not note.exists() and any(output.iterdir()):
            raise OutputError(
                f"{str(output)!r} is not empty and holds no comparison; name a new folder with "
                "--output"
            )
        size = len(plan.encode(errors="surrogatepass"))
        if note.exists() and (note.stat().st_size != size or note.read_text() != plan):
            raise OutputError(
                f"{str(output)!r} holds another comparison; name a new folder with --output"
            )
        write_text(note, plan)
    except OSError as error:
        raise OutputError(f"cannot write to {str(output)!r}: {error.strerror}") from error


def planned(comparison: Comparison, output: Path) -> Iterator[Run]:
    """Yields every run of a comparison, seed by seed."""
    for seed in range(comparison.first_seed, comparison.first_seed + comparison.seeds):
        for problem in comparison.problems:
            for arm in comparison.arms:
                config = comparison.config(problem, arm, seed)
                has_start = not config.model or imitates(config)
                start = f"{_digest(repr(start_settings(config)))}-seed{seed}"
                yield Run(
                    problem=problem,
                    arm=arm,
                    seed=seed,
                    config=config,
                    start=output / "starts" / start if has_start else None,
                    folder=output / "runs" / slug(problem) / slug(arm.name) / f"seed{seed}",
                )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def slug(name: str) -> str:
    """Makes the name of a folder from the name of an arm or a problem."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return f"{plain[:60]}-{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"


def _prepare(run: Run) -> None:
    """Warms up a model and saves it for all runs that start from it."""
    load_agent("gspo")(config=run.config).save_start(run.start, Progress())


def _play(run: Run) -> None:
    """Plays one training run; writes a result even if it fails."""
    began = time.perf_counter()
    history: list[Any] = []
    error = ""
    shutil.rmtree(run.folder, ignore_errors=True)
    try:
        # a run that was stopped is played again, so it needs no checkpoints
        config = dataclasses.replace(
            run.config, output=str(run.folder), checkpoints=CheckpointConfig(keep=0)
        )
        make = load_agent("gspo")
        agent = make.from_start(run.start, config) if run.start else make(config=config)
        history = agent.train()
        for name in ("model", "adapter"):  # hundreds of runs would fill a disk
            shutil.rmtree(run.folder / name, ignore_errors=True)
    except Exception as problem:
        if not isinstance(problem, GspoEnvError):  # whose sentence is in the report
            logger.exception("%s failed", run.name)
        error = f"{type(problem).__name__}: {problem}"
    _write(run, history, time.perf_counter() - began, error)


def _lose(run: Run) -> None:
    _write(run, [], 0.0, "the worker process died")


def _write(run: Run, history: Sequence[Any], seconds: float, error: str) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    part = run.folder / f"{_RESULT}.part"
    write_text(part, json.dumps({"history": history, "seconds": seconds, "error": error}))
    part.replace(run.folder / _RESULT)
