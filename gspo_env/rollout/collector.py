"""Rollout: one asyncio task an episode, many episodes at once, no barrier between turns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_env.engines.base import Completion, Engine, Sampling
from gspo_env.env.base import (
    Action,
    TextEnvironment,
    check_parts,
    check_reset,
    check_step,
    check_tokens,
)
from gspo_env.errors import EnvironmentContractError, RolloutError
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.rollout.transcript import ChatTokenizer
from gspo_env.seeding import derive_seed
from gspo_env.types import Episode, Group, StopReason, Task, Timing, Turn

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Collector:
    """Collects episodes of one environment through one engine."""

    engine: Engine
    chat: ChatTokenizer
    pool: EnvPool
    config: RolloutConfig

    async def collect(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        group_size: int | None = None,
        temperature: float | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Group]:
        """Samples a group of episodes for each task.

        Args:
            tasks: What to play.
            seed: Decides every draw, with the task's place, the episode's place and the turn.
            group_size: Episodes a task; the config's by default.
            temperature: Sampling temperature; the config's by default, 0 is greedy.
            on_episode: Called as each episode ends.

        Raises:
            RolloutError: More than half of the episodes failed in their environment.
            EnvironmentContractError: An environment broke the contract.
        """
        size = group_size or self.config.group_size
        heat = self.config.temperature if temperature is None else temperature
        gate = asyncio.Semaphore(self.config.concurrency)

        async def play(place: int, task: Task, member: int) -> Episode:
            async with gate:
                episode = await self._episode(task, derive_seed(seed, place, member), heat)
            if on_episode is not None:
                on_episode(episode)
            return episode

        try:
            async with asyncio.TaskGroup() as running:
                jobs = [
                    [running.create_task(play(p, task, g)) for g in range(size)]
                    for p, task in enumerate(tasks)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        groups = [
            Group(task=task, episodes=tuple(job.result() for job in row))
            for task, row in zip(tasks, jobs, strict=True)
        ]
        _refuse_failures([e for group in groups for e in group.episodes])
        return groups

    async def _episode(self, task: Task, seed: int, temperature: float) -> Episode:
        play = _Play(self, task, seed, temperature)
        try:
            async with asyncio.timeout(self.config.episode_timeout):
                await play.run()
        except TimeoutError:
            if play.error is None and play.stop is None:
                play.stop = StopReason.TIMEOUT
        finally:
            self.engine.release(play.session)
        return play.episode()


def _refuse_failures(episodes: list[Episode]) -> None:
    failed = [e for e in episodes if e.stop_reason is StopReason.ERROR]
    if 2 * len(failed) > len(episodes):
        raise RolloutError(
            f"{len(failed)} of {len(episodes)} episodes failed in their environment; "
            f"the first said: {failed[0].error}"
        )


class _Play:
    """The state of one running episode."""

    def __init__(self, collector: Collector, task: Task, seed: int, temperature: float) -> None:
        self.collector, self.task, self.seed = collector, task, seed
        self.temperature = temperature
        self.session = f"{task.env_id}:{task.seed}:{seed}"
        self.turns: list[Turn] = []
        self.prompt: list[int] = []
        self.stop: StopReason | None = None
        self.error: str | None = None
        self.observation = ""
        self.info: Mapping[str, Any] = {}

    async def run(self) -> None:
        pool = self.collector.pool
        env = pool.acquire()
        finished = False
        try:
            await self._play(env)
            finished = True
        except EnvironmentContractError:
            raise
        except _EnvironmentFailed as failure:
            self.stop, self.error = StopReason.ERROR, str(failure)
            logger.error("episode of %s (seed %d): %s", self.task.env_id, self.task.seed, failure)
        finally:
            # an environment that failed or is still running in a thread is not used again
            if finished:
                pool.give_back(env)

    async def _play(self, env: TextEnvironment) -> None:
        reset = await self._call(env.reset, seed=self.task.seed, options=dict(self.task.options))
        self.observation, self.info = check_reset(self.task.env_id, reset)
        chat, limits = self.collector.chat, self.collector.config
        history = self.info.get("chat_history", ())
        new = chat.start(self.observation, *instructions(env), history)
        while True:
            self.prompt.extend(new)
            if len(self.prompt) + limits.max_turn_tokens > limits.max_context:
                self.stop = StopReason.MAX_CONTEXT
                return
            completion, seconds = await self._act()
            await self._turn(env, new, completion, seconds)
            if self.stop is None and len(self.turns) >= limits.max_turns:
                self.stop = StopReason.MAX_TURNS
            if self.stop is not None:
                return
            self.prompt.extend(completion.token_ids)
            role = str(self.info.get("observation_role", "user"))
            new = chat.follow(self.observation, completion.token_ids[-1], role)

    async def _act(self) -> tuple[Completion, float]:
        started = time.perf_counter()
        sampling = Sampling(
            max_tokens=self.collector.config.max_turn_tokens,
            temperature=self.temperature,
            stop_ids=self.collector.chat.stop_ids,
            seed=derive_seed(self.seed, len(self.turns)),
        )
        completion = await self.collector.engine.generate(self.prompt, sampling, self.session)
        return completion, time.perf_counter() - started

    async def _turn(
        self, env: TextEnvironment, new: tuple[int, ...], completion: Completion, seconds: float
    ) -> None:
        text = Action(self.collector.chat.decode(completion.token_ids), completion.token_ids)
        before, reward, step_seconds = self.observation, 0.0, 0.0
        key = self.info.get("state_key")
        seen: Mapping[str, Any] = {}  # nothing where the environment did not see the action
        if completion.finish_reason == "length":
            self.stop = StopReason.MAX_TURN_TOKENS
        else:
            started = time.perf_counter()
            result = await self._call(env.step, text)
            step_seconds = time.perf_counter() - started
            step = check_step(self.task.env_id, result)
            check_tokens(self.task.env_id, step[4], len(completion.token_ids))
            check_parts(self.task.env_id, step[4])
            self.observation, reward, terminated, truncated, self.info = step
            seen = self.info
            if terminated:
                self.stop = StopReason.TERMINATED
            elif truncated:
                self.stop = StopReason.TRUNCATED
        turn = Turn(
            prompt_ids=new,
            action_ids=completion.token_ids,
            logprobs=completion.logprobs,
            text=str(text),
            observation=before,
            reward=reward,
            info=seen,
            timing=Timing(generate=seconds, step=step_seconds),
            weights_version=completion.weights_version,
            state_key=None if key is None else str(key),
        )
        self.turns.append(turn)

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return await self.collector.pool.call(function, *args, **kwargs)
        except EnvironmentContractError:
            raise
        except Exception as error:
            raise _EnvironmentFailed(f"{type(error).__name__}: {error}") from error

    def episode(self) -> Episode:
        stop = self.stop or StopReason.ERROR
        ended = stop in (StopReason.TERMINATED, StopReason.TRUNCATED)
        total = float(sum(turn.reward for turn in self.turns))
        outcome = float(self.info.get("episodic_reward", total)) if ended else total
        if not np.isfinite(outcome):
            raise EnvironmentContractError(
                f"{self.task.env_id}: info['episodic_reward'] is {outcome!r}; "
                "expected a finite number"
            )
        if not ended:
            outcome = min(outcome, 0.0) if "episodic_reward" in self.info else outcome
        success = bool(self.info.get("success", outcome > 0)) if ended else False
        return Episode(
            task=self.task,
            turns=tuple(self.turns),
            outcome=outcome,
            stop_reason=stop,
            terminated=stop is StopReason.TERMINATED,
            truncated=stop not in (StopReason.TERMINATED, StopReason.ERROR),
            error=self.error,
            success=success,
            final_observation=self.observation,
        )


class _EnvironmentFailed(Exception):
    """An environment raised; the message names its exception."""


def instructions(env: TextEnvironment) -> tuple[str | None, Sequence[Any]]:
    """The system prompt and the tools of an environment, through its wrappers."""
    system = (
        env.get_wrapper_attr("system_prompt") if env.has_wrapper_attr("system_prompt") else None
    )
    tools = env.get_wrapper_attr("tools") if env.has_wrapper_attr("tools") else ()
    return system, tools
