"""Plays each run of a comparison in a process of its own; the folder of a run is its result."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gspo_env.compare.plan import (
    Arm,
    Comparison,
    check_metric,
    imitates,
    start_settings,
    untracked,
)
from gspo_env.compare.processes import in_processes
from gspo_env.compare.stats import smallest_difference
from gspo_env.config import Config, to_dict, to_toml
from gspo_env.env.registration import load_agent, resolve_env
from gspo_env.errors import ConfigError, GspoEnvError, OutputError, raised_as
from gspo_env.files import FAILURE, METRICS, MODEL, check_folder, lock, read_file, remove_parts
from gspo_env.health.episodes import check_comparison
from gspo_env.health.startup import check_config
from gspo_env.redaction import redact, redact_text, write_text
from gspo_env.runs.run import Run, read_text
from gspo_env.runtime.processes import usable_cores
from gspo_env.tracking.base import NoTracker, RunInfo, TrackerChoice
from gspo_env.tracking.console import Progress
from gspo_env.tracking.jsonl import Received
from gspo_env.tracking.multi import MultiTracker, check_trackers, parts
from gspo_env.training.interrupt import stop_on_signals

logger = logging.getLogger(__name__)

_PRICE = "price.json"
"""File of an arm with what its runs take."""
_DEMONSTRATIONS = 64
"""Most demonstrations that are played to measure a run."""
_MOST_BYTES, _LONGEST_ERROR = 1 << 20, 4000
"""Bytes of that file, and characters of an error that are read from the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
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
    """What a run has recorded, and why it failed, if it did."""

    run: PlannedRun
    recorded: Run
    error: str = ""
    """Why the run is not finished; empty if it is."""

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Returns the values of a metric, and the training episodes played before each."""
        series, config = self.recorded.series, self.run.config
        if metric not in series:
            return [], []
        size = config.tasks_per_step * config.rollout.group_size
        phases = ("eval",) if metric.startswith("eval/") else ("rollout", "eval")
        counts = (series.get(f"{phase}/episodes_before") for phase in phases)
        before = next(filter(None, counts), None)
        played = dict(zip(before.steps, before.values, strict=True)) if before else {}
        episodes = [float(played.get(step, step * size)) for step in series[metric].steps]
        return episodes, series[metric].values.tolist()

    @property
    def episodes(self) -> float:
        """The training episodes of the run."""
        series = self.recorded.series
        counts = [name for name in series if name.endswith("/episodes_before")]
        return max((max(self.curve(name)[0]) for name in counts or series), default=0.0)


class Recorder(MultiTracker):
    """Records each run once in each tracker, also when the comparison is resumed later.

    A tracker that failed gets no further runs; the next start of the comparison records them.
    """

    remedy = "start the comparison again to send them"

    def __init__(
        self, tracker: TrackerChoice, folder: Path, params: Any, say: Callable[[str], None]
    ) -> None:
        """Starts the parent run, or resumes the one that was started in the folder."""
        every = parts(tracker).items()
        self._choices = {n: choice for n, choice in every if not isinstance(choice, NoTracker)}
        self._say = say
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
            name: choice
            for name, choice in self._choices.items()
            if name not in self._failed and not _has_received(name, run.folder)
        }
        if not waiting:
            return
        run.folder.mkdir(parents=True, exist_ok=True)  # it may have died before it made one
        info = RunInfo(
            name=run.name,
            folder=run.folder,
            params=to_dict(run.config),
            tags={"error": error} if error else {},
            parent=self.folder,
            resume={},
            started=min((p.stat().st_mtime for p in run.folder.glob("*")), default=time.time()),
        )
        try:
            child = MultiTracker(waiting, info)
        except GspoEnvError as failure:  # a tracker never stops a comparison
            self._say(f"{run.name}: {failure}; {self.remedy}")
            self._failed |= waiting.keys()
            return
        child.finish("FAILED" if error else "FINISHED", error)
        for problem in child.problems:
            self._say(f"{run.name}: {problem}")
        self._failed |= child.failed


def _has_received(tracker: str, folder: Path) -> bool:
    """Returns whether a tracker has recorded the run in a folder."""
    received = Received.load(folder, tracker)
    return received.calls > 0 and received.is_complete(folder)


def compare(
    comparison: Comparison,
    output: Path,
    tracker: TrackerChoice,
    say: Callable[[str], None] = print,
    report: Callable[[list[Result]], Sequence[Path]] = lambda results: (),
    is_decided: Callable[[list[Result]], bool] = lambda results: False,
) -> list[Result]:
    """Plays the runs that are not finished; returns all results, including failed runs.

    Args:
        comparison: The comparison.
        output: Folder of results; results that it already contains are kept.
        tracker: Records a parent run and a child for each run.
        say: Called with a line for each run.
        report: Called at the end; the files that it returns are kept with the parent run.
        is_decided: Called with the results at each of `Comparison.looks`; the comparison ends at
            the first at which it returns True.

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
        configs = [comparison.config(name, arm, 0) for arm in comparison.arms]
        for config in configs:
            check_config(config)
        check_comparison(configs)
    _check_models(comparison)
    check_trackers(tracker)
    claim = _claim(comparison, output)
    if comparison.left_out:
        say(comparison.left_out)
    runs = list(planned(comparison, output))
    say(_plan(comparison, len(runs)))
    params = {
        "arms": [arm.name for arm in comparison.arms],
        "problems": list(comparison.problems),
        **{n: getattr(comparison, n) for n in ("seeds", "first_seed", "metric", "sequential")},
    }
    with claim, Recorder(tracker, output, params, say) as record:
        results: list[Result] = []
        workers = _afford(comparison, runs, comparison.workers or usable_cores(), say)
        for look in comparison.looks:
            seeds = comparison.first_seed + look
            part = [run for run in runs[len(results) :] if run.seed < seeds]
            ended = {}
            for result in _results(part, workers, say):
                say(f"{result.run.name}: {_score(result, comparison.metric)}")
                record.child(result)
                ended[result.run.folder] = result
            results += [ended[run.folder] for run in part]
            if look < comparison.seeds and is_decided(results):
                say(f"all arms are decided after {look} of {comparison.seeds} seeds")
                break
        for line in mixed_scores(results):
            say(line)
        for path in report(results):
            record.artifact(path)
    return results


