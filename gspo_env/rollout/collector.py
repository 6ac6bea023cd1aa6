"""Rollout: one asyncio task per episode, without a barrier between turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines.base import Engine, NamedTensors
from gspo_env.env.base import TextEnvironment
from gspo_env.errors import EnvironmentContractError, RolloutError
from gspo_env.rollout.failures import refuse_failures
from gspo_env.rollout.policy import EnginePolicy
from gspo_env.rollout.pool import EnvPool, EnvPools, play_again, play_pooled
from gspo_env.rollout.progress import STALL_SECONDS, Heartbeat, Progress
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.settings import settings
from gspo_env.types import Episode, Group, ResetInfo, StopReason, Task

logger = logging.getLogger(__name__)

_MAX_REDRAWS = 100
"""Maximum tasks that are drawn for one group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """A group of episodes to play."""

    task: Task
    seed: int
    place: int
    """Every draw follows from `seed`, `place`, and the indices of the episode and the turn."""
    group_size: int
    temperature: float
    held_out: Mapping[str, Collection[str]] = field(default_factory=dict)
    """See `Collector.collect`."""


class TaskRedraw:
    """The task of a group, drawn again while its key is held out.

    The next seed follows from the last one, so all episodes of a group find the same task in any
    order. Only the first episode that meets a held-out task draws; the others follow.
    """

    def __init__(self, task: Task, held_out: Collection[str]) -> None:
        self.task, self.count, self._held_out = task, 0, held_out

    def __call__(self, task: Task, reset: ResetInfo) -> Task | None:
        """See `gspo_env.rollout.play.Redraw`."""
        if reset.task_key not in self._held_out:
            return None
        if task == self.task:
            self.count += 1
            if self.count >= _MAX_REDRAWS:
                options = f" with options {dict(task.options)}" if task.options else ""
                raise RolloutError(
                    f"{task.env_id}: the last {_MAX_REDRAWS} tasks drawn{options} are held out for "
                    "evaluation; expected a task to train on, so lower eval_tasks or add tasks"
                )
            self.task = replace(task, seed=derive_seed("redraw", task.seed) % HELD_OUT)
        return self.task


