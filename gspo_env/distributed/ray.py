"""Workers in Ray actors, on this machine or on a cluster; the only file that imports Ray.

Without an address, a cluster of one machine is started for the run. It runs below a guard, which
ends all of its processes with this one, even if this one is killed. As a program, this file is the
head of that cluster: `PLACE CPUS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.errors import MissingExtraError, RolloutError
from gspo_env.runtime.processes import Guard, PrivateFolder, spawn

if TYPE_CHECKING:
    from gspo_env.chat.transcript import ChatTokenizer
    from gspo_env.distributed.worker import Lines, WorkerSetup, WorkerStatus
    from gspo_env.engines.vllm.requests import ServerList
    from gspo_env.rollout.collector import Collector, RolloutRequest
    from gspo_env.rollout.failures import FaultLog
    from gspo_env.rollout.pool import EnvPools
    from gspo_env.rollout.settings import RolloutConfig

_TOKEN = secrets.token_hex(32)
"""The key of the clusters that this process starts. Ray keeps the first one that it reads."""
_MEMORY = 128 * 2**20
"""Bytes of shared memory for the messages of a local cluster; more go to its private folder."""
_START = 120.0
"""Seconds that a local cluster may take to start, and that Ray may take to connect."""
_CALLS = 4096
"""Calls that an actor may have at the same time; `rollout.concurrency` limits its episodes."""
_HEAD = "address"
"""The file in which the head of a local cluster writes its address."""


def require_ray() -> None:
    """Checks that Ray is installed.

    Raises:
        MissingExtraError: It is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "the workers need Ray, which is not installed: pip install 'gspo-env[ray]'"
        )


@contextlib.contextmanager
def open_workers(
    start_engine: Callable[[], Any],
    chat: ChatTokenizer,
    pool: EnvPools,
    limits: RolloutConfig,
    vocab_size: int,
    make_pool: Callable[[FaultLog], EnvPools],
) -> Iterator[Collector]:
    """Yields a collector whose episodes are played by Ray actors, which it ends afterwards.

    Args:
        start_engine: Returns the engine.
        chat: Renders the conversations.
        pool: The environments of this process.
        limits: The settings.
        vocab_size: Number of ids of the model.
        make_pool: See `WorkerSetup.make_pool`.
    """
    from gspo_env.distributed.pool import WorkerCollector, WorkerPool
    from gspo_env.distributed.worker import WorkerSetup

    cluster = RayCluster(limits.ray_workers, limits.ray_address)
    with contextlib.closing(cluster):
        engine = start_engine()  # while the cluster starts
        setup = WorkerSetup(
            make_pool=make_pool,
            tokenizer=chat.tokenizer,
            history=chat.history,
            end_ids=chat.end_ids,
            config=limits,
            vocab_size=vocab_size,
            servers=engine.server_list,
        )
        cluster.connect(setup)
        with contextlib.closing(WorkerPool(cluster.start, engine, limits)) as workers:
            yield WorkerCollector(engine, chat, pool, limits, vocab_size, workers=workers)


