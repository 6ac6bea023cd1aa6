"""An engine that samples on vLLM servers over HTTP, with token ids in and out.

The engine starts the servers or takes the addresses of running ones. It sends weights through a
folder that the servers read, or with vLLM's transfer API.

Each request goes to the server with the fewest requests in flight. A server that fails is no longer
used; its requests are repeated on another server with the same seed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch

from gspo_env.engines.base import Completion, NamedTensors, Sampling, check_room
from gspo_env.engines.vllm.local import (
    check_loaded,
    engine_arguments,
    sampling_fields,
    tolerance,
)
from gspo_env.engines.vllm.process import Server, healthy, start, stop, wait
from gspo_env.engines.vllm.settings import VLLMServer
from gspo_env.engines.vllm.worker import EXTENSION
from gspo_env.errors import EngineError, MissingExtraError
from gspo_env.model.export import Exporter, named_weights

logger = logging.getLogger(__name__)

_KEEP_ALIVE = 2.0
"""Seconds until an idle connection is closed. A server closes it after 5 seconds; a longer time
here would let requests use a connection that the server is closing."""
_MAX_FAILURES = 512
"""Broken connections to a healthy server, between two updates of the weights, before it is lost."""


class VLLMServerEngine:
    """Samples actions on vLLM servers.

    Args:
        model: The learner's causal LM, which defines the architecture and the first weights.
        config: Which servers, and vLLM's settings for those that are started.
        max_slots: Maximum number of requests in flight.
        max_context: Maximum tokens of one sequence.

    Raises:
        MissingExtraError: Servers are to be started and vLLM is not installed.
        EngineError: A server does not become healthy or does not take the weights.
    """

    def __init__(
        self, model: Any, config: VLLMServer, *, max_slots: int = 256, max_context: int = 4096
    ) -> None:
        self.weights_version = 0
        self.servers_lost = 0
        self.tolerance = tolerance(config)
        self._max_context, self._max_slots = max_context, max_slots
        self._exporter = Exporter(model, untie=not torch.cuda.is_available())
        self._temporary = tempfile.TemporaryDirectory(prefix="gspo-env-fleet-")
        self._folder = Path(config.shared_folder or self._temporary.name) / "weights"
        self._client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None
        self._transfer = _transfer(config, next(model.parameters()).device)
        self._source: Any = None
        self._why_lost = ""
        self._exporter.config.save_pretrained(self._folder)
        if config.addresses:
            self._servers = [Server(address=a.rstrip("/")) for a in config.addresses]
        else:
            dtype = next(model.parameters()).dtype
            arguments = engine_arguments(config, dtype, max_slots, max_context)
            if self._transfer != "folder":
                arguments["weight_transfer_config"] = {"backend": self._transfer}
            environment = self._environment(config.kv_cache_gib, config.replicas)
            logs = [Path(self._temporary.name) / f"server-{n}.log" for n in range(config.replicas)]
            self._servers = [start(self._folder, log, arguments, environment) for log in logs]
        processes = [s.process for s in self._servers if s.process is not None]
        self._stop = weakref.finalize(self, stop, processes)
        try:
            wait(self._servers, config.server_start_timeout)
            self._send(named_weights(model))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers that were started here and are still used."""
        return [s.process.pid for s in self._servers if s.alive and s.process is not None]

    @property
    def copies(self) -> int:
        """Servers that are still used."""
        return sum(server.alive for server in self._servers)

    @property
    def dtype(self) -> str:
        """Dtype of the servers' weights; a half-precision one if they differ."""
        return next((s.dtype for s in self._servers if s.alive and s.dtype != "float32"), "float32")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`.

        Raises:
            EngineError: The prompt is empty or leaves no room for `max_tokens`, a server refused
                the request, or no server is left.
        """
        check_room(prompt_ids, sampling, self._max_context)
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
                # one connection may break; the server is lost if it is not healthy either
                server.failures += 1
                usable = server.failures <= _MAX_FAILURES
                if not (usable and await asyncio.to_thread(healthy, server.address)):
                    self._lose(server, f"{type(error).__name__}: {error}")
            finally:
                server.running -= 1

    def release(self, session: str) -> None:
        """Does nothing: vLLM's prefix cache evicts the least recently used blocks."""

    async def sleep(self) -> None:
        """Does nothing: servers have their own memory."""

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Sends the weights to every server and resets its prefix cache.

        A server that fails to take them is no longer used, so that none samples with old weights.

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
        """Disconnects from all servers, and stops those that were started here."""
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
                f"none of the {len(self._servers)} vLLM servers is left; the last one was lost "
                f"because: {self._why_lost}"
            )
        return min(alive, key=lambda server: server.running)

    def _lose(self, server: Server, reason: str) -> None:
        if server.alive:
            server.alive = False
            self.servers_lost += 1
            self._why_lost = reason
            logger.error("vLLM server %s is no longer used: %s", server.address, reason)

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
            "OMP_WAIT_POLICY": "passive",  # the learner and other servers need the cores as well
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_gib))),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if self._transfer == "ipc":  # its handles are pickled; these servers listen on loopback
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return environment

    def _send(self, named_tensors: NamedTensors) -> None:
        alive = [server for server in self._servers if server.alive]
        threads = 1  # a GPU's collectives have to run in the same order
        if self._transfer == "folder":
            self._exporter.write(named_tensors, self._folder)
            threads = max(1, len(alive))
        else:
            self._prepare_source(named_tensors)
        with ThreadPoolExecutor(threads) as pool:
            for server, problem in zip(alive, pool.map(self._send_to, alive), strict=True):
                if problem:
                    self._lose(server, problem)
        if self._source is not None:
            self._source.set([])
        self._choose()

    def _prepare_source(self, named_tensors: NamedTensors) -> None:
        if self._source is None:
            try:
                from gspo_env.engines.vllm.transfer import Weights
            except ImportError as error:
                raise MissingExtraError(
                    f"transfer is {self._transfer!r}, which needs vLLM, and it cannot be imported "
                    f"({error}): pip install 'gspo-env[vllm]', or choose --transfer folder"
                ) from error
            self._source = Weights()
        self._source.set(self._exporter.weights(named_tensors))

    def _send_to(self, server: Server) -> str:
        """Sends the weights to one server; returns an error message, or an empty string."""
        try:
            with httpx.Client(base_url=server.address, timeout=600.0) as client:
                if not server.dtype:
                    server.dtype = _check_server(client, self._transfer)
                if self._transfer == "folder":
                    check_loaded(_call(client, "load_checked", folder=str(self._folder)))
                else:
                    self._open_channel(server, client)
                    _call(client, "start_checking")
                    server.channel.send_weights()
                    check_loaded(_call(client, "stop_checking"))
                reset = client.post("/reset_prefix_cache").raise_for_status()
                return "" if reset.json().get("success") else "it did not reset its prefix cache"
        except Exception as error:  # NCCL, Gloo and HTTP have no common base class
            return f"it did not take the weights: {type(error).__name__}: {error}"

    def _open_channel(self, server: Server, client: httpx.Client) -> None:
        from gspo_env.engines.vllm.transfer import open_channel

        if server.channel is None:
            workers = client.get("/get_world_size").raise_for_status().json()["world_size"]
            server.channel = open_channel(self._transfer, server.address, workers, self._source)


def _call(client: httpx.Client, method: str, **keywords: str) -> Any:
    """Calls a method in each worker of a server; returns their answers."""
    body = {"method": method, "kwargs": keywords}
    return client.post("/collective_rpc", json=body).raise_for_status().json().get("results")


def _check_server(client: httpx.Client, backend: str) -> str:
    """Returns the dtype of a server's weights.

    Raises:
        EngineError: The server cannot check its weights, or was started with another backend: the
            trainer would wait for it.
    """
    told = client.get("/server_info", params={"config_format": "json"}).raise_for_status().json()
    config = told["vllm_config"]
    extension = config["parallel_config"]["worker_extension_cls"]
    if extension != EXTENSION:
        raise EngineError(
            f"its worker extension is {extension!r}; expected {EXTENSION!r}, which checks the "
            f"weights: install gspo-env there and start it with --worker-extension-cls {EXTENSION}"
        )
    found = (config["weight_transfer_config"] or {}).get("backend")
    if backend not in ("folder", found):
        raise EngineError(
            f"its weight transfer backend is {found!r}; expected {backend!r}: start it with "
            f"""--weight-transfer-config '{{"backend": "{backend}"}}' or choose --transfer folder"""
        )
    return str(config["model_config"]["dtype"]).removeprefix("torch.")


def _transfer(config: VLLMServer, device: torch.device) -> str:
    if config.transfer != "auto":
        return config.transfer
    if device.type == "cpu":
        return "folder"
    return "nccl" if config.addresses else "ipc"


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
