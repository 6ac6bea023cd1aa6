"""Plays groups in other processes: assigns them, watches the workers, replaces those that die."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gspo_env.distributed.worker import Lines, WorkerStatus, most_episodes
from gspo_env.engines.vllm.requests import ServerList
from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import Collector, RolloutRequest
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Group

if TYPE_CHECKING:
    from gspo_env.distributed.ray import RayHandle
    from gspo_env.engines.vllm.server import VLLMServerEngine

logger = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0
"""Seconds between two requests for a worker's status."""
_CLOSE_SECONDS = 15.0
"""Seconds that workers have to close their environments."""


class WorkerDied(Exception):
    """The process of a worker has ended."""


@dataclass(slots=True)
class _Worker:
    """One worker and its state."""

    number: int
    handle: RayHandle
    answered: float = field(default_factory=time.monotonic)
    """When it last answered, or was started."""
    pending: Future[WorkerStatus] | None = None
    """The running request for its status."""
    status: WorkerStatus | None = None
    """None while it starts."""
    is_lost: bool = False
    requests: list[RolloutRequest] = field(default_factory=list)
    """The groups that it plays."""

    @property
    def episodes(self) -> int:
        return sum(request.group_size for request in self.requests)

    @property
    def is_ready(self) -> bool:
        return self.status is not None and not self.is_lost

    def describe(self) -> str:
        """Returns what the worker is doing."""
        seconds = time.monotonic() - self.answered
        if self.status is None:
            return f"worker {self.number} has been starting for {seconds:.0f} s"
        text = f"worker {self.number} (process {self.status.pid}) plays {len(self.requests)} groups"
        if seconds > 5 * _STATUS_SECONDS:
            return f"{text} and has not answered for {seconds:.0f} s"
        return f"{text}: {self.status.waits}"


