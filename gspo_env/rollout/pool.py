"""Pools of reused environments, and episodes that are played in them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.errors import EnvironmentHangError, RolloutError
from gspo_env.rollout.failures import (
    EnvironmentFailed,
    FaultLog,
    close_quietly,
    describe,
    failed_episode,
)
from gspo_env.rollout.play import Policy, play, run_now
from gspo_env.runtime.loops import ActiveTimeout, has_async
from gspo_env.runtime.threads import EnvThread, attempt, log_once
from gspo_env.types import Episode, Fault, Group, StopReason, Task

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seat:
    """One environment and the thread that runs its calls."""

    env: TextEnvironment
    thread: EnvThread | None = None
    threaded: bool = False
    """Whether all calls run in the thread, and not only the steps for which `blocks` is true."""


@dataclass(slots=True)
class EnvPool:
    """Environments of one kind, which are made once and reset for every episode.

    Environments that declare `blocking = False` run on the event loop, without overhead, unless
    they have `async def` methods or tools. Every other one is made, used and closed in its own
    thread. A thread that never returns is abandoned and ends with the process.
    """

    make: Callable[[], TextEnvironment]
    sample: TextEnvironment | None = None
    """An environment of the same kind, whose declarations are read; by default the first one."""
    blocking: bool | None = None
    """The environments' own `blocking`."""
    isolated: bool = False
    """Whether each environment runs in a child process, whose start has its own time limit."""
    max_stuck: int = 64
    """Threads that may hang at the same time."""
    close_timeout: float = 10.0
    """Seconds that `close` waits for the environments."""
    faults: FaultLog = field(default_factory=FaultLog)
    group_reward: Callable[[Group], Awaitable[Group]] | None = None
    """The environments' own `group_reward`."""
    _declared: bool = False
    """Whether `blocking` is known."""
    _first: asyncio.Event | None = None
    """Set when the first environment is made, whose declarations the others wait for."""
    _idle: list[TextEnvironment] = field(default_factory=list)
    _seats: dict[int, _Seat] = field(default_factory=dict)
    _closing: list[Future[Any]] = field(default_factory=list)
    """The running calls of `close`."""
    _stuck: list[EnvThread] = field(default_factory=list)
    """Threads that have not returned from a call."""

    def __post_init__(self) -> None:
        """Reads the declarations of the sample."""
        if self.sample is not None:
            self.isolated = isinstance(self.sample, IsolatedEnv)
            self._read(self.sample)

    def of(self, env_id: str) -> EnvPool:
        """Returns the pool of an environment, which is this one for every id."""
        return self

    async def acquire(self, timeout: float | None = None) -> TextEnvironment:
        """Returns an environment that is not in use.

        Args:
            timeout: Seconds that it may take to make one. An environment in a child process has
                its own limit, which allows for the start of the process.

        Raises:
            EnvironmentFailed: A new one could not be made.
        """
        while self._first is not None:
            await self._first.wait()
        if self._declared:
            return self._idle.pop() if self._idle else await self._new(timeout)
        self._first = asyncio.Event()
        try:
            return await self._new(timeout)
        finally:
            self._first.set()
            self._first = None

    async def _new(self, timeout: float | None) -> TextEnvironment:
        thread = None if self.blocking is False else EnvThread()
        timeout = None if self.isolated else timeout
        try:
            env = attempt(self.make) if thread is None else await self._make_in(thread, timeout)
            if not self._declared:
                self._read(env)
            if thread is not None and self.blocking is False:  # it has to live on the event loop
                await thread.call(close_quietly, env)
                thread.stop()
                thread, env = None, attempt(self.make)
        except Exception as error:
            if thread is not None:
                thread.stop()
            raise EnvironmentFailed(describe("making the environment", error)) from error
        self._seats[id(env)] = _Seat(env, thread, thread is not None)
        return env

    async def _make_in(self, thread: EnvThread, timeout: float | None) -> TextEnvironment:
        making = thread.submit(self.make)
        try:
            async with ActiveTimeout(timeout):
                env: TextEnvironment = await asyncio.wrap_future(making)
        except (asyncio.CancelledError, TimeoutError) as error:
            if making.done() and not making.cancelled():
                raise  # the environment's own TimeoutError
            thread.submit(lambda: close_quietly(making.result()))  # if it ever returns
            thread.stop()
            self._stuck.append(thread)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EnvironmentHangError(f"__init__() has not returned in {timeout:g} s") from error
        return env

    def give_back(self, env: TextEnvironment) -> None:
        """Puts an environment back for the next episode."""
        self._idle.append(env)

    def discard(self, env: TextEnvironment, *, stuck: bool = False) -> None:
        """Closes an environment that is not used again.

        Args:
            env: The environment.
            stuck: Whether its thread has not returned from a call.

        Raises:
            RolloutError: More than `max_stuck` threads hang.
        """
        if stuck and isinstance(env, IsolatedEnv):
            env.kill()  # its thread returns at once
            stuck = False
        if (seat := self._seats.pop(id(env), None)) is not None:
            self._close(seat, stuck)
        self._stuck = [thread for thread in self._stuck if thread.alive]
        if len(self._stuck) > self.max_stuck:
            raise RolloutError(
                f"{len(self._stuck)} environments hang, each in a thread that cannot be ended; "
                f"expected at most {self.max_stuck}: give their calls time limits of their own, or "
                'set rollout.isolation to "process"'
            )

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of an environment, or a function with an environment as first argument.

        It runs in the environment's thread, or on the event loop if it does not block.
        """
        env = getattr(function, "__self__", args[0] if args else None)
        seat = self._seats.get(id(env))
        if seat is None or not (seat.threaded or _blocks(function, args)):
            return attempt(function, *args, **kwargs)
        seat.thread = seat.thread or EnvThread()
        return await seat.thread.call(function, *args, **kwargs)

    def close(self) -> None:
        """Closes every environment; waits at most `close_timeout` seconds for them."""
        self._idle.clear()
        while self._seats:
            self._close(self._seats.popitem()[1])
        deadline = time.monotonic() + self.close_timeout
        for future in self._closing:
            with contextlib.suppress(TimeoutError):
                future.exception(max(0.0, deadline - time.monotonic()))
        late = sum(not future.done() for future in self._closing)
        if late:
            logger.warning(
                "%d environments have not closed within %g s and are left", late, self.close_timeout
            )
        self._closing.clear()
        self.faults.summarise()

    def _read(self, env: TextEnvironment) -> None:
        self._declared, self.group_reward = True, attribute(env, "group_reward", None)
        if self.blocking is None and not has_async(
            type(env.unwrapped), attribute(env, "tools", ())
        ):
            self.blocking = attribute(env, "blocking", None)

    def _close(self, seat: _Seat, stuck: bool = False) -> None:
        """Closes an environment where it lives."""
        if seat.thread is None or not (seat.threaded or stuck):
            close_quietly(seat.env)
        else:
            self._closing = [future for future in self._closing if not future.done()]
            self._closing.append(seat.thread.submit(close_quietly, seat.env))
        if seat.thread is not None:
            seat.thread.stop()
            if stuck:
                self._stuck.append(seat.thread)


@dataclass(frozen=True, slots=True)
class EnvPools:
    """The pools of several environments, by the `env_id` of their tasks."""

    pools: Mapping[str, EnvPool]
    faults: FaultLog = field(default_factory=FaultLog)
    """Counts the failures in all of them."""

    def of(self, env_id: str) -> EnvPool:
        """Returns the pool of an environment.

        Raises:
            RolloutError: There is none.
        """
        try:
            return self.pools[env_id]
        except KeyError:
            raise RolloutError(
                f"a task has the env_id {env_id!r}; expected one of {', '.join(self.pools)}"
            ) from None

    def close(self) -> None:
        """Closes every environment; a pool waits at most its `close_timeout`."""
        for pool in self.pools.values():
            pool.close()


def _blocks(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Returns whether the environment declares that this step may take long."""
    env = getattr(function, "__self__", None)
    if env is None or not args or function.__name__ != "step":
        return False
    return bool(attribute(env, "blocks", lambda action: False)(*args))