class RayCluster:
    """A connection to Ray, and to the cluster that is started for it if no address is given.

    Args:
        count: Number of workers.
        address: Address of a running cluster, such as `10.0.0.1:6379`, of which this machine is a
            part; empty starts one on this machine.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, count: int, address: str = "") -> None:
        """Begins to start the cluster; `connect` waits for it."""
        require_ray()
        self._address = address
        self._ray: Any = None
        self._setup: Any = None
        self._folder: PrivateFolder | None = None
        self._guard: Guard | None = None
        self._variables: dict[str, str | None] = {}
        if not address:
            self._folder = PrivateFolder("gspo-env-ray-")
            self._guard = self._spawn(self._folder.path, count)

    def _spawn(self, place: Path, count: int) -> Guard:
        (place / "token").write_text(_TOKEN)
        self._set(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(place / "token"))
        variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        variables.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-m", __name__, str(place), str(count)]
        with (place / "head.log").open("wb") as log:
            return spawn(command, log=log, env=variables, grace=1.0)

    def _set(self, **variables: str) -> None:
        """Sets environment variables of this process until the connection ends."""
        self._variables = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)

    def connect(self, setup: WorkerSetup) -> None:
        """Waits for the cluster, connects to it, and stores what its workers are made from.

        Raises:
            RolloutError: It has not started in time, or Ray cannot connect.
        """
        address = self._address or self._wait()
        with _keep_signals():
            import ray

            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except Exception as error:  # Ray has many, some of them only RuntimeError
                text = str(error).strip().splitlines()[0]
                raise RolloutError(f"Ray cannot connect to {address!r}: {text}") from error
        self._ray, self._setup = ray, ray.put(setup)

    def _wait(self) -> str:
        """Returns the address of the local cluster."""
        assert self._folder is not None
        assert self._guard is not None
        address = self._folder.path / _HEAD
        deadline = time.monotonic() + _START
        while not address.exists():
            if self._guard.process.poll() is not None or time.monotonic() > deadline:
                log = (self._folder.path / "head.log").read_text(errors="replace").splitlines()
                raise RolloutError(
                    f"the local Ray cluster has not started within {_START:g} s; its last line: "
                    f"{log[-1] if log else 'none'}"
                )
            time.sleep(0.05)
        return address.read_text()

    def start(self, number: int) -> RayHandle:
        """Starts a worker; returns at once."""
        as_actor = self._ray.remote(
            num_cpus=1,
            max_concurrency=_CALLS,
            concurrency_groups={"status": 4},
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        actor = as_actor(_Actor)
        return RayHandle(self._ray, actor.remote(self._setup), local=self._guard is not None)

    def close(self) -> None:
        """Disconnects, and ends a cluster that was started here with all of its processes."""
        if self._ray is not None:
            self._ray.shutdown()
        if self._guard is not None:
            self._guard.end()
        if self._folder is not None:
            self._folder.close()
        for name, value in self._variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class RayHandle:
    """Reaches the worker in an actor."""

    def __init__(self, ray: Any, actor: Any, *, local: bool) -> None:
        self._ray, self._actor, self._local = ray, actor, local

    async def play(self, request: RolloutRequest, servers: ServerList) -> bytes:
        """Plays a group; see `gspo_env.distributed.worker.Worker.play`.

        Raises:
            WorkerDied: The worker has ended.
        """
        from gspo_env.distributed.pool import WorkerDied

        reference = self._actor.play.remote(request, servers)
        try:
            data: bytes = await reference
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            raise
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(_reason(error)) from error
        return data

    def status(self, servers: ServerList) -> Future[WorkerStatus]:
        """Requests the status, on another event loop than that of the episodes."""
        call = self._actor.status.options(concurrency_group="status")
        status: Future[WorkerStatus] = call.remote(servers).future()
        return status

    def reason(self, error: BaseException) -> str:
        """Returns why a call failed."""
        return _reason(error)

    def close(self) -> Future[Lines]:
        """Closes the environments."""
        lines: Future[Lines] = self._actor.close.remote().future()
        return lines

    def kill(self, pid: int = 0) -> None:
        """Ends the process; with its id also one that is stopped and does not react to Ray."""
        with contextlib.suppress(Exception):  # it has ended
            self._ray.kill(self._actor)
        if self._local and pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Actor:
    """The process of a worker."""

    def __init__(self, setup: WorkerSetup) -> None:
        from gspo_env.distributed.worker import Worker

        self._worker = Worker(setup)

    async def play(self, request: RolloutRequest, servers: ServerList) -> bytes:
        return await self._worker.play(request, servers)

    async def status(self, servers: ServerList) -> WorkerStatus:
        return self._worker.status(servers)

    async def close(self) -> Lines:
        return self._worker.close()


def _reason(error: BaseException) -> str:
    """Returns the cause of a death in one sentence, out of Ray's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if getattr(error, "actor_init_failed", False):
        return lines[-1]  # of the traceback
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", " ".join(lines))
    return detail[1] if detail else " ".join(lines)[:300]


@contextlib.contextmanager
def _keep_signals() -> Iterator[None]:
    """Keeps the handler of SIGTERM, which Ray replaces."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, handler)


def main() -> None:
    """Runs the head of a local cluster until it is ended."""
    import ray

    place, cpus = sys.argv[1:]
    context = ray.init(
        num_cpus=int(cpus),
        num_gpus=0,
        object_store_memory=_MEMORY,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=place,
    )
    address = Path(place, f"{_HEAD}.new")
    address.write_text(context.address_info["gcs_address"])
    address.rename(Path(place, _HEAD))
    threading.Event().wait()


if __name__ == "__main__":
    main()