@dataclass(slots=True)
class Collector:
    """Collects episodes of one environment, or of several, through one engine."""

    engine: Engine
    chat: ChatTokenizer
    pool: EnvPool | EnvPools
    config: RolloutConfig
    vocab_size: int | None = None
    """Number of ids of the model, which bounds what an engine may return; None if unknown."""
    stall_seconds: float = STALL_SECONDS
    """Seconds without progress after which the log says what the episodes wait for."""
    progress: Progress = field(default_factory=Progress)
    """What the episodes in flight wait for."""
    policy: Callable[..., EnginePolicy] = EnginePolicy
    """Makes the policy of an episode."""
    weights_ready: asyncio.Event = field(default_factory=lambda: _set_event())
    """Unset while the engine takes new weights: episodes wait with their next action."""
    on_group: Callable[[], None] | None = None
    """Called after each group that `collect` plays."""
    counter: Any = None
    """Shows how many episodes are over."""
    _heartbeat: Heartbeat = field(init=False)
    _warned: bool = False
    """Whether the log has said that first prompts do not fit."""

    def __post_init__(self) -> None:
        """Lets stalls be logged."""
        self._heartbeat = Heartbeat(self.idle, self.describe, self.stall_seconds)

    def idle(self) -> float:
        """Returns the seconds since an episode last made progress, as far as it is known."""
        return self.progress.idle()

    def describe(self) -> str:
        """Returns what the episodes in flight wait for."""
        return self.progress.describe()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the workers, if any, since their start."""
        return {}

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Gives the engine the learner's weights while episodes are in flight.

        An engine that can changes them between two tokens. Otherwise actions that are being sampled
        finish with the old weights, and the next ones wait for the new.

        Args:
            named_tensors: See `Engine.update_weights`.
            version: See `Engine.update_weights`.

        Raises:
            EngineError: An action was sampled for minutes.
        """
        if self.engine.updates_in_flight:
            await self.engine.update_in_flight(named_tensors, version)
            return
        self.weights_ready.clear()
        try:
            await self.engine.update_weights(named_tensors, version)
        finally:
            self.weights_ready.set()

    async def collect(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        group_size: int | None = None,
        temperature: float | None = None,
        held_out: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> list[Group]:
        """Samples a group of episodes for each task.

        Args:
            tasks: The tasks.
            seed: Every draw follows from it and from the indices of the task, episode and turn.
            group_size: Episodes per task; the config's by default.
            temperature: Sampling temperature; the config's by default, 0 is greedy.
            held_out: Keys of tasks that are not played, by environment: a group whose task has one
                of them plays another task, whose seed follows from the task's seed.

        Raises:
            RolloutError: More episodes than `max_env_error_rate` failed in their environment, too
                many environments hang, or no task without a held-out key was found.
            EnvironmentContractError: Episodes of one task have different keys.
        """
        requests = [
            RolloutRequest(
                task=task,
                seed=seed,
                place=place,
                group_size=group_size or self.config.group_size,
                temperature=self.config.temperature if temperature is None else temperature,
                held_out=held_out,
            )
            for place, task in enumerate(tasks)
        ]
        return await self._play_all(requests)

    async def collect_evaluation(
        self, tasks: Sequence[Task], *, seed: int
    ) -> tuple[list[Group], list[Group]]:
        """Plays each task once sampled and once greedily, all at the same time.

        Args:
            tasks: The tasks.
            seed: See `collect`.

        Raises:
            RolloutError: See `collect`.
            EnvironmentContractError: See `collect`.
        """
        # the two episodes of a task are neighbours, because they have the same prompt
        requests = [
            RolloutRequest(task=task, seed=seed, place=place, group_size=1, temperature=temperature)
            for place, task in enumerate(tasks)
            for temperature in (self.config.temperature, 0.0)
        ]
        groups = await self._play_all(requests)
        return groups[::2], groups[1::2]

    async def _play_all(self, requests: Sequence[RolloutRequest]) -> list[Group]:
        in_flight = asyncio.Semaphore(self.config.concurrency)
        if self.counter is not None:
            self.counter.expect(sum(request.group_size for request in requests))
        async with first_error(), asyncio.TaskGroup() as running:
            playing = [
                running.create_task(self.play_group(request, in_flight)) for request in requests
            ]
            if (on_group := self.on_group) is not None:
                for task in playing:
                    task.add_done_callback(lambda _: on_group())
        groups = [task.result() for task in playing]
        self.check(groups)
        return groups

    async def play_group(self, request: RolloutRequest, in_flight: asyncio.Semaphore) -> Group:
        """Plays the episodes of one group; `check` then judges the groups of a batch.

        Args:
            request: The group.
            in_flight: Limits the episodes in flight.

        Raises:
            RolloutError: Too many environments hang, or no task without a held-out key was found.
            EnvironmentContractError: Episodes of the task have different keys.
        """
        held_out = request.held_out.get(request.task.env_id, ())
        redraw, seconds = TaskRedraw(request.task, held_out), 0.0
        clock = asyncio.get_running_loop().time

        async def play_one(index: int) -> Episode:
            nonlocal seconds
            async with in_flight:
                started = clock()
                seed = derive_seed(request.seed, request.place, index)
                episode = await self._episode(redraw, seed, request.temperature)
                seconds += clock() - started
                if self.counter is not None:
                    self.counter.add(episode)
                return episode

        with self._heartbeat.watching():
            async with first_error(), asyncio.TaskGroup() as running:
                playing = [running.create_task(play_one(g)) for g in range(request.group_size)]
        episodes = tuple(task.result() for task in playing)
        for episode in episodes:
            if episode.turns and episode.task != redraw.task:
                raise EnvironmentContractError(
                    f"{redraw.task.env_id}: two resets with seed {episode.task.seed} had different "
                    "task keys; expected one task_key for each seed and options."
                )
        count = redraw.count if held_out else None
        group = Group(task=redraw.task, episodes=episodes, redrawn=count, seconds=seconds)
        return await self.pool.of(group.task.env_id).score(group, self.config.episode_timeout)

    def check(self, groups: Sequence[Group]) -> None:
        """Checks the groups of a batch.

        Raises:
            RolloutError: More episodes than `max_env_error_rate` failed in their environment.
        """
        episodes = [episode for group in groups for episode in group.episodes]
        limits = self.config
        refuse_failures(episodes, limits.max_env_error_rate)
        unfit = sum(not e.turns and e.stop_reason is StopReason.MAX_CONTEXT for e in episodes)
        if unfit and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d episodes ended before their first turn, because their prompts do not fit "
                "into rollout.max_context %d with rollout.max_turn_tokens %d: raise max_context or "
                "lower max_turn_tokens",
                *(unfit, len(episodes), limits.max_context, limits.max_turn_tokens),
            )

    async def _episode(self, redraw: TaskRedraw, seed: int, temperature: float) -> Episode:
        """Plays an episode; if its environment fails, again in another one.

        Only the last retry has other random numbers, in case the failure follows from the actions.
        Other numbers in each retry would favour episodes with fewer calls, because they fail less
        often.
        """
        retries = self.config.max_retries

        async def play_once(number: int) -> Episode:
            is_last = 0 < number == retries
            attempt_seed = derive_seed(seed, "retry", number) if is_last else seed
            waiting = self.progress.begin(redraw.task)
            policy = self.policy(self, waiting, attempt_seed, temperature)
            try:
                return await play_pooled(
                    self.pool,
                    redraw.task,
                    policy,
                    max_turns=self.config.max_turns,
                    timeout=self.config.episode_timeout,
                    redraw=redraw,
                    count=policy.count,
                )
            finally:
                policy.release()
                self.progress.end(waiting)

        return await play_again(play_once, retries, self.pool.faults)


@settings
class RolloutPlugin:
    """Base class of what changes how episodes are played: `compaction` and `branching`.

    Its defaults, the choice `none` of both, change nothing.
    """

    def check(self, config: Any, chat: ChatTokenizer) -> None:
        """Rejects settings of a run that do not go with it, before the run begins."""

    def check_episode(self, env: TextEnvironment, episode: Episode) -> None:
        """Rejects an environment, by an episode of it that is played before the run begins."""

    def wrap(self, collector: Collector) -> Collector:
        """Returns what plays the episodes: with `branching` those of training only."""
        return collector

    def episodes(self, groups: Sequence[Group]) -> float:
        """Returns how many episodes were played; one may count in part."""
        return float(sum(len(group.episodes) for group in groups))

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns the metrics of the groups of a step; they replace others of the same name."""
        return {}


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """Raises the first of a group of errors."""
    try:
        yield
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