def _plan(comparison: Comparison, runs: int) -> str:
    """Says how many runs there are and what they can show."""
    problems = len(comparison.problems)
    sizes = f"{problems} problem{'s'[: problems > 1]} with {len(comparison.arms)} arms"
    text = f"{runs} runs: {sizes} and {comparison.seeds} seeds"
    if comparison.seeds < comparison.fewest:
        return f"{text}; fewer than {comparison.fewest} seeds show no difference"
    least = smallest_difference(1.0, comparison.seeds, alpha=0.05 / comparison.tests)
    return (
        f"{text}; they show differences from {least:.2g} standard deviations of the paired "
        "differences (power 0.8), which --pilot measures"
    )


def _afford(
    comparison: Comparison, runs: Sequence[PlannedRun], workers: int, say: Callable[[str], None]
) -> int:
    """Says how long the runs take; returns how many of them go at a time.

    A run of each problem's first arm is measured if there are no results. A model that is built is
    too small for that, and what one has taken is said after it.
    """
    if any(not run.config.model or run.folder.exists() for run in runs):
        return workers
    say("measuring a few tokens and gradients")
    first = {run.problem: run for run in reversed(runs) if run.arm is comparison.arms[0]}
    prices: dict[str, dict[str, float]] = {}
    for run, _ in in_processes(_measure, list(first.values()), workers):
        with contextlib.suppress(FileNotFoundError):  # it failed, and the runs will say why
            prices[run.problem] = json.loads(read_file(run.folder.parent, _PRICE, _MOST_BYTES))
    if len(prices) < len(first) or not all(price["seconds"] for price in prices.values()):
        return workers
    fitting = min(int(price["fitting"]) for price in prices.values())
    if fitting < workers:
        say(f"memory has room for {fitting} at a time, and not for {workers}")
        workers = fitting
    imitated = {run.start: run.problem for run in runs if run.start}
    seconds = sum(prices[problem]["imitation"] for problem in imitated.values())
    seconds += sum(prices[r.problem]["seconds"] - prices[r.problem]["imitation"] for r in runs)
    say(f"about {_clock(seconds / workers)} in all, {workers} at a time")
    return workers


