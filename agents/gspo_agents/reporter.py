"""Shows and records the progress of a training run, and sums it up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gspo_env.config import Config, to_dict, to_toml, with_score
from gspo_env.errors import OutputError
from gspo_env.learner.tokens import TokenValues
from gspo_env.model.check import Way
from gspo_env.redaction import write_text
from gspo_env.registry import name_of
from gspo_env.report.curves import learning_curve
from gspo_env.report.episodes_log import EpisodeLog
from gspo_env.report.episodes_page import PAGE, write_page
from gspo_env.report.run import closing, opening
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.metrics import EpisodeStats, Evaluation, RolloutStats
from gspo_env.tracking.base import MODEL, RunInfo, begin_run
from gspo_env.tracking.progress import Progress
from gspo_env.tracking.several import Several
from gspo_env.training.checkpoints import Checkpoints
from gspo_env.training.collapse import CollapseWatch, Level
from gspo_env.training.loop import History, Place
from gspo_env.training.split import Split
from gspo_env.training.watch import Problem, of_success
from gspo_env.types import Group, Score

logger = logging.getLogger(__name__)

_PAGE_MB = 16
"""Megabytes that the episodes may take in the page that a run writes at its end."""


class Reporter:
    """Shows each step in the terminal and logs it; see `gspo_env.training.loop.Reporter`."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        tracker: Several,
        checkpoints: Checkpoints,
        tokenizer: Any,
    ) -> None:
        self.config, self._progress, self._tracker = config, progress, tracker
        self._checkpoints = checkpoints
        attempt = checkpoints.attempt
        self.episodes = EpisodeLog(checkpoints.run, config.episodes, tokenizer, attempt)
        known = checkpoints.run / "warnings.txt"  # of a run that goes on
        self._warnings = known.read_text().splitlines() if known.is_file() else []
        said = any(line.startswith("collapse:") for line in self._warnings)
        self._collapse = CollapseWatch(self.warned, said)
        self._best: float | None = None
        """The best success of an evaluation."""
        self.take_score(None)

    def begin(self, model: Any, env_id: str, problems: Sequence[Problem]) -> None:
        """Says what is trained, where, and what is wrong with the settings."""
        look = self._tracker.how_to_look
        folder = self._checkpoints.run
        self._progress.line(opening(self.config, env_id, model, folder, look))
        for problem in problems:
            self.warned(problem)

    def warned(self, problem: Problem) -> None:
        """Says why the run learns nothing, or less than its settings say; writes it to a file."""
        self._progress.line(f"WARNING {problem.text}")
        self._warnings.append(f"{problem.name}: {problem.text}")
        text = "\n".join(self._warnings) + "\n"
        self.write("warnings.txt", text)
        self._tracker.text("warnings.txt", text)

    def trained(self, step: int, stats: RolloutStats, metrics: Mapping[str, float]) -> None:
        """Reports an update, with every metric of the step."""
        self._tracker.log(metrics, step)
        speed, clipped = stats.tokens / stats.seconds, metrics.get("train/clipped_fraction")
        more = {"tokens_per_second": speed, "clipped": clipped}
        self._show("train", step, stats.played, lost=stats.faults.lost, **more)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Reports an evaluation and keeps its episodes."""
        self._tracker.log(evaluation.metrics(), step)
        self._best = max(self._best or 0.0, evaluation.sampled.success)
        if step == 0 and (problem := of_success(evaluation.groups)):
            self.warned(problem)
        self._show("evaluate", step, evaluation.sampled, lost=evaluation.faults.lost)
        self._collapse.see(Level.of(step, evaluation))
        self.episodes.evaluated(step, evaluation)

    def kept(self, groups: int) -> Collection[int]:
        """Returns the indices of the training groups to keep the episodes of."""
        return self.episodes.chosen(groups)

    def played(
        self, step: int, groups: Mapping[int, Group], tokens: Mapping[Place, TokenValues]
    ) -> None:
        """Keeps groups of a training step, with what the update did to their tokens."""
        self.episodes.trained(step, groups, tokens)

    def scored(self, score: Score | None, reason: str) -> None:
        """Reports which rewards the run learns from and writes the config that has them."""
        text = f"{score}: {reason}" if score else reason
        logger.info("credit.score is %s", text)
        self.take_score(score)
        self._tracker.text("score.txt", text)

    def go_on(self, history: History, score: Score | None) -> None:
        """Takes over what a run that goes on has found."""
        evaluations = [(step, m) for step, m in history if "eval/success" in m]
        self._best = max((m["eval/success"] for _, m in evaluations), default=None)
        for step, metrics in evaluations:
            self._collapse.see(Level.recorded(step, metrics, self.config.eval_tasks))
        self.take_score(score)
        self.episodes.go_on(history[-1][0] if history else 0)

    def take_score(self, score: Score | None) -> None:
        """Writes the config with the rewards that the run learns from, None before it decides."""
        self.config = with_score(self.config, score)
        self.write("config.toml", to_toml(self.config))

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run; on a full disk, training goes on without it."""
        path: Path = self._checkpoints.run / name
        self._checkpoints.attempt(name, lambda: write_text(path, text))

    def save(self, history: History, env_id: str, write: Callable[[Path], None]) -> None:
        """Writes and tracks what was trained, and the learning curve.

        Args:
            history: The metrics of every step.
            env_id: The environment.
            write: Writes the trained model into the folder of the run.

        Raises:
            OutputError: The model cannot be written.
        """
        folder = self._checkpoints.run
        if not self._checkpoints.attempt("the trained model", lambda: write(folder)):
            raise OutputError(f"the trained model cannot be written to {str(folder)!r}")
        curve = learning_curve(history, f"{env_id}, seed {self.config.seed}")
        path = folder / "learning_curve.png"
        self._checkpoints.attempt(path.name, lambda: curve.savefig(path))
        page = folder / PAGE
        self._checkpoints.attempt(page.name, lambda: write_page(folder, page, most_mb=_PAGE_MB))
        for name in ("config.toml", path.name, page.name):
            self._tracker.artifact(folder / name)
        self._tracker.artifact(folder / MODEL, MODEL)

    def end(self, history: History, split: Split, left_out: int) -> None:
        """Says what the run reached, and where its files are or how to go on with it.

        Args:
            history: The metrics of every step.
            split: The tasks of the evaluation.
            left_out: Demonstrations of held-out tasks.
        """
        step, steps = history[-1][0], self.config.steps
        if step < steps:
            lines = [f"Stopped after step {step} of {steps}. {self._checkpoints.how_to_resume}"]
        else:
            lines = _results(history, split, left_out)
            folder = self._checkpoints.run
            lines.append(f"Model, config and learning curve: {folder}")
            lines += closing(history, folder, self._progress.encoding, tasks=len(split.tasks))
        lines += self._tracker.problems
        if self._tracker.how_to_look:
            lines.append(f"Tracked: {self._tracker.how_to_look}")
        self._progress.line("\n".join(lines))

    @contextmanager
    def watch(self, collector: Collector) -> Iterator[None]:
        """Keeps the first failure of an environment; names the last checkpoint on an error."""
        with self._checkpoints.named_on_failure():
            try:
                yield
            finally:
                if (first := collector.pool.faults.first) is not None:
                    name = "first-environment-error.txt"
                    self.write(name, f"{first.message}\n\n{first.traceback}")
                    self._tracker.artifact(self._checkpoints.run / name)

    def _show(self, phase: str, step: int, what: EpisodeStats, **more: float | None) -> None:
        self._progress.update(
            phase=phase,
            step=step,
            total=self.config.steps,
            success=what.success,
            best=self._best,
            return_=what.mean_return,
            spread=what.return_std,
            **more,
        )


