"""Pools of reused environments, and episodes that are played in them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gspo_env.env.base import TextEnvironment, attribute, overrides
from gspo_env.env.registration import Member, make_env
from gspo_env.errors import EnvironmentContractError, RolloutError
from gspo_env.rollout.failures import (
    EnvironmentFailed,
    FaultLog,
    close_quietly,
    failed_episode,
    limited,
    lose_unscored,
    lost,
)
from gspo_env.rollout.play import Policy, play, run_now
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runtime.loops import call_for, has_async, run_in_daemon
from gspo_env.runtime.threads import EnvThread, call_env
from gspo_env.types import Episode, Fault, Group, StopReason, Task

logger = logging.getLogger(__name__)

_PATIENCE = 1.0
"""Seconds that the event loop waits for a call of an environment with `limits_steps`."""


def make_member(member: Member, limits: RolloutConfig) -> TextEnvironment:
    """Makes an environment of a run, in a process of its own if the settings say so."""
    if limits.isolation == "process":
        from gspo_env.env.isolated import IsolatedEnv

        return IsolatedEnv(member.spec, dict(member.kwargs), limits.episode_timeout)
    return make_env(member.spec, **member.kwargs)


@dataclass(slots=True)
class _Seat:
    """One environment and the thread that runs its calls."""

    env: TextEnvironment
    thread: EnvThread | None = None
    threaded: bool = False
    """Whether all calls run in the thread, and not only the steps for which `blocks` is true."""


def _killing(env: TextEnvironment) -> Callable[[], None] | None:
    """Returns what ends the process of an environment, if it has one of its own."""
    kill: Callable[[], None] | None = attribute(env, "kill_process", None)
    return kill


@dataclass(slots=True)
class EnvPool:
    """Environments of one kind, which are made once and reset for every episode.

    Environments that declare `blocking = False` run on the event loop, without overhead, unless
    they have `async def` methods or tools; only what may wait at the end of an episode (`abandon`,
    `group_reward`, `close`) has a thread. Every other one is made, used and closed in its own
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
    _first: asyncio.Event | None = None
    """Set when the first environment is made or has failed; the others wait for it."""
    _idle: list[TextEnvironment] = field(default_factory=list)
    _seats: dict[int, _Seat] = field(default_factory=dict)
    _closing: list[Future[Any]] = field(default_factory=list)
    """The calls of `close` that may still run."""
    _most: int = 1 << 30
    """How many environments may be lent at once."""
    _places: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=dict)
    """As many places in each event loop, of which one runs at a time."""
    _stuck: list[EnvThread] = field(default_factory=list)
    """Threads that have not returned from a call."""

    def __post_init__(self) -> None:
        """Reads the declarations of the sample."""
        if self.sample is not None:
            self.isolated = _killing(self.sample) is not None
            self._read(self.sample)

    @property
    def group_reward(self) -> Callable[[Any], Any] | None:
        """The environments' own `group_reward`, once there is one."""
        return None if self.sample is None else attribute(self.sample, "group_reward", None)

    def of(self, env_id: str) -> EnvPool:
        """Returns the pool of an environment, which is this one for every id."""
        return self

    @asynccontextmanager
    async def lease(self, timeout: float | None = None) -> AsyncIterator[TextEnvironment]:
        """Lends an environment; one whose use fails or is cancelled is not lent again.

        Args:
            timeout: Seconds that it may take to make one. An environment in a child process has
                its own limit, which allows for the start of the process.

        Raises:
            EnvironmentFailed: A new one could not be made, or its use failed.
            RolloutError: More than `max_stuck` threads hang.
        """
        await self._make_first(timeout)
        loop = asyncio.get_running_loop()
        async with self._places.setdefault(loop, asyncio.Semaphore(self._most)):
            env = self._idle.pop() if self._idle else await self._new(timeout)
            try:
                yield env
            except EnvironmentFailed as failure:
                self._discard(env, stuck=failure.fault.reason is StopReason.ENV_TIMEOUT)
                raise
            except BaseException:
                # the next failure reports that too many hang
                with contextlib.suppress(RolloutError):
                    self._discard(env, stuck=True)
                raise
            self._idle.append(env)

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of an environment, or a function with an environment as first argument.

        It runs in the environment's thread, or on the event loop if it does not block.
        """
        env = getattr(function, "__self__", args[0] if args else None)
        seat = self._seats.get(id(env))
        if seat is None or not (seat.threaded or _blocks(function, args)):
            if seat and attribute(seat.env, "limits_steps", False):
                return await self._call_soon(self._thread(seat), function, *args, **kwargs)
            return call_env(function, *args, **kwargs)
        return await self._thread(seat).call(function, *args, **kwargs)

    async def _call_soon(
        self, thread: EnvThread, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls in a thread, for which the event loop waits at first: the order is reproducible."""
        loop = asyncio.get_running_loop()
        future = thread.submit(call_for, loop, function, *args, **kwargs)
        with contextlib.suppress(TimeoutError):  # one of the call itself is raised again below
            return future.result(_PATIENCE)
        return await asyncio.wrap_future(future)

    async def abandon(self, env: TextEnvironment, timeout: float | None) -> None:
        """Tells an environment that its episode was cut.

        Raises:
            EnvironmentFailed: It raised, or did not return in time.
        """
        if overrides(env, "abandon"):
            async with limited("abandon()", timeout):
                thread = self._thread(self._seats[id(env)])
                await thread.call(env.get_wrapper_attr("abandon"))

    async def score(self, group: Group, timeout: float) -> Group:
        """Adds the rewards of the environments' `group_reward`, if they have one.

        If it raises or does not return in time, the episodes of the group count as lost; so do
        those that nothing has scored.
        """
        return lose_unscored(await self._reward(group, timeout), self.faults)

    async def _reward(self, group: Group, timeout: float) -> Group:
        reward = self.group_reward
        if reward is None:
            return group
        from gspo_env.env.scored import parse_scored

        try:
            if inspect.iscoroutinefunction(reward):
                async with limited("group_reward()", timeout):
                    return parse_scored(group, await reward(group))
            async with self.lease(timeout) as env, limited("group_reward()", timeout):
                thread = self._thread(self._seats[id(env)])
                scored = await thread.call(env.get_wrapper_attr("group_reward"), group)
                return parse_scored(group, await scored if inspect.isawaitable(scored) else scored)
        except EnvironmentFailed as failure:
            self.faults.note(group.task, failure.fault)
            episodes = (e if e.failed else lost(e, failure.fault) for e in group.episodes)
            return replace(group, episodes=tuple(episodes))

    def close(self) -> None:
        """Closes every environment; waits at most `close_timeout` seconds for them."""
        self._idle.clear()
        while self._seats:
            self._close(self._seats.popitem()[1])
        if late := wait(self._closing, self.close_timeout).not_done:
            logger.warning(
                "%d environments have not closed within %g s and are left",
                *(len(late), self.close_timeout),
            )
        self._closing.clear()
        self.faults.summarise()

    async def _make_first(self, timeout: float | None) -> None:
        """Makes the first environment, which says what holds for all, or waits until it is made."""
        if self.sample is None and self._first is None:
            self._first = asyncio.Event()
            try:
                self._idle.append(await self._new(timeout))
            finally:
                self._first.set()
        if self.sample is None and self._first is not None:
            await self._first.wait()

    async def _new(self, timeout: float | None) -> TextEnvironment:
        async with limited("__init__()", None if self.isolated else timeout):
            thread = None if self.blocking is False else EnvThread()
            env: TextEnvironment = await self._make_in(thread) if thread else call_env(self.make)
            if self.sample is None:
                self._read(env)
            if thread is not None and self.blocking is False:  # it has to live on the event loop
                await thread.call(close_quietly, env)
                thread.stop()
                env, thread = call_env(self.make), None
        self._seats[id(env)] = _Seat(env, thread, thread is not None)
        return env

    async def _make_in(self, thread: EnvThread) -> TextEnvironment:
        making = thread.submit(self.make)
        try:
            env: TextEnvironment = await asyncio.wrap_future(making)
        except BaseException:
            thread.submit(lambda: close_quietly(making.result()))  # if it ever returns
            thread.stop()
            self._stuck.append(thread)
            raise
        return env

    def _read(self, env: TextEnvironment) -> None:
        self.sample = env
        most = attribute(env, "max_copies", None)
        if most is not None and (type(most) is not int or most < 1):
            raise EnvironmentContractError(f"max_copies is {most!r}; expected at least 1, or None")
        self._most = most or self._most
        is_async = has_async(type(env.unwrapped), attribute(env, "tools", ()))
        if self.blocking is None and not is_async:
            self.blocking = attribute(env, "blocking", None)

    def _thread(self, seat: _Seat) -> EnvThread:
        seat.thread = seat.thread or EnvThread()
        return seat.thread

    def _discard(self, env: TextEnvironment, stuck: bool) -> None:
        if stuck and (kill := _killing(env)):
            kill()  # its thread returns at once
            stuck = False
        self._close(self._seats.pop(id(env)), stuck)
        self._stuck = [thread for thread in self._stuck if thread.alive]
        if len(self._stuck) > self.max_stuck:
            raise RolloutError(
                f"{len(self._stuck)} environments hang, each in a thread that cannot be ended; "
                f"expected at most {self.max_stuck}: give their calls time limits of their own, or "
                'set rollout.isolation to "process"'
            )

    def _close(self, seat: _Seat, stuck: bool = False) -> None:
        """Closes an environment in a thread: in its own, if all its calls run there."""
        thread, close = seat.thread, partial(close_quietly, seat.env)
        self._closing = [future for future in self._closing if not future.done()]
        if thread is not None and (seat.threaded or stuck):
            self._closing.append(thread.submit(close))
        else:
            self._closing.append(run_in_daemon(close, "close"))
        if thread is not None:
            thread.stop()
            if stuck:
                self._stuck.append(thread)


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
    play_once: Callable[[int], Awaitable[Episode]], retries: int, log: FaultLog
) -> Episode:
    """Plays an episode until its environment does not fail, or `retries` times more.

    Args:
        play_once: Plays the episode; its argument is the number of previous attempts.
        retries: Attempts after the first one.
        log: Counts the failures.
    """
    faults: tuple[Fault, ...] = ()
    for number in range(retries + 1):
        episode = await play_once(number)
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

    Args:
        pools: The pool, or one for each environment.
        task: See `play`; its `env_id` names the environment.
        policy: See `play`.
        timeout: Seconds after which the episode is cut, and seconds that a new environment may
            take.
        limits: Further arguments of `play`.
    """
    pool, episode = pools.of(task.env_id), None
    try:
        async with pool.lease(timeout) as env:
            episode = await play(env, task, policy, timeout=timeout, call=pool.call, **limits)
            if episode.ending.fault is not None:
                raise EnvironmentFailed(episode.ending.fault)
            if not episode.ending.ended:
                await pool.abandon(env, timeout)
    except EnvironmentFailed as failure:
        if episode is None:
            return failed_episode(task, failure.fault)
        if not episode.failed:  # it was played, and its environment failed afterwards
            pools.faults.note(episode.task, failure.fault)
    return episode


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

    async def play_once(number: int) -> Episode:
        episode = await play(env, task, policy, max_turns=max_turns)
        if episode.failed:
            close_quietly(env)
        return episode

    return run_now(play_again(play_once, retries, log))
