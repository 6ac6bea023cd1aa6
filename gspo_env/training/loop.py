"""The training loop: tasks, episodes, credit, update, weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gspo_env.batch.sample import Sample, to_samples
from gspo_env.config import Config
from gspo_env.credit.estimate import Credit, estimate
from gspo_env.credit.estimators import Estimator
from gspo_env.credit.scores import ScoreChoice, Scores
from gspo_env.engines.base import NamedTensors
from gspo_env.episodes.writer import Tokens
from gspo_env.health.findings import Finding
from gspo_env.health.startup import check_first_steps
from gspo_env.learner.settings import Trainer
from gspo_env.registry import name_of
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.metrics import Evaluation, RolloutStats, control_metrics
from gspo_env.runs.run import History, is_complete
from gspo_env.seeding import derive_seed, generator_states
from gspo_env.tracking.console import part
from gspo_env.training.checkpoints import CheckpointWriter
from gspo_env.training.curriculum import TaskSampler
from gspo_env.training.rollout_buffer import RolloutBuffer
from gspo_env.training.split import Split
from gspo_env.types import FloatArray, Group, Score, Task

if TYPE_CHECKING:
    from gspo_env.training.interleaved import Interleaved

logger = logging.getLogger(__name__)


class Reporter(Protocol):
    """Shows and records the progress of a run."""

    def trained(self, step: int, stats: RolloutStats, metrics: Mapping[str, float]) -> None:
        """Reports an update, with every metric of the step."""

    def evaluated(self, step: int, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """Reports an evaluation."""

    def groups_to_keep(self, groups: int) -> Collection[int]:
        """Returns the indices of the training groups to keep the episodes of."""

    def played(self, step: int, groups: Mapping[int, Group], tokens: Tokens) -> None:
        """Reports the groups to keep, by index, and what the update did to their tokens."""

    def scored(self, score: Score | None, reason: str) -> None:
        """Reports which rewards the run learns from, once its first episodes have decided it.

        Args:
            score: The score; None if each of several environments has its own.
            reason: Why, and which score an environment has if there are several.
        """

    def warned(self, finding: Finding) -> None:
        """Reports why the run learns nothing, or less than its settings say."""


@dataclass(slots=True)
class Loop:
    """One training run over parts that are already built."""

    config: Config
    weights: Mapping[str, float]
    """The weight of each environment, by the `env_id` of its tasks."""
    collector: Collector
    learner: Trainer
    reporter: Reporter
    split: Split
    writer: CheckpointWriter | None = None
    """Saves the run; None saves nothing."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the model before and during its imitation, for step 0."""
    tasks: TaskSampler = field(init=False)
    """Draws the tasks of each step."""
    buffer: RolloutBuffer = field(init=False)
    """Plays the groups of each step."""
    history: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    declared: Mapping[str, Score | None] = field(default_factory=dict)
    """The scores that environments declare, used if the config has none."""
    estimator: Estimator = field(init=False)
    """The estimator of the config, bound to its teacher if it has one."""
    scores: Scores = field(init=False)
    """Which rewards the estimator learns from, in each environment."""
    imitation: Interleaved | None = None
    """What updates imitate; None if nothing."""
    step: int = 0
    """Steps that are done."""
    episodes_played: float = 0.0
    """Training episodes so far."""
    best: dict[str, float] = field(default_factory=dict)
    """The step of the best saved evaluation after training began, and its success."""
    _warned: bool = False

    def __post_init__(self) -> None:
        """Chooses the score, lets the estimator load its teacher and builds the rollout buffer."""
        self.estimator = self.config.advantage.bind(self.learner, self.collector)
        setting = self.config.credit.score
        scores = self.declared if setting == "auto" else dict.fromkeys(self.weights, setting)
        self.scores = Scores(
            {name: ScoreChoice(name, scores.get(name)) for name in self.weights}, self.estimator
        )
        config, playing = self.config, self.config.branching.wrap(self.collector)
        self.tasks = TaskSampler(
            config.curriculum, self.weights, config.seed, config.tasks_per_step
        )
        self.buffer = RolloutBuffer(config, playing, self.tasks, self.scores, self.split.held_out)
        if config.learner.imitation != "none":
            from gspo_env.training.interleaved import Interleaved

            self.imitation = Interleaved(config.learner, self.learner)

    @property
    def complete(self) -> bool:
        """Whether there is no step left."""
        success = self.history[-1][1].get("eval/success", 0.0)
        return is_complete(self.step, success, self.config.steps, self.config.stop_at_success)

    async def train(self) -> History:
        """Runs the steps that are left, until it is interrupted; returns the metrics of each.

        Raises:
            TrainingError: Nothing can be learned; see `gspo_env.health.startup`.
        """
        try:
            await self._sync(self.step)
            before: Sequence[Group] = ()
            if self.step == 0:
                # before the evaluation, whose episodes the first step needs
                await self._save(must=True)
                before = await self._evaluate()
            while not self.complete and not (self.writer and self.writer.interrupt.requested):
                await self._train_step(before)
                before = ()
        finally:
            await self.buffer.close()
        if self.writer and self.writer.checkpoints.last != self.step:
            await self._save(must=True)
        return self.history

    async def _train_step(self, before: Sequence[Group]) -> None:
        """Takes groups, learns, reports, evaluates and saves.

        Args:
            before: Episodes of the evaluation before the first step.
        """
        config, step = self.config, self.step + 1
        with part("rollout"):
            stats = await self.buffer.take()
        groups, every_group = stats.groups, [*stats.groups, *stats.unused]
        metrics = stats.metrics() | {"rollout/episodes_before": self.episodes_played}
        metrics |= self.tasks.record(every_group)
        metrics |= control_metrics(groups, self.collector.chat.text.control_ids)
        self.episodes_played += config.branching.episodes(every_group)
        metrics |= config.compaction.metrics(groups) | config.branching.metrics(groups)
        credit = self._credit(groups, [*before, *groups])
        keep_cut = config.credit.train_on_truncated
        samples, places = to_train(groups, credit.advantages, keep_cut, self.step)
        recorded = self.reporter.groups_to_keep(len(groups))
        numbers = {n: place for n, place in enumerate(places) if place[0] in recorded}
        if self.imitation is not None:
            await self.imitation.prepare(groups, self.collector)
        if not self.buffer.ahead:
            await self.collector.engine.sleep()
        tokens: Tokens = {}
        sync: Callable[[int], Awaitable[dict[str, float]]] = self._sync
        if self.collector.engine.undo_updates:
            from gspo_env.training.acceptance import Undo

            limit = config.learner.max_skipped_steps
            undo = Undo(self.learner)
            sync = partial(undo.sync, self._sync, history=self.history, limit=limit)
        if samples:
            seed = derive_seed("batch", config.seed, step)
            if self.writer is not None and config.episodes.keep_batches != "none":
                from gspo_env.training.batches import Batch, keep_batch

                batch = Batch(groups=groups, samples=samples, metrics=metrics, seed=seed)
                await keep_batch(self, self.writer, step, batch)
            update = partial(self.learner.update, samples, seed, numbers)
            with part("update"):
                metrics |= await self.buffer.run(update)
            tokens = {(*numbers[n], turn): v for (n, turn), v in self.learner.tokens.items()}
            if self.imitation is not None:
                metrics |= self.imitation.metrics()
        metrics |= credit.metrics() | await sync(step)
        self.buffer.advance(step)
        if self.writer:
            metrics["train/failed_saves"] = float(self.writer.checkpoints.failed)
        self.step = step
        self.history.append((step, metrics))
        self.reporter.trained(step, stats, metrics)
        self.reporter.played(step, {p: groups[p] for p in sorted(recorded)}, tokens)
        check_first_steps(config, self.history, self.reporter.warned)
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            await self._evaluate()
            await self._empty_cache()
        with part("saving"):
            await self._save()

    async def _empty_cache(self) -> None:
        """Lets the next step sample the same bits as in a run that is resumed from here.

        With groups that are played ahead, the time decides what an episode is sampled with.
        """
        if not self.buffer.ahead:
            await self.collector.engine.forget()

    async def _save(self, must: bool = False) -> None:
        """Saves the run if it must be saved, if that is due, or if it is the best so far.

        The state is captured at the call; episodes may continue while it is written.
        """
        if self.writer is None:
            return
        step, metrics = self.history[-1] if self.history else (0, {})
        success, former = metrics.get("eval/success"), self.best
        best = self.step > 0 and success is not None and success > former.get("success", -1.0)
        if not (must or best or self.writer.checkpoints.due(self.step)):
            return
        if best:
            self.best = {"step": step, "success": float(success or 0.0)}
        save = partial(self.writer.save, self.state(), self.learner.state, best)
        if not await self.buffer.run(save):
            self.best = former

    def state(self) -> dict[str, Any]:
        """Returns the state of the run at this moment, but for the learner's, as JSON."""
        return {
            "step": self.step,
            "played": self.episodes_played,
            "best": self.best,
            "history": list(self.history),
            "curriculum": dict(self.tasks.state),
            "score": self.scores.state(),
            "interleaved": self.imitation and self.imitation.state(),
            "buffer": self.buffer.state(),
            "generators": generator_states(),
        }

    def _credit(self, groups: Sequence[Group], new: Sequence[Group]) -> Credit:
        """Computes the advantages with the score that all episodes before the first update decide.

        Args:
            groups: The groups to train on.
            new: The groups whose episodes are new.
        """
        settings, scores = self.config.credit, {}
        if self.estimator.uses_score:
            if reason := self.scores.see(new):
                self.reporter.scored(self.scores.only, reason)
            scores = self.scores.by_environment
        credit = estimate(groups, self.estimator, settings, scores)
        if credit.blind(groups) and not self._warned:
            self._warned = True
            logger.warning(
                "every advantage of this step is 0, although the outcomes of episodes differ: "
                "the rewards that %s reads (score %s) do not",
                name_of("advantage", self.config.advantage),
                " and ".join(sorted({repr(score) for score in scores.values()}) or ["its own"]),
            )
        return credit

    def _named_weights(self) -> NamedTensors:
        """Yields the learner's weights; an engine that computes with them asks for none."""
        from gspo_env.model.export import named_weights

        yield from named_weights(self.learner.policy, adapter=self.collector.engine.adapter_only)

    async def _sync(self, version: int) -> dict[str, float]:
        """Sends the learner's weights to the engine and compares the two; returns the metrics."""
        started, named = time.perf_counter(), self._named_weights()
        with part("sync"):
            if self.buffer.ahead:
                await self.collector.update_in_flight(named, version)
            else:
                await self.collector.engine.update_weights(named, version)
        seconds = time.perf_counter() - started
        metrics = {"time/sync": seconds}
        if self.collector.engine.copies:
            from gspo_env.training.weight_check import check_sync

            metrics |= await check_sync(self.collector, self.learner, self.buffer.run)
            await self._empty_cache()
        return metrics | self.collector.metrics() | self.collector.engine.metrics()

    async def _evaluate(self) -> Sequence[Group]:
        """Evaluates; returns the sampled groups."""
        with part("evaluation"):
            evaluation = await evaluate(self.collector, self.split.tasks)
        metrics = evaluation.metrics() | {"eval/episodes_before": self.episodes_played}
        if self.step == 0:
            metrics |= self.before
        self.history.append((self.step, metrics))
        self.reporter.evaluated(self.step, evaluation, metrics)
        return evaluation.groups


