"""Plays groups in other processes: who gets which, who has died, and who is waited for."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gspo_env.distributed.worker import GroupRequest, Lines, WorkerStatus, from_bytes
from gspo_env.engines.vllm.requests import ServerAddress, ServerList
from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import Collector, RolloutRequest
from gspo_env.rollout.gate import Gate
from gspo_env.rollout.progress import SILENCE, Heartbeat
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Group

logger = logging.getLogger(__name__)

_BEAT = 1.0
"""Seconds between two questions to a worker."""


class WorkerDied(Exception):
    """The process of a worker has ended."""


class Handle(Protocol):
    """Reaches one worker."""

    async def play(self, order: GroupRequest) -> bytes:
        """Plays a group; see `gspo_env.distributed.worker.Worker.play`.

        Raises:
            WorkerDied: The worker has ended.
        """

    def beat(self, fleet: ServerList) -> Future[WorkerStatus]:
        """Asks the worker for a `WorkerStatus`."""

    def close(self) -> Future[Lines]:
        """Lets the worker close its environments; see `Worker.close`."""

    def why(self, error: BaseException) -> str:
        """Returns in one sentence why a call failed."""

    def kill(self, pid: int = 0) -> None:
        """Ends the worker; with the id of its process also one that does not answer."""


class ServesOthers(Protocol):
    """An engine on whose servers other processes sample."""

    @property
    def fleet(self) -> ServerList:
        """The servers."""

    def failed(self, address: ServerAddress, reason: str) -> None:
        """Stops using a server that failed another process."""


class _State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


@dataclass(slots=True)
class _Member:
    """One worker and its state."""

    number: int
    handle: Handle
    state: _State = _State.STARTING
    since: float = field(default_factory=time.monotonic)
    """When it was started."""
    answered: float = field(default_factory=time.monotonic)
    """When it last answered, or the first question was asked."""
    asked: Future[WorkerStatus] | None = None
    pulse: WorkerStatus | None = None
    jobs: list[RolloutRequest] = field(default_factory=list)

    @property
    def episodes(self) -> int:
        return sum(job.group_size for job in self.jobs)

    @property
    def pid(self) -> int:
        return self.pulse.pid if self.pulse is not None else 0

    def describe(self) -> str:
        """Returns what the worker is waited for."""
        quiet = time.monotonic() - self.answered
        if self.pulse is None:
            return f"worker {self.number} starts since {time.monotonic() - self.since:.0f} s"
        told = f"worker {self.number} (process {self.pulse.pid}) plays {len(self.jobs)} groups"
        if quiet > 5 * _BEAT:
            return f"{told} and has not answered for {quiet:.0f} s"
        return f"{told}: {self.pulse.waits}"


class WorkerPool:
    """Workers, a thread that asks each for its pulse, and those who take the place of dead ones.

    Args:
        start: Starts the worker with a number and returns at once.
        engine: The trainer's engine, which looks after the servers.
        limits: The rollout's settings.
        start_timeout: Seconds until a new worker has to answer.
        answer_timeout: Seconds after which a worker that does not answer is killed.
    """

    def __init__(
        self,
        start: Callable[[int], Handle],
        engine: ServesOthers,
        limits: RolloutConfig,
        *,
        start_timeout: float = 180.0,
        answer_timeout: float = 60.0,
    ) -> None:
        self.lost = self.restarts = self.reissued = 0
        self._start, self._engine, self._limits = start, engine, limits
        self._start_timeout, self._answer_timeout = start_timeout, answer_timeout
        self._why_lost = ""
        self._moved = time.monotonic()
        self._lock = threading.RLock()
        """Held while the state of a worker changes."""
        self._queue: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._members = [_Member(number, start(number)) for number in range(limits.ray_workers)]
        self._over = threading.Event()
        self._asking = threading.Thread(target=self._ask_all, name="workers", daemon=True)
        self._asking.start()

    @property
    def fleet(self) -> ServerList:
        """The servers."""
        return self._engine.fleet

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the workers since their start."""
        return {
            "rollout/workers": float(sum(m.state is _State.READY for m in self._members)),
            "rollout/workers_lost": float(self.lost),
            "rollout/worker_restarts": float(self.restarts),
            "rollout/reissued_groups": float(self.reissued),
        }

    async def play(
        self, job: RolloutRequest, gives_outcome: bool | None, counts: bool = True
    ) -> bytes:
        """Plays a group, and once more with the same seeds each time that its worker dies.

        Args:
            job: The group.
            gives_outcome: See `GroupRequest.gives_outcome`.
            counts: See `GroupRequest.counts`.

        Raises:
            RolloutError: No worker is left.
        """
        while True:
            member = await self._choose(job)
            handle = member.handle
            order = GroupRequest(
                job=job, fleet=self.fleet, gives_outcome=gives_outcome, counts=counts
            )
            try:
                return await handle.play(order)
            except WorkerDied as death:
                with self._lock:
                    self.reissued += 1
                self._lose(member, handle, str(death))
            finally:
                self._moved = time.monotonic()
                with self._lock:
                    member.jobs = [other for other in member.jobs if other is not job]

    async def _choose(self, job: RolloutRequest) -> _Member:
        """Returns the ready worker with the fewest episodes, in the order of the callers."""
        loop = asyncio.get_running_loop()
        if self._queue is None or self._queue[0] is not loop:
            self._queue = loop, asyncio.Lock()
        async with self._queue[1]:
            while True:
                with self._lock:
                    found = self._free()
                    if found is not None:
                        found.jobs.append(job)
                        return found
                await asyncio.sleep(0.02)

    def _free(self) -> _Member | None:
        if all(member.state is _State.LOST for member in self._members):
            raise RolloutError(
                f"none of the {len(self._members)} workers is left; the last one was lost "
                f"because: {self._why_lost}"
            )
        ready = [m for m in self._members if m.state is _State.READY]
        member = min(ready, key=lambda m: m.episodes, default=None)
        return (
            member
            if member is not None and member.episodes < self._limits.worker_episodes
            else None
        )

    def idle(self) -> float:
        """Returns the seconds since an episode of a worker came further, as far as it is known."""
        now = time.monotonic()
        told = [now - m.answered + m.pulse.idle for m in self._members if m.pulse is not None]
        return min([now - self._moved, *told])

    def describe(self) -> str:
        """Returns which workers are waited for, and what they wait for."""
        with self._lock:
            busy = [m for m in self._members if m.jobs or m.state is _State.STARTING]
            return "; ".join(member.describe() for member in busy) or "no worker plays"

    def close(self) -> None:
        """Lets the workers close their environments, at most some seconds, and ends them."""
        self._over.set()
        self._asking.join(10.0)
        ready = [m for m in self._members if m.state is _State.READY]
        closing = [(m, m.handle.close()) for m in ready]
        deadline = time.monotonic() + 15.0
        for member, future in closing:
            try:
                self._log(member, future.result(max(0.0, deadline - time.monotonic())))
            except Exception as error:  # a worker that ends now, or does not answer
                text = "worker %d did not close its environments: %s: %s"
                logger.warning(text, member.number, type(error).__name__, error)
        for member in self._members:
            if member.state is not _State.LOST:
                member.state = _State.LOST
                member.handle.kill()

    def _ask_all(self) -> None:
        asked = time.monotonic()
        while not self._over.wait(_BEAT):
            now = time.monotonic()
            deaf = max(0.0, now - asked - 2 * _BEAT)
            asked, fleet = now, self.fleet
            for member in self._members:
                # while this process is suspended or very busy, it hears no answer
                member.since += deaf
                member.answered += deaf
                if member.state is not _State.LOST:
                    try:
                        self._ask(member, fleet)
                    except Exception as error:  # or nobody would notice who dies
                        self._lose(member, member.handle, f"{type(error).__name__}: {error}")

    def _ask(self, member: _Member, fleet: ServerList) -> None:
        """Takes a worker's answer, asks it again, or ends it if it does not answer."""
        handle, now = member.handle, time.monotonic()
        problem = ""
        if member.asked is None:
            member.asked = handle.beat(fleet)
        elif member.asked.done():
            error = member.asked.exception()
            if error is None:
                self._take(member, member.asked.result())
                member.asked = handle.beat(fleet)
                stalled = member.pulse.stalled if member.pulse is not None else 0.0
                if stalled > self._limits.episode_timeout + self._answer_timeout:
                    problem = f"its event loop has not turned for {stalled:.0f} s"
            else:
                problem = handle.why(error)
        elif member.state is _State.STARTING:
            if now - member.since > self._start_timeout:
                problem = f"it has not started within {self._start_timeout:g} s"
        elif now - member.answered > self._answer_timeout:
            problem = f"it has not answered for {self._answer_timeout:g} s"
        if problem:
            self._lose(member, handle, problem)

    def _take(self, member: _Member, pulse: WorkerStatus) -> None:
        with self._lock:
            member.pulse, member.answered = pulse, time.monotonic()
            if member.state is _State.STARTING:
                member.state = _State.READY
        self._log(member, pulse.lines)
        for address, reason in pulse.failed.items():
            self._engine.failed(address, f"worker {member.number}: {reason}")

    def _lose(self, member: _Member, handle: Handle, reason: str) -> None:
        """Ends a worker, and starts another one in its place if that may help."""
        with self._lock:
            if member.handle is not handle or member.state is _State.LOST or self._over.is_set():
                return
            began = member.state is _State.READY
            played = ", ".join(f"{j.task.env_id} with seed {j.task.seed}" for j in member.jobs[:4])
            self.lost += 1
            self._why_lost = f"{reason}; it played {played or 'nothing'}"
            logger.error("worker %d is lost: %s", member.number, self._why_lost)
            member.state = _State.LOST
            handle.kill(member.pid)
            if began:  # else another one would fail in the same way
                self._start_again(member)

    def _start_again(self, member: _Member) -> None:
        if self.restarts >= self._limits.max_worker_restarts:
            logger.error("worker %d is not started again: %d were", member.number, self.restarts)
            return
        self.restarts += 1
        try:
            member.handle, member.asked, member.pulse = self._start(member.number), None, None
        except Exception as error:  # such as of a cluster that is gone
            self._why_lost = f"{type(error).__name__}: {error}"
            logger.error("worker %d is not started again: %s", member.number, self._why_lost)
            return
        member.state, member.since = _State.STARTING, time.monotonic()

    def _log(self, member: _Member, lines: Lines) -> None:
        for level, text in lines:
            logger.log(level, "worker %d: %s", member.number, text)


