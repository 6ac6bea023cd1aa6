"""Workers in Ray actors, on this machine or on a cluster; the only file that imports Ray.

Without an address, a cluster of one machine is started for the run. It runs below a guard, which
ends all of its processes with this one, even if this one is killed. As a program, this file is the
head of that cluster: `PLACE CPUS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.errors import RolloutError, first_line, raised_as
from gspo_env.runtime.processes import Guard, PrivateFolder, spawn

if TYPE_CHECKING:
    from gspo_env.chat.tokenizer import ChatTokenizer
    from gspo_env.distributed.worker import Lines, WorkerStatus
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

    limits.require()
    with contextlib.ExitStack() as stack:
        cluster = None
        if not limits.ray_address:
            cluster = stack.enter_context(_local_cluster(limits.ray_workers))
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
        ray = _connect(cluster() if cluster else limits.ray_address)
        stack.callback(ray.shutdown)
        start = partial(_start, ray, ray.put(setup), is_local=not limits.ray_address)
        workers = stack.enter_context(contextlib.closing(WorkerPool(start, engine, limits)))
        yield WorkerCollector(engine, chat, pool, limits, vocab_size, workers=workers)


@contextlib.contextmanager
def _local_cluster(cpus: int) -> Iterator[Callable[[], str]]:
    """Begins to start a cluster, which ends with the context; yields what waits for its address."""
    variables = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    with contextlib.closing(PrivateFolder("gspo-env-ray-")) as folder:
        place = folder.path
        (place / "token").write_text(_TOKEN)
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(place / "token"))
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-m", __name__, str(place), str(cpus)]
        with (place / "head.log").open("wb") as log:
            guard = spawn(command, log=log, env=environment, grace=1.0)
        try:
            yield partial(_wait, place, guard)
        finally:
            guard.end()
            for name, value in variables.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _wait(place: Path, guard: Guard) -> str:
    """Returns the address of the local cluster."""
    deadline = time.monotonic() + _START
    while not (place / _HEAD).exists():
        if guard.process.poll() is not None or time.monotonic() > deadline:
            log = (place / "head.log").read_text(errors="replace").splitlines()
            raise RolloutError(
                f"the local Ray cluster has not started within {_START:g} s; its last line: "
                f"{log[-1] if log else 'none'}"
            )
        time.sleep(0.05)
    return (place / _HEAD).read_text()


def _connect(address: str) -> Any:
    """Connects to a cluster; returns Ray. Keeps the handler of SIGTERM, which Ray replaces."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    problem = f"Ray cannot connect to {address!r}"
    try:
        # Ray has many errors, some of them only RuntimeError
        with raised_as(RolloutError, problem, Exception, reason=first_line):
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return ray


def _start(ray: Any, setup: Any, number: int, *, is_local: bool) -> RayHandle:
    """Starts a worker; returns at once."""
    from gspo_env.distributed.worker import Worker

    as_actor = ray.remote(
        num_cpus=1,
        max_concurrency=_CALLS,
        concurrency_groups={"status": 4},
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy="SPREAD",
    )
    return RayHandle(ray, as_actor(Worker).remote(setup), local=is_local)


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


def _reason(error: BaseException) -> str:
    """Returns the cause of a death in one sentence, out of Ray's long message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if getattr(error, "actor_init_failed", False):
        return lines[-1]  # of the traceback
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", " ".join(lines))
    return detail[1] if detail else " ".join(lines)[:300]


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