def to_train(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[FloatArray]],
    keep_cut: bool,
    version: int,
) -> tuple[list[Sample], list[tuple[int, int]]]:
    """Returns the samples of every episode that has a token to train on.

    Also returns the group and the index in the group of the episode of each number.

    Args:
        groups: The groups of an update.
        advantages: The advantages of each episode of each group.
        keep_cut: Whether truncated episodes are trained on.
        version: The updates that are done.
    """
    trained = [
        ((p, g), episode, values)
        for p, (group, rows) in enumerate(zip(groups, advantages, strict=True))
        for g, (episode, values) in enumerate(zip(group.episodes, rows, strict=True))
        if episode.turns and not episode.failed and (keep_cut or not episode.truncated)
    ]
    rows = [values for _, _, values in trained]
    samples = to_samples([episode for _, episode, _ in trained], rows, version)
    return [sample for sample in samples if sample.mask.any()], [place for place, *_ in trained]


async def evaluate(collector: Collector, tasks: Sequence[Task]) -> Evaluation:
    """Plays the tasks once sampled at the training temperature and once greedily.

    Its seed is 0 whatever that of the run, so that evaluations differ by the weights alone.
    """
    started = time.perf_counter()
    sampled, greedy = await collector.collect_evaluation(tasks, seed=0)
    return Evaluation(sampled, greedy, time.perf_counter() - started)
