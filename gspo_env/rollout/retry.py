"""Plays episodes again whose environment failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.errors import RolloutError
from gspo_env.rollout.failures import (
    EnvironmentFailed,
    FaultLog,
    close_quietly,
    failed_episode,
)
from gspo_env.rollout.play import ENDED, Policy, play, play_now
from gspo_env.rollout.pool import EnvPool, EnvPools
from gspo_env.runtime.threads import attempt, foreign
from gspo_env.types import Episode, Fault, StopReason, Task

logger = logging.getLogger(__name__)

RETRIES = 2
"""Default of the number of times that an episode is played again."""


async def play_again(
    attempt: Callable[[int], Awaitable[Episode]], retries: int, log: FaultLog
) -> Episode:
    """Plays an episode until its environment does not fail, or `retries` times more.

    Args:
        attempt: Plays the episode; its argument is the number of attempts before.
        retries: Attempts after the first one.
        log: Counts the failures.
    """
    faults: tuple[Fault, ...] = ()
    for number in range(retries + 1):
        episode = await attempt(number)
        if not episode.failed:
            break
        faults += episode.faults
        log.note(episode.task, episode.faults[0])
    return replace(episode, faults=faults) if faults else episode


async def play_pooled(
    pool: EnvPool | EnvPools, task: Task, policy: Policy, *, timeout: float, **limits: Any
) -> Episode:
    """Plays one episode in an environment of a pool.

    An environment that fails leaves the pool, and so does that of an episode that is cancelled.

    Args:
        pool: The pool, or one for each environment.
        task: See `play`; its `env_id` names the environment.
        policy: See `play`.
        timeout: Seconds after which the episode is cut, and seconds that a new environment may
            take.
        limits: Further arguments of `play`.
    """
    pool = pool.of(task.env_id)
    try:
        env = await pool.acquire(timeout)
    except EnvironmentFailed as failure:
        return failed_episode(task, failure.fault)
    try:
        episode = await play(
            env,
            task,
            policy,
            timeout=timeout,
            call=pool.call,
            gives_outcome=pool.gives_outcome,
            **limits,
        )
    except asyncio.CancelledError:
        with contextlib.suppress(RolloutError):  # that too many hang is said by the next failure
            pool.discard(env, stuck=True, patience=timeout)
        raise
    if episode.failed:
        pool.discard(env, stuck=episode.stop_reason is StopReason.ENV_TIMEOUT)
        return episode
    if episode.stop_reason not in ENDED:
        await pool.call(_abandon, env)
    pool.give_back(env)
    return episode


def _abandon(env: TextEnvironment) -> None:
    """Tells an environment that its episode was cut; an exception is logged."""
    try:
        attempt(attribute(env, "abandon", lambda: None))
    except Exception as error:
        told = foreign(error)
        logger.warning("abandon() raised %s: %s (%s)", told.name, told.text, told.where)


def play_alone(
    env: TextEnvironment,
    task: Task,
    policy: Policy,
    log: FaultLog,
    *,
    max_turns: int | None = None,
    retries: int = RETRIES,
) -> Episode:
    """Plays one episode without an event loop; an environment that fails is closed and reset.

    Args:
        env: The environment.
        task: See `play`.
        policy: See `play_now`.
        log: Counts the failures.
        max_turns: See `play`.
        retries: Attempts after the first one.
    """
    faults: tuple[Fault, ...] = ()
    for _ in range(retries + 1):
        episode = play_now(env, task, policy, max_turns=max_turns)
        if not episode.failed:
            break
        faults += episode.faults
        log.note(task, episode.faults[0])
        close_quietly(env)
    return replace(episode, faults=faults) if faults else episode
