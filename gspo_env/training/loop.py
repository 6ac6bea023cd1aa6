"""The training loop: tasks, episodes, credit, update, weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gspo_env.batch.sample import Sample, to_sample
from gspo_env.config import Config
from gspo_env.credit.estimate import Credit, estimate
from gspo_env.credit.scores import ScoreChoice
from gspo_env.errors import RolloutError
from gspo_env.learner.learner import Learner
from gspo_env.model.export import named_weights
from gspo_env.registry import name_of
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.metrics import Evaluation, RolloutStats
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.training.probe import check_sync
from gspo_env.training.split import Split
from gspo_env.types import FloatArray, Group, Score, Task

logger = logging.getLogger(__name__)

History = list[tuple[int, dict[str, float]]]


class Reporter(Protocol):
    """Shows and records the progress of a run."""

    def trained(self, step: int, stats: RolloutStats, metrics: Mapping[str, float]) -> None:
        """Reports an update, with every metric of the step."""
        ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Reports an evaluation."""
        ...

    def scored(self, score: Score, reason: str) -> None:
        """Reports which rewards the run learns from, once its first episodes have decided it."""
        ...


@dataclass(slots=True)
class Loop:
    """One training run over parts that are already built."""

    config: Config
    env_id: str
    collector: Collector
    learner: Learner
    report: Reporter
    split: Split
    history: History = field(default_factory=list)
    score: ScoreChoice = field(init=False)
    """Which rewards the estimator learns from."""
    _warned: bool = False

    def __post_init__(self) -> None:
        """Takes the score of the config, if it has one."""
        given = self.config.credit.score
        self.score = ScoreChoice(self.env_id, None if given == "auto" else given)

    async def train(self) -> History:
        """Runs every step; returns the metrics of each.

        Raises:
            RolloutError: No first prompt of the first step fits the context.
        """
        config = self.config
        await self._sync(0)
        before = await self._evaluate(0, 0)
        played = 0
        for step in range(1, config.steps + 1):
            started = time.perf_counter()
            groups = await self.collector.collect(
                self._tasks(step),
                seed=derive_seed("rollout", config.seed, step),
                held_out=self.split.held_out,
            )
            if step == 1 and self.collector.no_room:
                raise RolloutError(self.collector.no_room)
            stats = RolloutStats.of(groups, time.perf_counter() - started)
            metrics = stats.metrics() | {"rollout/episodes_before": float(played)}
            played += sum(len(group.episodes) for group in groups)
            credit = self._credit(groups, [*before, *groups] if step == 1 else groups)
            samples = self._samples(groups, credit.advantages)
            await self.collector.engine.sleep()
            if samples:
                metrics |= self.learner.update(samples, derive_seed("batch", config.seed, step))
            metrics |= credit.metrics() | await self._sync(step)
            self.history.append((step, metrics))
            self.report.trained(step, stats, metrics)
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                await self._evaluate(step, played)
        return self.history

    def _credit(self, groups: Sequence[Group], seen: Sequence[Group]) -> Credit:
        """Computes the advantages with the score that all episodes before the first update decide.

        Args:
            groups: The groups to train on.
            seen: The groups whose episodes are new.
        """
        settings = self.config.credit
        if getattr(self.config.advantage, "uses_score", True):
            episodes = [episode for group in seen for episode in group.episodes]
            if self.score.see(episodes, self.collector.pool.gives_outcome):
                self.report.scored(self.score.score or "turns", self.score.reason)
            settings = replace(settings, score=self.score.score or "turns")
        credit = estimate(groups, self.config.advantage, settings)
        if credit.blind(groups) and not self._warned:
            self._warned = True
            logger.warning(
                "every advantage of this step is 0, although the outcomes of episodes differ: "
                "the rewards that %s reads (score %r) do not",
                name_of("advantage", self.config.advantage),
                settings.score,
            )
        return credit

    async def _sync(self, version: int) -> dict[str, float]:
        """Sends the learner's weights to the engine and compares the two; returns the metrics."""
        started = time.perf_counter()
        await self.collector.engine.update_weights(named_weights(self.learner.policy), version)
        seconds = time.perf_counter() - started
        return {"time/sync": seconds, **await check_sync(self.collector, self.learner)}

    def _tasks(self, step: int) -> list[Task]:
        seeds = (
            derive_seed("task", self.config.seed, step, p)
            for p in range(self.config.tasks_per_step)
        )
        return [Task(env_id=self.env_id, seed=seed % HELD_OUT) for seed in seeds]

    def _samples(
        self, groups: Sequence[Group], advantages: Sequence[Sequence[FloatArray]]
    ) -> list[Sample]:
        """Returns a sample for every episode that has a token to train on."""
        keep_cut = self.config.credit.train_on_truncated
        samples = (
            to_sample(episode, values)
            for group, rows in zip(groups, advantages, strict=True)
            for episode, values in zip(group.episodes, rows, strict=True)
            if episode.turns and not episode.failed and (keep_cut or not episode.truncated)
        )
        return [sample for sample in samples if sample.mask.any()]

    async def _evaluate(self, step: int, played: int) -> Sequence[Group]:
        """Evaluates; returns the sampled groups."""
        evaluation = await evaluate(self.collector, self.split.tasks)
        metrics = evaluation.metrics() | {"eval/episodes_before": float(played)}
        self.history.append((step, metrics))
        self.report.evaluated(step, evaluation)
        return evaluation.groups


async def evaluate(collector: Collector, tasks: Sequence[Task]) -> Evaluation:
    """Plays the tasks once sampled at the training temperature and once greedily."""
    started = time.perf_counter()
    sampled = await collector.collect(tasks, seed=0, group_size=1)
    greedy = await collector.collect(tasks, seed=0, group_size=1, temperature=0.0)
    return Evaluation.of(sampled, greedy, time.perf_counter() - started)