def _measure(run: PlannedRun) -> None:
    """Writes what a run takes; if that fails, so do the runs, which say why."""
    recipe: Any = run.config.recipe
    if imitates(run.config):
        few = min(_DEMONSTRATIONS, recipe.demonstrations)
        recipe = dataclasses.replace(recipe, demonstrations=few)
    with contextlib.suppress(GspoEnvError):
        agent = load_agent("gspo")(config=dataclasses.replace(run.config, recipe=recipe))
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        write_text(run.folder.parent / _PRICE, json.dumps(agent.price()))


def _check_models(comparison: Comparison) -> None:
    """Looks for each arm's model, but opens no file of weights."""
    configs = [comparison.config(n, arm, 0) for n in comparison.problems for arm in comparison.arms]
    for name in sorted({config.model for config in configs if config.model}):
        if not Path(name).is_file():
            from gspo_env.model.load import PACKAGED, load_tokenizer

            if name not in PACKAGED:
                load_tokenizer(name)


def _results(
    runs: Sequence[PlannedRun], workers: int, say: Callable[[str], None]
) -> Generator[Result, None, None]:
    """Plays the runs that are not finished, each from its start; yields all results."""
    finished = [result for run in runs if not (result := read(run)).error]
    folders = {result.run.folder for result in finished}
    waiting = [run for run in runs if run.folder not in folders]
    if finished:
        say(f"{len(finished)} of {len(runs)} runs have a result already")
        yield from finished
    for run in waiting:
        shutil.rmtree(run.folder, ignore_errors=True)
    # the first run of each missing start makes it
    starts = {r.start: r for r in reversed(waiting) if r.start and not r.start.exists()}
    if waiting:
        say(f"{len(waiting)} runs to play, warm-ups before: {len(starts)}, {workers} at a time")
    with (
        stop_on_signals(),
        # closed at once, because a traceback would keep the processes alive
        closing(in_processes(_warm_up, list(starts.values()), workers)) as warmed,
        closing(in_processes(_train, waiting, workers)) as trained,
    ):
        began = time.perf_counter()
        for done, (run, _) in enumerate(warmed, 1):
            say(f"warmed up {done}/{len(starts)}, seed {run.seed}  ({_left(began, done, starts)})")
        began = time.perf_counter()
        for done, (run, code) in enumerate(trained, 1):
            say(f"played {done}/{len(waiting)}  ({_left(began, done, waiting)})")
            killed = ": it was killed, as where memory runs out; lower --workers" * (code == -9)
            yield read(run, f"its process ended early, with exit code {code}{killed}")


def _left(began: float, done: int, jobs: Collection[object]) -> str:
    return f"{_clock((time.perf_counter() - began) / done * (len(jobs) - done))} left"


def _clock(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} hours"


def _score(result: Result, metric: str) -> str:
    """Returns the line to print for a run that ended.

    Raises:
        ConfigError: The run never logged the metric.
    """
    if result.error:
        return f"failed: {result.error}"
    _, values = result.curve(metric)
    if not values:
        names = sorted(result.recorded.series)
        near = ", ".join(difflib.get_close_matches(metric, names) or names)
        raise ConfigError(f"metric is {metric!r}; expected one of: {near}")
    return f"{values[-1]:z.3f}"


def read(run: PlannedRun, unfinished: str = "it is not finished") -> Result:
    """Reads the folder of a run.

    Args:
        run: The run.
        unfinished: The error of a run that neither finished nor says why it failed.

    Raises:
        OutputError: The folder cannot be read.
    """
    has_metrics = (run.folder / METRICS).is_file()  # else it failed before its first step
    recorded = Run.open(run.folder) if has_metrics else Run.of({}, {})
    error = read_text(run.folder / FAILURE).strip()[:_LONGEST_ERROR]
    return Result(
        run=run, recorded=recorded, error=error or ("" if recorded.finished else unfinished)
    )