async def play_again(
    attempt: Callable[[int], Awaitable[Episode]], retries: int, log: FaultLog
) -> Episode:
    """Plays an episode until its environment does not fail, or `retries` times more.

    Args:
        attempt: Plays the episode; its argument is the number of previous attempts.
        retries: Attempts after the first one.
        log: Counts the failures.
    """
    faults: tuple[Fault, ...] = ()
    for number in range(retries + 1):
        episode = await attempt(number)
        if faults:
            episode = replace(episode, retried=faults)
        if not episode.failed:
            break
        faults = episode.faults
        log.note(episode.task, faults[-1])
    return episode


async def play_pooled(
    pools: EnvPool | EnvPools, task: Task, policy: Policy, *, timeout: float, **limits: Any
) -> Episode:
    """Plays one episode in an environment of a pool.

    An environment that fails leaves the pool, and so does that of an episode that is cancelled.

    Args:
        pools: The pool, or one for each environment.
        task: See `play`; its `env_id` names the environment.
        policy: See `play`.
        timeout: Seconds after which the episode is cut, and seconds that a new environment may
            take.
        limits: Further arguments of `play`.
    """
    pool = pools.of(task.env_id)
    try:
        env = await pool.acquire(timeout)
    except EnvironmentFailed as failure:
        return failed_episode(task, failure.fault)
    try:
        episode = await play(env, task, policy, timeout=timeout, call=pool.call, **limits)
    except asyncio.CancelledError:
        with contextlib.suppress(RolloutError):  # the next failure reports that too many hang
            pool.discard(env, stuck=True)
        raise
    if episode.failed:
        pool.discard(env, stuck=episode.stop_reason is StopReason.ENV_TIMEOUT)
        return episode
    if not episode.ending.ended:
        await pool.call(_abandon, env)
    pool.give_back(env)
    return episode


def _abandon(env: TextEnvironment) -> None:
    """Tells an environment that its episode was cut; an exception is logged."""
    try:
        attempt(attribute(env, "abandon", lambda: None))
    except Exception as error:
        log_once("abandon()", error)


def play_alone(
    env: TextEnvironment,
    task: Task,
    policy: Policy,
    log: FaultLog,
    *,
    max_turns: int | None = None,
    retries: int = 2,
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

    async def attempt_once(number: int) -> Episode:
        episode = await play(env, task, policy, max_turns=max_turns)
        if episode.failed:
            close_quietly(env)
        return episode

    return run_now(play_again(attempt_once, retries, log))