class WorkerPool:
    """Workers, a thread that requests their status, and the replacements of those that died.

    Args:
        start: Starts the worker with a number and returns at once.
        engine: The trainer's engine, which manages the servers.
        limits: The rollout's settings.
        start_timeout: Seconds until a new worker has to answer.
        answer_timeout: Seconds after which a worker that does not answer is killed.
    """

    def __init__(
        self,
        start: Callable[[int], RayHandle],
        engine: VLLMServerEngine,
        limits: RolloutConfig,
        *,
        start_timeout: float = 180.0,
        answer_timeout: float = 60.0,
    ) -> None:
        self.lost = self.restarts = self.reissued = 0
        self._start, self._engine, self._limits = start, engine, limits
        self._start_timeout, self._answer_timeout = start_timeout, answer_timeout
        self._loss = ""
        """Why the last worker was lost."""
        self._last_group = time.monotonic()
        self._lock = threading.RLock()
        """Held while the state of a worker changes."""
        self._queue: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._workers = [_Worker(number, start(number)) for number in range(limits.ray_workers)]
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="workers", daemon=True)
        self._watching.start()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the workers since their start."""
        return {
            "rollout/workers": float(sum(w.is_ready for w in self._workers)),
            "rollout/workers_lost": float(self.lost),
            "rollout/worker_restarts": float(self.restarts),
            "rollout/reissued_groups": float(self.reissued),
        }

    async def play(self, request: RolloutRequest) -> Group:
        """Plays a group, and once more with the same seeds each time that its worker dies.

        Raises:
            RolloutError: No worker is left.
        """
        while True:
            worker = await self._assign(request)
            handle = worker.handle
            try:
                group: Group = pickle.loads(await handle.play(request, self._engine.server_list))
                return group
            except WorkerDied as death:
                with self._lock:
                    self.reissued += 1
                self._lose(worker, handle, str(death))
            finally:
                self._last_group = time.monotonic()
                with self._lock:
                    worker.requests = [other for other in worker.requests if other is not request]

    async def _assign(self, request: RolloutRequest) -> _Worker:
        """Returns the ready worker with the fewest episodes, in the order of the callers."""
        loop = asyncio.get_running_loop()
        if self._queue is None or self._queue[0] is not loop:
            self._queue = loop, asyncio.Lock()
        async with self._queue[1]:
            while True:
                with self._lock:
                    if (worker := self._free_worker()) is not None:
                        worker.requests.append(request)
                        return worker
                await asyncio.sleep(0.02)

    def _free_worker(self) -> _Worker | None:
        if all(worker.is_lost for worker in self._workers):
            raise RolloutError(
                f"none of the {len(self._workers)} workers is left; the last one was lost "
                f"because: {self._loss}"
            )
        most = most_episodes(self._limits)
        free = [w for w in self._workers if w.is_ready and w.episodes < most]
        return min(free, key=lambda worker: worker.episodes, default=None)

    def idle(self) -> float:
        """Returns the seconds since an episode last made progress, as far as it is known."""
        now = time.monotonic()
        idle = [now - w.answered + w.status.idle for w in self._workers if w.status is not None]
        return min([now - self._last_group, *idle])

    def describe(self) -> str:
        """Returns which workers are busy, and what they wait for."""
        with self._lock:
            busy = [w for w in self._workers if w.requests or not (w.status or w.is_lost)]
            return "; ".join(worker.describe() for worker in busy) or "no worker plays"

    def close(self) -> None:
        """Lets the workers close their environments, at most some seconds, and ends them."""
        self._closing.set()
        self._watching.join(10.0)
        futures = [(worker, worker.handle.close()) for worker in self._workers if worker.is_ready]
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker, future in futures:
            try:
                self._log(worker, future.result(max(0.0, deadline - time.monotonic())))
            except Exception as error:  # a worker that ends now, or does not answer
                text = "worker %d did not close its environments: %s: %s"
                logger.warning(text, worker.number, type(error).__name__, error)
        for worker in self._workers:
            if not worker.is_lost:
                worker.is_lost = True
                worker.handle.kill()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(_STATUS_SECONDS):
            now = time.monotonic()
            late = max(0.0, now - last - 2 * _STATUS_SECONDS)
            last, servers = now, self._engine.server_list
            for worker in self._workers:
                # while this process is suspended or very busy, it hears no answer
                worker.answered += late
                if not worker.is_lost:
                    try:
                        problem = self._examine(worker, servers)
                    except Exception as error:  # or nobody would notice who dies
                        problem = f"{type(error).__name__}: {error}"
                    if problem:
                        self._lose(worker, worker.handle, problem)

    def _examine(self, worker: _Worker, servers: ServerList) -> str:
        """Takes a worker's status and requests the next one; returns why it is lost, if it is."""
        pending, silent = worker.pending, time.monotonic() - worker.answered
        if pending is None:
            worker.pending = worker.handle.status(servers)
        elif pending.done():
            if (error := pending.exception()) is not None:
                return worker.handle.reason(error)
            status = pending.result()
            self._update(worker, status)
            worker.pending = worker.handle.status(servers)
            if status.stalled > self._limits.episode_timeout + self._answer_timeout:
                return f"its event loop has not run for {status.stalled:.0f} s"
        elif worker.status is None and silent > self._start_timeout:
            return f"it has not started within {self._start_timeout:g} s"
        elif worker.status is not None and silent > self._answer_timeout:
            return f"it has not answered for {self._answer_timeout:g} s"
        return ""

    def _update(self, worker: _Worker, status: WorkerStatus) -> None:
        with self._lock:
            worker.status, worker.answered = status, time.monotonic()
        self._log(worker, status.lines)
        for address, reason in status.failed.items():
            self._engine.failed(address, f"worker {worker.number}: {reason}")

    def _lose(self, worker: _Worker, handle: RayHandle, reason: str) -> None:
        """Ends a worker, and starts another one in its place if that may help."""
        with self._lock:
            if worker.handle is not handle or worker.is_lost or self._closing.is_set():
                return
            tasks = [request.task for request in worker.requests[:4]]
            groups = ", ".join(f"{task.env_id} with seed {task.seed}" for task in tasks)
            self.lost += 1
            self._loss = f"{reason}; it played {groups or 'nothing'}"
            logger.error("worker %d is lost: %s", worker.number, self._loss)
            worker.is_lost = True
            handle.kill(worker.status.pid if worker.status else 0)
            if worker.status:  # else another one would fail in the same way
                self._restart(worker)

    def _restart(self, worker: _Worker) -> None:
        if self.restarts >= self._limits.max_worker_restarts:
            logger.error("worker %d is not restarted: %d were", worker.number, self.restarts)
            return
        self.restarts += 1
        try:
            worker.handle = self._start(worker.number)
        except Exception as error:  # such as of a cluster that is gone
            self._loss = f"{type(error).__name__}: {error}"
            logger.error("worker %d is not restarted: %s", worker.number, self._loss)
            return
        worker.pending, worker.status = None, None
        worker.answered, worker.is_lost = time.monotonic(), False

    def _log(self, worker: _Worker, lines: Lines) -> None:
        for level, text in lines:
            logger.log(level, "worker %d: %s", worker.number, text)


@dataclass(slots=True)
class WorkerCollector(Collector):
    """Collects episodes that workers play; faults, settings and results are those of one process.

    The trainer keeps its `engine`, `chat` and `pool` for weights, checks of them and the
    declarations of the environments.
    """

    workers: WorkerPool = field(kw_only=True)

    def idle(self) -> float:
        """See `Collector.idle`."""
        return self.workers.idle()

    def describe(self) -> str:
        """See `Collector.describe`."""
        return self.workers.describe()

    def metrics(self) -> dict[str, float]:
        """See `Collector.metrics`."""
        return self.workers.metrics()

    async def play_group(self, request: RolloutRequest, in_flight: asyncio.Semaphore) -> Group:
        """See `Collector.play_group`. The workers have limits of their own, not `in_flight`.

        Raises:
            RolloutError: See `Collector.play_group`; or no worker is left.
        """
        with self._heartbeat.watching():
            group = await self.workers.play(request)
        for episode in group.episodes:
            for fault in episode.faults:
                self.pool.faults.note(episode.task, fault)
        return group