def run_info(
    config: Config, env_id: str, way: Way, folder: Path, ids: Mapping[str, str]
) -> RunInfo:
    """Returns what trackers get when a run starts.

    Args:
        config: The settings.
        env_id: The environment.
        way: How the model is run.
        folder: Folder of the run.
        ids: The id of a run that goes on in each tracker, else nothing.
    """
    estimator = name_of("advantage", config.advantage).rpartition(":")[2]
    return RunInfo(
        name=f"{env_id.split('/')[-1]}-{estimator}-seed{config.seed}",
        folder=folder,
        params=to_dict(config),
        tags={"env": env_id, "way": way.value},
        resume=ids,
        started=begin_run(),
    )


def _results(history: History, split: Split, left_out: int) -> list[str]:
    def total(name: str) -> float:
        return sum(metrics.get(name, 0.0) for _, metrics in history)

    evaluations = [metrics for _, metrics in history if "eval/success" in metrics]
    first, last = evaluations[0], evaluations[-1]
    lines = [
        f"Success on {split}: {first['eval/success']:.1%} before training, "
        f"{last['eval/success']:.1%} after (greedy {first['eval/success_greedy']:.1%} and "
        f"{last['eval/success_greedy']:.1%})."
    ]
    if skipped := total("train/skipped_steps"):
        lines.append(f"Optimiser steps skipped, because a number was not finite: {skipped:.0f}.")
    redrawn = total("rollout/redrawn_tasks")
    if redrawn or left_out:
        lines.append(
            f"Not trained on, because their tasks are held out: draws {redrawn:.0f} (each was "
            f"repeated), demonstrations {left_out}."
        )
    return lines
