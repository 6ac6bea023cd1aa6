"""A fleet of `vllm serve` processes, ours or given: token ids over HTTP.

Weights go through a folder that servers read, or by vLLM's own transfer API.

Each request goes to the living server with the fewest in flight. A server that fails is left for
good and its requests are asked again elsewhere, with the same seed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import torch
from torch import Tensor

from gspo_env.engines.base import Completion, Sampling
from gspo_env.engines.vllm.local import VLLMConfig, engine_arguments, sampling_fields
from gspo_env.engines.vllm.process import Server, healthy, start, stop, wait
from gspo_env.errors import ConfigError, EngineError, MissingExtraError
from gspo_env.model.export import Exporter, named_weights

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
    transfer: Literal["auto", "folder", "gloo", "nccl", "ipc"] = "auto"
    """How weights get to the servers. Given servers need `--weight-transfer-config
    '{"backend": "nccl"}'` for all but `folder`, and `ipc` the trainer's own GPU. `auto` is `folder`
    for a model on a CPU; on a GPU `ipc` for servers of our own and `nccl` for given ones."""
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
        self._transfer = _transfer(fleet, next(model.parameters()).device)
        self._source: Any = None
        self._why_lost = ""
        self._exporter.write(named_weights(model), self._folder)
        if fleet.addresses:
            self._servers = [Server(address=a.rstrip("/")) for a in fleet.addresses]
        else:
            dtype = next(model.parameters()).dtype
            arguments = engine_arguments(config, dtype, max_slots, max_context)
            if self._transfer != "folder":
                arguments["weight_transfer_config"] = {"backend": self._transfer}
            environment = self._environment(config.kv_cache_gib, fleet.replicas)
            logs = [Path(self._temporary.name) / f"server-{n}.log" for n in range(fleet.replicas)]
            self._servers = [start(self._folder, log, arguments, environment) for log in logs]
        processes = [s.process for s in self._servers if s.process is not None]
        self._stop = weakref.finalize(self, stop, processes)
        try:
            wait(self._servers, fleet.start_timeout)
            self._send(named_weights(model))
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
                    healthy, server.address
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
        """Sends the weights to every server and lets it forget its cache.

        A server that fails to is left, so that none answers with old weights.

        Raises:
            EngineError: Requests are running, or no server took the weights.
        """
        if any(server.running for server in self._servers):
            raise EngineError("weights cannot change while requests are running")
        await asyncio.to_thread(self._send, named_tensors)
        self.weights_version = version
        for server in self._servers:
            server.failures = 0

    def close(self) -> None:
        """Leaves all servers, and stops those that were started."""
        for server in self._servers:
            if server.alive and server.channel is not None:
                server.channel.shutdown()
                server.channel = None
        self._stop()
        self._temporary.cleanup()

    def _choose(self) -> Server:
        alive = [server for server in self._servers if server.alive]
        if not alive:
            raise EngineError(
                f"none of the {len(self._servers)} vLLM servers is left; the last: {self._why_lost}"
            )
        return min(alive, key=lambda server: server.running)

    def _lose(self, server: Server, reason: str) -> None:
        if server.alive:
            server.alive = False
            self.servers_lost += 1
            self._why_lost = reason
            logger.error("vLLM server %s is left: %s", server.address, reason)

    def _http(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            limits = httpx.Limits(max_connections=self._max_slots + 8, keepalive_expiry=_KEEP_ALIVE)
            timeout = httpx.Timeout(None, connect=10.0)
            self._client = (loop, httpx.AsyncClient(limits=limits, timeout=timeout))
        return self._client[1]

    def _environment(self, kv_cache_gib: float, replicas: int) -> dict[str, str]:
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // replicas)),
            "OMP_WAIT_POLICY": "passive",  # the learner and other servers want the cores too
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_gib))),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if self._transfer == "ipc":  # its handles are pickled; these servers hear loopback only
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return environment

    def _send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        alive = [server for server in self._servers if server.alive]
        if self._transfer == "folder":
            self._exporter.write(named_tensors, self._folder)
            send, at_once = self._reload, max(1, len(alive))
        else:
            self._prepare_source(named_tensors)
            send, at_once = self._stream, 1  # a GPU's collectives have to keep one order
        with ThreadPoolExecutor(at_once) as pool:
            for server, problem in zip(alive, pool.map(send, alive), strict=True):
                if problem:
                    self._lose(server, problem)
        if self._source is not None:
            self._source.set([])
        self._choose()

    def _prepare_source(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._source is None:
            try:
                from gspo_env.engines.vllm.transfer import Weights
            except ImportError as error:
                raise MissingExtraError(
                    f"weights cannot go by {self._transfer!r} without vLLM here ({error}): pip "
                    "install 'gspo-env[vllm]', or choose --transfer folder"
                ) from error
            self._source = Weights()
        self._source.set(self._exporter.weights(named_tensors))

    def _stream(self, server: Server) -> str:
        """Sends the weights by vLLM's transfer API; returns what went wrong."""
        from gspo_env.engines.vllm.transfer import open_channel

        try:
            with httpx.Client(base_url=server.address, timeout=600.0) as client:
                if server.channel is None:
                    # a server that knows no transfer would let the trainer wait for it
                    _check_backend(client, self._transfer)
                    workers = client.get("/get_world_size").raise_for_status().json()["world_size"]
                    server.channel = open_channel(
                        self._transfer, server.address, workers, self._source
                    )
                server.channel.send_weights()
                return _reset_cache(client)
        except Exception as error:  # whatever NCCL, Gloo or HTTP raise: the server has no weights
            return f"it did not take the weights: {type(error).__name__}: {error}"

    def _reload(self, server: Server) -> str:
        """Lets a server load the folder; returns what went wrong."""
        keywords = {"weights_path": str(self._folder), "is_checkpoint_format": True}
        rpc = {"method": "reload_weights", "kwargs": keywords}
        try:
            with httpx.Client(base_url=server.address, timeout=600.0) as client:
                client.post("/collective_rpc", json=rpc).raise_for_status()
                return _reset_cache(client)
        except httpx.HTTPError as error:
            return f"it did not take the weights: {type(error).__name__}: {error}"


def _reset_cache(client: httpx.Client) -> str:
    reset = client.post("/reset_prefix_cache").raise_for_status()
    return "" if bool(reset.json().get("success")) else "it did not reset its prefix cache"


def _check_backend(client: httpx.Client, backend: str) -> None:
    """Raises an EngineError for a server that was started with another backend, or none."""
    told = client.get("/server_info", params={"config_format": "json"}).raise_for_status().json()
    found = (told["vllm_config"]["weight_transfer_config"] or {}).get("backend")
    if found != backend:
        raise EngineError(
            f"its weight transfer backend is {found!r}; expected {backend!r}: start it with "
            f"""--weight-transfer-config '{{"backend": "{backend}"}}' or choose --transfer folder"""
        )


def _transfer(fleet: VLLMServerConfig, device: torch.device) -> str:
    if fleet.transfer != "auto":
        return fleet.transfer
    if device.type == "cpu":
        return "folder"
    return "nccl" if fleet.addresses else "ipc"


def _completion(server: Server, response: httpx.Response, version: int) -> Completion:
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
