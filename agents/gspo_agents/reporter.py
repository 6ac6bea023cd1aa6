"""Shows and records the progress of a training run, and sums it up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gspo_agents.inputs import inputs
from gspo_agents.terminal import EpisodeCounter, closing, opening, results, start_of, summary
from gspo_env.config import Config, to_dict, to_toml, with_score
from gspo_env.env.base import attribute
from gspo_env.episodes.schema import PAGE, Phase
from gspo_env.episodes.writer import EpisodeLog, Tokens
from gspo_env.errors import OutputError
from gspo_env.files import MODEL, read_file
from gspo_env.health.findings import Finding
from gspo_env.health.startup import check_first_evaluation, find_collapse
from gspo_env.model.check import RunMode
from gspo_env.redaction import write_text
from gspo_env.registry import name_of
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.metrics import EpisodeStats, Evaluation, RolloutStats
from gspo_env.runs.evaluations import EvalSnapshot
from gspo_env.runs.run import CONFIG, ENVIRONMENT_ERROR, WARNINGS, History, Run
from gspo_env.tracking.base import SUMMARY, RunInfo
from gspo_env.tracking.console import Progress
from gspo_env.tracking.multi import MultiTracker
from gspo_env.tracking.system import SystemMetrics, commit, versions
from gspo_env.training.checkpoints import Checkpoints
from gspo_env.training.split import Split
from gspo_env.types import Group, Score

logger = logging.getLogger(__name__)

_ONCE = ("collapse", "control_tokens")
"""Findings that many steps may have, and that are shown once."""
_PAGE_MB = 16
"""Megabytes that the episodes may take in the page that a run writes at its end."""


class Reporter:
    """Shows each step in the terminal and logs it; see `gspo_env.training.loop.Reporter`."""

    def __init__(
        self,
        config: Config,
        progress: Progress,
        tracker: MultiTracker,
        checkpoints: Checkpoints,
        tokenizer: Any,
    ) -> None:
        self.config, self._progress, self._tracker = config, progress, tracker
        self._checkpoints = checkpoints
        self.episodes = EpisodeLog(
            checkpoints.run, config.episodes, tokenizer, checkpoints.try_write
        )
        self._warnings: list[str] = []
        with suppress(OSError):  # there is none, or an untrusted one is too large
            warnings = read_file(checkpoints.run, WARNINGS, 1 << 20)
            self._warnings = warnings.decode(errors="replace").splitlines()
        self._evaluations: list[EvalSnapshot] = []
        self._system = SystemMetrics()
        self._num_tasks: dict[str, int | None] = {}
        """The number of tasks that each environment declares."""

    def begin(self, model: Any, env_id: str, findings: Sequence[Finding]) -> None:
        """Says what is trained, where, and what is wrong with the settings; writes them."""
        self.take_score(None)
        look = self._tracker.how_to_look
        folder = self._checkpoints.run
        self._progress.line(opening(self.config, env_id, model, folder, look))
        self._progress.begin("start", 0, self.config.steps)
        self._summarise([])
        for finding in findings:
            self.warned(finding)

    def line(self, text: str) -> None:
        """Shows a line."""
        self._progress.line(text)

    def warned(self, finding: Finding) -> None:
        """Says why the run learns nothing, or less than its settings say; writes it to a file."""
        same = (line.startswith(f"{finding.name}:") for line in self._warnings)
        if finding.name in _ONCE and any(same):
            return
        self._progress.line(f"WARNING {finding}")
        self._warnings.append(f"{finding.name}: {finding}")
        text = "\n".join(self._warnings) + "\n"
        self.write(WARNINGS, text)
        self._tracker.text(WARNINGS, text)

    def trained(self, step: int, stats: RolloutStats, metrics: Mapping[str, float]) -> None:
        """Reports an update, with every metric of the step."""
        self._tracker.log({**metrics, **self._system.take()}, step)
        self._show(
            "train",
            step,
            stats.played,
            lost=stats.lost or None,
            tokens_per_second=stats.tokens / stats.seconds,
            clipped=metrics.get("train/clipped_fraction"),
        )
        every, last = self.config.eval_every, self.config.steps
        if step == last or (every and step % every == 0):
            self._progress.begin("evaluate", step, last)

    def evaluated(self, step: int, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """Reports an evaluation and keeps its episodes."""
        self._tracker.log(metrics, step)
        self._evaluations.append(EvalSnapshot.of(step, evaluation))
        if step == 0:
            for source in inputs(self.config, evaluation.groups, self._num_tasks):
                self._tracker.input(source)
            for finding in check_first_evaluation(
                self.config, evaluation.groups, start_of(self.config)
            ):
                self.warned(finding)
        self._show("evaluate", step, evaluation.sampled, lost=evaluation.lost or None)
        self._progress.begin("train", step, self.config.steps)
        if collapse := find_collapse(self._evaluations):
            self.warned(collapse)
        self.episodes.evaluated(step, evaluation)
        if self.config.episodes.keep_episodes != "none":
            self._trace(step, "eval", dict(enumerate(evaluation.groups)))
            self._trace(step, "greedy", dict(enumerate(evaluation.greedy_groups)))

    def groups_to_keep(self, groups: int) -> Collection[int]:
        """Returns the indices of the training groups to keep the episodes of."""
        return self.episodes.groups_to_keep(groups)

    def played(self, step: int, groups: Mapping[int, Group], tokens: Tokens) -> None:
        """Keeps groups of a training step, with what the update did to their tokens."""
        self.episodes.trained(step, groups, tokens)
        self._trace(step, "train", groups)

    def scored(self, score: Score | None, reason: str) -> None:
        """Reports which rewards the run learns from and writes the config that has them."""
        text = f"{score}: {reason}" if score else reason
        logger.info("credit.score is %s", text)
        self.take_score(score)
        self._tracker.text("score.txt", text)

    def resume(self, history: History, score: Score | None) -> None:
        """Restores the evaluations and the score of a resumed run."""
        self._evaluations += [
            EvalSnapshot.from_metrics(step, metrics, int(self.config.eval_tasks))
            for step, metrics in history
            if "eval/success" in metrics
        ]
        self.take_score(score)
        step = history[-1][0] if history else 0
        self.episodes.resume(step)
        self._checkpoints.delete_batches(step)

    def take_score(self, score: Score | None) -> None:
        """Writes the config with the rewards that the run learns from, None before it decides."""
        self.config = with_score(self.config, score)
        self.write(CONFIG, to_toml(self.config))

    def write(self, name: str, text: str) -> None:
        """Writes a file of the run; on a full disk, training continues without it."""
        path: Path = self._checkpoints.run / name
        self._checkpoints.try_write(name, lambda: write_text(path, text))

    def save(self, history: History, env_id: str, write: Callable[[Path, int], None]) -> None:
        """Writes and tracks what was trained, at the end or where the run was stopped.

        Args:
            history: The metrics of every step.
            env_id: The environment.
            write: Writes the trained model into the folder of the run, as that of a step.

        Raises:
            OutputError: The model cannot be written.
        """
        from gspo_env.runs.page import write_page
        from gspo_env.runs.plots import learning_curve

        folder, step = self._checkpoints.run, history[-1][0]
        if not self._checkpoints.try_write("the trained model", lambda: write(folder, step)):
            raise OutputError(f"the trained model cannot be written to {str(folder)!r}")
        self._summarise(history)
        record = Run.in_progress(self.config, history)
        title = f"{env_id}, seed {self.config.seed}"
        curve = learning_curve(record, title)
        path = folder / "learning_curve.png"
        self._checkpoints.try_write(path.name, lambda: curve.savefig(path))
        page = folder / PAGE
        self._checkpoints.try_write(
            page.name, lambda: write_page(Run.open(folder), page, most_mb=_PAGE_MB)
        )
        for name in (CONFIG, path.name, page.name):
            self._tracker.artifact(folder / name)
        if record.is_complete(step):  # a model that is registered has all steps
            self._tracker.artifact(folder / MODEL, MODEL)

    def end(self, history: History, split: Split, left_out: int) -> None:
        """Says what the run reached, and where its files are or how to resume it.

        Args:
            history: The metrics of every step.
            split: The tasks of the evaluation.
            left_out: Demonstrations of held-out tasks.
        """
        step, steps, stop = history[-1][0], self.config.steps, self.config.stop_at_success
        if not Run.in_progress(self.config, history).is_complete(step):
            folder = self._checkpoints.run
            lines = [
                self._checkpoints.stopped(step, steps),
                f"Model of step {step}, config and learning curve: {folder}",
            ]
        else:
            lines = results(history, split, left_out, start_of(self.config))
            folder, encoding = self._checkpoints.run, self._progress.encoding
            more = "--stop-at-success 0" if step < steps else ""
            if more:
                lines = [
                    f"Stopped after step {step} of {steps}: success {stop:.1%} reached.",
                    *lines,
                ]
            resume = self._checkpoints.resume_command
            tasks = len(split.tasks)
            lines += closing(history, folder, encoding, tasks=tasks, more=more, resume=resume)
        lines += self._tracker.problems
        if self._tracker.how_to_look:
            lines.append(f"Tracked: {self._tracker.how_to_look}")
        self._progress.line("\n".join(lines))

    @contextmanager
    def watch(self, collector: Collector) -> Iterator[None]:
        """Reads the machine and keeps the first failure of an environment."""
        for member in self.config.environments:
            sample = collector.pool.of(member.env_id).sample
            if sample is not None:
                self._num_tasks[member.env_id] = attribute(sample, "num_tasks", None)
        collector.counter = EpisodeCounter(self._progress)
        with self._system:
            try:
                yield
            finally:
                if (first := collector.pool.faults.first) is not None:
                    self.write(ENVIRONMENT_ERROR, f"{first.message}\n\n{first.traceback}")
                    self._tracker.artifact(self._checkpoints.run / ENVIRONMENT_ERROR)

    def _summarise(self, history: History) -> None:
        text = summary(history, self._tracker.started, start_of(self.config))
        self.write(SUMMARY, text)
        self._tracker.text(SUMMARY, text)

    def _trace(self, step: int, phase: Phase, groups: Mapping[int, Group]) -> None:
        most = self._tracker.traces(phase)
        if most:
            from gspo_agents.traces import traces

            for trace in traces(step, phase, groups, most):
                self._tracker.trace(trace)

    def _show(self, phase: str, step: int, what: EpisodeStats, **more: float | None) -> None:
        self._progress.update(
            phase,
            step,
            self.config.steps,
            success=what.success,
            best=max((e.success for e in self._evaluations), default=None),
            mean_return=what.mean_return,
            return_std=what.return_std,
            **{"calls": what.tool_calls, **what.reward_parts, **more},
        )


def run_info(
    config: Config, env_id: str, way: RunMode, folder: Path, recorded: Mapping[str, int] | None
) -> RunInfo:
    """Returns what trackers get when a run starts.

    Args:
        config: The settings.
        env_id: The environment.
        way: How the model is run.
        folder: Folder of the run.
        recorded: What the checkpoint of a resumed run has, else None; see `RunInfo.resume`.
    """
    estimator = name_of("advantage", config.advantage).rpartition(":")[2]
    return RunInfo(
        name=folder.absolute().name,
        folder=folder,
        params=to_dict(config),
        tags={"env": env_id, "advantage": estimator, "way": way.value, **versions(), **commit()},
        resume=recorded,
    )