@dataclass(slots=True)
class WorkerCollector(Collector):
    """Collects episodes that workers play; faults, settings and results are those of one process.

    The trainer's `engine`, `chat` and `pool` remain: weights, probes and the declarations of the
    environments are its affair.
    """

    crew: WorkerPool = field(kw_only=True)

    def __post_init__(self) -> None:
        """Lets the log say who is waited for."""
        self._heartbeat = Heartbeat(self.crew.idle, self.crew.describe, SILENCE)

    def idle(self) -> float:
        """See `Collector.idle`."""
        return self.crew.idle()

    def metrics(self) -> dict[str, float]:
        """See `Collector.metrics`."""
        return self.crew.metrics()

    async def play(self, job: RolloutRequest, gate: asyncio.Semaphore) -> Group:
        """See `Collector.play`. The workers themselves limit the episodes in flight, not `gate`.

        Raises:
            RolloutError: See `Collector.play`; or no worker is left.
        """
        with self._heartbeat.watching():
            known = self.pool.of(job.task.env_id).gives_outcome
            counts = isinstance(gate, Gate)  # the episodes of an evaluation have another one
            played = from_bytes(await self.crew.play(job, known, counts))
        for episode in played.group.episodes:
            for fault in episode.faults:
                self.pool.faults.note(episode.task, fault)
        self._unfit.extend(played.unfit)
        if isinstance(gate, Gate):
            gate.add(played.seconds)
        return played.group
