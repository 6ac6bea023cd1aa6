"""Rollout: one asyncio task per episode, without a barrier between turns."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.engines.base import (
    Engine,
    NamedTensors,
)
from gspo_env.rollout.draw import TaskRedraw
from gspo_env.rollout.failures import refuse_failures
from gspo_env.rollout.play import ENDED, conclude
from gspo_env.rollout.policy import EnginePolicy
from gspo_env.rollout.pool import EnvPool, EnvPools
from gspo_env.rollout.progress import Heartbeat, Waits
from gspo_env.rollout.retry import play_again, play_pooled
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.rollout.stragglers import EpisodeDurations
from gspo_env.seeding import derive_seed
from gspo_env.types import Episode, Group, Task

logger = logging.getLogger(__name__)


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
    straggler_quantile: float = 1.0
    """See `gspo_env.rollout.SupplyConfig.straggler_quantile`."""


@dataclass(slots=True)
class Collector:
    """Collects episodes of one environment, or of several, through one engine."""

    engine: Engine
    chat: ChatTokenizer
    pool: EnvPool | EnvPools
    config: RolloutConfig
    vocab_size: int | None = None
    """Number of ids of the model, which bounds what an engine may return; None if unknown."""
    _unfit: list[int] = field(default_factory=list)
    """Tokens of each first prompt that does not fit, since the last batch."""
    _said: bool = False
    _inferred: set[str] = field(default_factory=set)
    """Environments of which episodes have shown that they give outcomes."""
    _paces: dict[str, EpisodeDurations] = field(
        default_factory=lambda: defaultdict(EpisodeDurations)
    )
    """How long the last episodes of each environment took."""
    _weights_stay: asyncio.Event = field(default_factory=lambda: _set())
    """Unset while the engine takes new weights: episodes wait with their next action."""
    _waits: Waits = field(default_factory=Waits)
    _heartbeat: Heartbeat = field(init=False)

    def __post_init__(self) -> None:
        """Lets the log say who is waited for."""
        self._heartbeat = Heartbeat(self._waits.idle, self._waits.describe)

    def idle(self) -> float:
        """Returns the seconds since an episode came further, as far as it is known."""
        return self._waits.idle()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of those who play, since their start."""
        return {}

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Gives the engine the learner's weights while episodes go on.

        An engine that can changes them between two tokens. Otherwise the actions that are being
        sampled end with the old weights, and the next ones wait for the new.

        Args:
            named_tensors: See `Engine.update_weights`.
            version: See `Engine.update_weights`.

        Raises:
            EngineError: An action was sampled for minutes.
        """
        if self.engine.updates_in_flight:
            await self.engine.update_in_flight(named_tensors, version)
            return
        self._weights_stay.clear()
        try:
            await self.engine.update_weights(named_tensors, version)
        finally:
            self._weights_stay.set()

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
        heat = self.config.temperature if temperature is None else temperature
        groups = await self._play(self._jobs(tasks, seed, group_size, heat, held_out))
        return self.accept(groups)

    async def collect_both(
        self, tasks: Sequence[Task], *, seed: int
    ) -> tuple[list[Group], list[Group]]:
        """Plays each task once sampled and once greedily, at the same time.

        Args:
            tasks: The tasks.
            seed: See `collect`.

        Raises:
            RolloutError: See `collect`.
            EnvironmentContractError: See `collect`.
        """
        sampled = self._jobs(tasks, seed, 1, self.config.temperature)
        greedy = self._jobs(tasks, seed, 1, 0.0)
        # the two episodes of a task are neighbours, because they have the same prompt
        pairs = [job for pair in zip(sampled, greedy, strict=True) for job in pair]
        groups = self.accept(await self._play(pairs))
        return groups[::2], groups[1::2]

    def _jobs(
        self,
        tasks: Sequence[Task],
        seed: int,
        group_size: int | None,
        temperature: float,
        held_out: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> list[RolloutRequest]:
        return [
            RolloutRequest(
                task=task,
                seed=seed,
                place=p,
                group_size=group_size or self.config.group_size,
                temperature=temperature,
                held_out=held_out,
            )
            for p, task in enumerate(tasks)
        ]

    async def _play(self, jobs: Sequence[RolloutRequest]) -> list[Group]:
        gate = asyncio.Semaphore(self.config.concurrency)
        async with _one_error(), asyncio.TaskGroup() as running:
            played = [running.create_task(self.play(job, gate)) for job in jobs]
        return [group.result() for group in played]

    async def play(self, job: RolloutRequest, gate: asyncio.Semaphore) -> Group:
        """Plays the episodes of one group; `accept` then checks the groups of a batch.

        Args:
            job: The group.
            gate: Limits the episodes in flight.

        Raises:
            RolloutError: Too many environments hang, or no task without a held-out key was found.
            EnvironmentContractError: Episodes of the task have different keys.
        """
        draw = TaskRedraw(job.task, job.held_out.get(job.task.env_id, ()))
        clock, started = asyncio.get_running_loop().time, dict[int, float]()
        pace = self._paces[job.task.env_id]

        async def one(member: int) -> Episode:
            async with gate:
                started[member] = clock()
                seed = derive_seed(job.seed, job.place, member)
                try:
                    return await self._episode(draw, seed, job.temperature)
                finally:  # of one that is left out as well, or the limit would shrink
                    pace.seconds.append(clock() - started[member])

        with self._heartbeat.watching():
            async with _one_error(), asyncio.TaskGroup() as running:
                played = [running.create_task(one(g)) for g in range(job.group_size)]
                if job.straggler_quantile < 1:
                    await pace.leave_slowest(played, started, job.straggler_quantile)
        ended = [episode.result() for episode in played if not episode.cancelled()]
        return draw.group(ended, job.group_size)

    def accept(self, groups: list[Group]) -> list[Group]:
        """Returns the groups of a batch with their outcomes settled.

        Raises:
            RolloutError: More episodes than `max_env_error_rate` failed in their environment.
        """
        everything = [e for group in groups for e in group.episodes]
        refuse_failures(everything, self.config.max_env_error_rate)
        self._check_room(len(everything))
        self._unfit.clear()
        return self._settle(groups)

    async def _episode(self, draw: TaskRedraw, seed: int, temperature: float) -> Episode:
        """Plays an episode; if its environment fails, again in another one.

        Only the last retry has other random numbers, in case the failure follows from the actions.
        Other numbers in each retry would favour episodes with fewer calls, because they fail less
        often.
        """
        retries = self.config.max_retries

        async def attempt(number: int) -> Episode:
            last = 0 < number == retries
            own = derive_seed(seed, "retry", number) if last else seed
            return await self._attempt(draw, own, temperature)

        return await play_again(attempt, retries, self.pool.faults)

    async def _attempt(self, draw: TaskRedraw, seed: int, temperature: float) -> Episode:
        wait = self._waits.begin(draw.task)
        policy = EnginePolicy(self, wait, seed, temperature)
        try:
            episode = await play_pooled(
                self.pool,
                draw.task,
                policy,
                max_turns=self.config.max_turns,
                timeout=self.config.episode_timeout,
                redraw=draw,
            )
        finally:
            policy.release()
            self._waits.end(wait)
        if policy.unfit is not None:
            self._unfit.append(policy.unfit)
        return episode

    def _check_room(self, episodes: int) -> None:
        """Says once how many first prompts leave no room for an action."""
        if not self._unfit or self._said:
            return
        self._said = True
        limits = self.config
        room = limits.max_context - limits.max_turn_tokens
        least, most = min(self._unfit), max(self._unfit)
        lengths = f"{least} tokens" if least == most else f"{least} to {most} tokens"
        logger.warning(
            f"{len(self._unfit)} of {episodes} episodes ended before their first turn, because "
            f"their prompts have {lengths} and rollout.max_context {limits.max_context} less "
            f"rollout.max_turn_tokens {limits.max_turn_tokens} leaves {room}: raise max_context or "
            "lower max_turn_tokens"
        )

    def _settle(self, groups: list[Group]) -> list[Group]:
        """Infers whether the environment gives outcomes, if it does not declare this.

        Only episodes that the environment itself finished count, not those that were cut. Groups
        that are played ahead may have begun before it was known, so later ones are settled as well.
        """
        for env_id in {group.task.env_id for group in groups}:
            pool = self.pool.of(env_id)
            own = [group for group in groups if group.task.env_id == env_id]
            if pool.gives_outcome is None and _gives_outcome(pool, own):
                self._inferred.add(env_id)
            if env_id in self._inferred:
                groups = [_settled(g, pool) if g.task.env_id == env_id else g for g in groups]
        return groups


def _gives_outcome(pool: EnvPool, groups: Sequence[Group]) -> bool:
    """Returns whether an episode has an outcome of its own; notes what the episodes show."""
    ended = [e for g in groups for e in g.episodes if e.stop_reason in ENDED]
    given = any(e.turns and e.turns[-1].info.episodic_reward is not None for e in ended)
    if given or any(e.terminated for e in ended):
        pool.gives_outcome = given
    return given


def _settled(group: Group, pool: EnvPool) -> Group:
    episodes = []
    for e in group.episodes:
        outcome, success = conclude(e.turns, e.stop_reason, True, pool.outcome_if_cut)
        episodes.append(replace(e, outcome=outcome, success=success))
    return replace(group, episodes=tuple(episodes))


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@asynccontextmanager
async def _one_error() -> AsyncIterator[None]:
    """Raises the first of a group of errors."""
    try:
        yield
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