def mixed_scores(results: Sequence[Result]) -> Iterator[str]:
    """Yields a warning for each problem whose runs decided to learn from different rewards."""
    scores: dict[str, dict[str, str]] = {}
    for result in results:
        run = result.run
        score = result.recorded.text("credit.score")
        if run.config.credit.score == "auto" and score not in ("", "auto") and not result.error:
            scores.setdefault(run.problem, {}).setdefault(score, run.name)
    for problem, decided in scores.items():
        if len(decided) > 1:
            examples = ", ".join(f"{score} ({name})" for score, name in decided.items())
            yield f"runs of {problem} learned from different rewards: {examples}; set --score"


def _claim(comparison: Comparison, output: Path) -> TextIO:
    """Makes the folder, or checks that it belongs to this comparison; returns its lock."""
    tomls = {name: to_toml(untracked(config)) for name, config in comparison.problems.items()}
    arms = [[arm.name, redact(dict(arm.changes))] for arm in comparison.arms]
    plan = redact_text(json.dumps({"problems": tomls, "arms": arms}, indent=1))
    note = output / "comparison.json"
    with raised_as(OutputError, f"cannot write to {str(output)!r}", OSError):
        output.mkdir(parents=True, exist_ok=True)
        check_folder(output)
        if not note.exists() and any(path.name != "lock" for path in output.iterdir()):
            raise OutputError(
                f"{str(output)!r} is not empty and holds no comparison; name a new folder with "
                "--output"
            )
        claim = lock(output / "lock", f"the comparison {str(output)!r}")
        text = plan.encode(errors="surrogatepass")
        if note.exists() and (note.stat().st_size != len(text) or note.read_bytes() != text):
            raise OutputError(
                f"{str(output)!r} holds another comparison; name a new folder with --output"
            )
        write_text(note, plan)
        remove_parts(output.rglob(".*.part"))
    return claim


def planned(comparison: Comparison, output: Path) -> Iterator[PlannedRun]:
    """Yields every run of a comparison, seed by seed."""
    for seed in range(comparison.first_seed, comparison.first_seed + comparison.seeds):
        for problem in comparison.problems:
            for arm in comparison.arms:
                config = comparison.config(problem, arm, seed)
                has_start = not config.model or imitates(config)
                settings = repr(start_settings(config)).encode()
                start = f"{hashlib.blake2b(settings, digest_size=8).hexdigest()}-seed{seed}"
                yield PlannedRun(
                    problem=problem,
                    arm=arm,
                    seed=seed,
                    config=config,
                    start=output / "starts" / start if has_start else None,
                    folder=output / "runs" / slug(problem) / slug(arm.name) / f"seed{seed}",
                )


def slug(name: str) -> str:
    """Makes the name of a folder from the name of an arm or a problem."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return f"{plain[:60]}-{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"


def _warm_up(run: PlannedRun) -> None:
    """Saves the warmed-up model for all runs that start from it; they say why that fails."""
    with contextlib.suppress(GspoEnvError):
        load_agent("gspo")(config=run.config).save_start(run.start, Progress())


def _train(run: PlannedRun) -> None:
    """Trains as `gspo-env train` does, from the start that a run shares; notes why it fails."""
    try:
        config = dataclasses.replace(run.config, output=str(run.folder))
        make, has_start = load_agent("gspo"), run.start is not None and run.start.exists()
        agent = make.from_start(run.start, config) if has_start else make(config=config)
        agent.train()
    except Exception as error:
        if not isinstance(error, GspoEnvError):  # whose sentence is in the report
            logger.exception("%s failed", run.name)
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / FAILURE, f"{type(error).__name__}: {error}\n")
        return
    is_finished = Run.open(run.folder).finished  # else a signal stopped it, and it is no result
    # hundreds of models would fill a disk; the empty folder shows that the run is finished
    shutil.rmtree(run.folder / "adapter", ignore_errors=True)
    shutil.rmtree(run.folder / MODEL)
    if is_finished:
        (run.folder / MODEL).mkdir()
