"""An engine that samples on vLLM servers, with token ids in and out.

The engine starts the servers or takes the addresses of running ones. It sends weights through a
folder that the servers read, or with vLLM's transfer API.

Each request goes to the server with the fewest requests in flight. A server that fails is no longer
used; its requests are repeated on another server with the same seed. One that was started here is
started again: it serves as soon as it has the current weights.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch

from gspo_env.engines.base import NamedTensors, drained
from gspo_env.engines.vllm.local import adapter_for, check_loaded, engine_arguments
from gspo_env.engines.vllm.process import Server, State, make_server, stop, wait
from gspo_env.engines.vllm.requests import (
    KEEP,
    RESET_SECONDS,
    SERVERS_PREFIX,
    ServerAddress,
    ServerList,
    ServerRequests,
    call,
    check_server,
    free_adapter,
    register_adapter,
    reset_cache,
    wake,
    wake_if_killed,
)
from gspo_env.engines.vllm.settings import VLLMServer
from gspo_env.errors import EngineError, MissingExtraError
from gspo_env.model.export import Exporter, base_weights, named_weights
from gspo_env.runtime.processes import PrivateFolder, usable_cores

logger = logging.getLogger(__name__)

_SEND_SECONDS = 600.0
"""Maximum time of each call by which a server takes weights."""


class VLLMServerEngine(ServerRequests):
    """Samples actions on vLLM servers.

    Args:
        model: The learner's causal LM, which defines the architecture and the first weights.
        config: Which servers, and vLLM's settings for those that are started.
        max_slots: Maximum number of requests in flight.
        max_context: Maximum tokens of one sequence.

    Raises:
        EngineError: A server does not become healthy or does not take the weights.
    """

    updates_in_flight = True

    def __init__(
        self, model: Any, config: VLLMServer, *, max_slots: int = 256, max_context: int = 4096
    ) -> None:
        timeout = config.request_timeout
        super().__init__(
            max_slots=max_slots,
            max_context=max_context,
            request_timeout=timeout,
            cache_share=float(config.follow_cache),
        )
        self.prefix = f"{secrets.token_hex(4)}."
        self.servers_lost = self.server_restarts = 0
        self.tolerance, self.undo_updates = config.tolerance, config.undo_updates
        self._config = config
        self._exporter = Exporter(model, untie=not torch.cuda.is_available())
        if config.addresses and self._exporter.is_padded:
            raise EngineError(
                "the model has more ids than its tokenizer, which servers that already run would "
                "sample; expected no addresses, so that the run starts servers without them"
            )
        self._private = PrivateFolder(SERVERS_PREFIX)
        shared = Path(config.shared_folder or self._private.path)
        self._folder = shared / "weights"
        self._adapter = adapter_for(config, model, self._exporter, shared / "adapter")
        self._transfer = config.transfer_for(next(model.parameters()).device.type)
        self._source: Any = None
        self._why_lost = ""
        self._sending = threading.Lock()
        """Held while weights are written or sent."""
        self._sent = 0
        """Version of the weights that were written or sent last."""
        self._changing = threading.Lock()
        """Held while the state of a server changes."""
        self._numbers = count(1)
        """Numbers the server lists for other processes."""
        self._updating = False
        """Whether weights are sent, so that a server that waits for them will serve."""
        self._closed = threading.Event()
        self._restarts: list[threading.Thread] = []
        self._servers = [Server(address=a.rstrip("/")) for a in config.addresses]
        try:
            self._begin(model)
            self._send(named_weights(model, adapter=self.adapter_only), 0)
        except BaseException:
            self.close()
            raise

    def _begin(self, model: Any) -> None:
        """Starts or joins the servers; has them take the adapter, or gives it up for all."""
        config, dtype = self._config, next(model.parameters()).dtype
        if not config.addresses:
            self._start_servers(dtype)
        problem = self._without_adapter(model)
        if self._adapter is not None and problem:
            from gspo_env.engines.vllm.adapter import warn_whole

            warn_whole(problem)
            self._adapter, self.adapter = None, ""
            if not config.addresses:  # without the layers for adapters
                stop(self._servers)
                self._servers.clear()
                self._start_servers(dtype)
        wait(self._servers, config.server_start_timeout)

    def _without_adapter(self, model: Any) -> str:
        """Writes base and adapter; returns why a server cannot have them, or an empty string."""
        if self._adapter is None:
            return ""
        from gspo_env.engines.vllm.adapter import NAME

        try:
            wait(self._servers, self._config.server_start_timeout)
        except EngineError as error:  # its model has no layers for adapters
            return str(error)
        self._adapter.write(named_weights(model, adapter=True))
        for server in self._servers:
            with server.client(_SEND_SECONDS) as client:
                folder = str(self._adapter.folder)
                if problem := register_adapter(server, client, NAME, folder):
                    return problem
        self._exporter.write(base_weights(model), self._folder)
        self.adapter = NAME
        return ""

    @property
    def adapter_only(self) -> bool:  # type: ignore[override]
        """Whether the servers have the base and get the adapter alone."""
        return bool(self.adapter)

    def _start_servers(self, dtype: torch.dtype) -> None:
        config, place = self._config, self._private.path
        arguments = engine_arguments(config, dtype, self._max_slots, self._max_context)
        if self._adapter is not None:
            arguments = {**self._adapter.arguments, **arguments}
        if self._transfer != "folder":
            arguments["weight_transfer_config"] = {"backend": self._transfer}
        environment = self._environment(config.kv_cache_gib, config.replicas)
        model = place / "model"
        self._exporter.config.save_pretrained(model)
        for number in range(config.replicas):
            self._servers.append(make_server(model, place, number, arguments, environment))
            self._servers[-1].start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers that were started here and serve."""
        return [s.pid for s in self._servers if s.state is State.SERVING and s.pid]

    @property
    def copies(self) -> int:  # type: ignore[override]
        """Servers that serve."""
        return sum(server.state is State.SERVING for server in self._servers)

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """Dtype of the servers' weights; a half-precision one if they differ."""
        dtypes = (s.dtype for s in self._servers if s.state is State.SERVING)
        return next((dtype for dtype in dtypes if dtype != "float32"), "float32")

    @property
    def server_list(self) -> ServerList:
        """The servers, for requests from other processes."""
        number = next(self._numbers)  # before their states are read
        serving = [s for s in self._servers if s.state is State.SERVING]
        return ServerList(
            number=number,
            servers=tuple(
                ServerAddress(address=s.address, socket=s.socket, pid=s.pid) for s in serving
            ),
            weights_version=self.weights_version,
            max_context=self._max_context,
            request_timeout=self._request_timeout,
            adapter=self.adapter,
            prefix=self.prefix,
            cache_slots=self._max_slots if self._config.follow_cache else 0,
            lost=self._none_left(State.SERVING, *self._coming),
        )

    @property
    def _coming(self) -> tuple[State, ...]:
        return (State.STARTING, State.READY) if self._updating else (State.STARTING,)

    def failed(self, address: ServerAddress, reason: str) -> None:
        """Stops using a server that failed another process; does nothing if it was restarted."""
        for server in self._servers:
            current = ServerAddress(address=server.address, socket=server.socket, pid=server.pid)
            if server.state is State.SERVING and current == address:
                self._lose(server, reason)

    def metrics(self) -> dict[str, float]:
        """See `Engine.metrics`."""
        limit = {} if self._cache_limit is None else self._cache_limit.metrics()
        return {
            **limit,
            "rollout/servers": float(self.copies),
            "rollout/servers_lost": float(self.servers_lost),
            "rollout/server_restarts": float(self.server_restarts),
        }

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Waits for requests in flight, sends the weights to every server, resets its prefix cache.

        A server that fails to take them is no longer used, so that none samples with old weights.

        Raises:
            EngineError: Requests still run after minutes, or no server took the weights.
        """
        await drained(lambda: sum(len(server.requests) for server in self._servers))
        await self.update_in_flight(named_tensors, version)

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Pauses each server while it takes the weights; see `Engine.update_in_flight`.

        A server that fails to take them is no longer used: its requests go to another one.

        Raises:
            EngineError: No server took the weights.
        """
        await asyncio.to_thread(self._send, named_tensors, version)
        self.weights_version = version
        for server in self._servers:
            server.failures = 0
        if self._cache_limit is not None:
            self._cache_limit.updated()

    def close(self) -> None:
        """Disconnects from all servers, and stops those that were started here."""
        self._closed.set()
        for server in self._servers:
            if server.state is State.SERVING and server.channel is not None:
                server.channel.shutdown()
                server.channel = None
            if self.adapter and server.guard is None and server.adapter_id:
                free_adapter(server, self.adapter)
        for thread in self._restarts:
            thread.join(RESET_SECONDS)
        stop(self._servers)
        self._private.close()

    def _require_one(self, *states: State) -> None:
        if problem := self._none_left(*states):
            raise EngineError(problem)

    def _none_left(self, *states: State) -> str:
        """Returns an error message if no server has one of the states, else an empty string."""
        if any(server.state in states for server in self._servers):
            return ""
        waits = any(server.state is State.READY for server in self._servers)
        again = (
            f"; it was restarted and waits for the next weights, since transfer "
            f"{self._transfer!r} sends them from the learner only: choose --transfer folder, or "
            "more servers"
        )
        return (
            f"none of the {len(self._servers)} vLLM servers is left; the last one was lost "
            f"because: {self._why_lost}{again if waits else ''}"
        )

    def _lose(self, server: Server, reason: str, *, restart: bool = True) -> None:
        """Stops using a server; one that was started here is started again, if that may help."""
        with self._changing:
            if server.state in (State.STARTING, State.LOST):
                return
            self.servers_lost += 1
            self._why_lost = reason
            logger.error("vLLM server %s is no longer used: %s", server.name, reason)
            again = restart and server.guard is not None and self._may_restart()
            server.state = State.STARTING if again else State.LOST
        self._redirect(server)
        if again:
            thread = threading.Thread(target=self._restart, args=(server,), daemon=True)
            self._restarts.append(thread)
            thread.start()

    def _may_restart(self) -> bool:
        """Counts a restart, if another one is allowed."""
        allowed = self.server_restarts < self._config.max_server_restarts
        self.server_restarts += allowed
        return allowed and not self._closed.is_set()

    def _restart(self, server: Server) -> None:
        """Starts a server again, until it serves or no more restarts are allowed."""
        while True:
            try:
                stop([server])
                server.start()
                wait([server], self._config.server_start_timeout, self._closed)
                if self._transfer != "folder":
                    server.state = State.READY  # the weights are with the learner
                    return
                with self._sending:  # the folder has the current weights
                    problem = self._send_to(server)
                    if not problem:
                        server.state = State.SERVING
                        logger.warning("vLLM server %s was restarted and serves", server.name)
                        return
            except Exception as error:  # requests that wait for this server must fail with it
                problem = f"{type(error).__name__}: {error}"
            if self._closed.is_set():
                return
            self._why_lost = problem
            logger.error("restart of vLLM server %s failed: %s", server.name, problem)
            if not self._may_restart():
                server.state = State.LOST
                return

    def _environment(self, kv_cache_gib: float, replicas: int) -> dict[str, str]:
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, usable_cores() // replicas)),
            "OMP_WAIT_POLICY": "passive",  # the learner and other servers need the cores as well
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_gib))),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(int(self._adapter is not None)),
        }
        if self._transfer == "ipc":  # its handles are pickled; nobody else reaches these servers
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        return environment

    def _send(self, named_tensors: NamedTensors, version: int) -> None:
        """Sends the weights to the servers that run; waits for one that starts if none does."""
        self._updating = True
        try:
            self._send_to_all(named_tensors, version)
        finally:
            self._updating = False

    def _send_to_all(self, named_tensors: NamedTensors, version: int) -> None:
        states = {State.SERVING, State.READY}
        with self._sending:
            self._sent = version
            if self.adapter:
                self._adapter.write(named_tensors)
            elif self._transfer == "folder":
                self._exporter.write(named_tensors, self._folder)
            else:
                self._prepare_source(named_tensors)
            self._send_all(states)
        while not self.copies:
            self._require_one(State.STARTING, State.READY)
            time.sleep(0.1)
            with self._sending:
                self._send_all({State.READY})
        if self._source is not None:
            self._source.set([])

    def _send_all(self, states: set[State]) -> None:
        servers = [server for server in self._servers if server.state in states]
        # a GPU's collectives have to run in the same order
        threads = max(1, len(servers)) if self._transfer == "folder" else 1
        with ThreadPoolExecutor(threads) as pool:
            for server, problem in zip(servers, pool.map(self._send_to, servers), strict=True):
                if problem:
                    healthy = server.is_healthy()
                    self._lose(server, problem, restart=not healthy)
                    if healthy and server.dtype:  # else it was refused, and not touched
                        wake(server)
                    continue
                with self._changing:
                    if server.state in states:  # it may be lost since
                        server.state = State.SERVING

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
            with server.client(_SEND_SECONDS) as client:
                first = not server.dtype
                if first:
                    server.dtype = check_server(client, self._transfer, self._max_context)
                with wake_if_killed(server):
                    client.post("/pause", params=KEEP).raise_for_status()
                    if self._transfer == "folder":
                        if first or not self.adapter:  # a server that starts needs the base as well
                            check_loaded(call(client, "load_checked", folder=str(self._folder)))
                    else:
                        self._open_channel(server, client)
                        call(client, "start_checking")
                        server.channel.send_weights()
                        check_loaded(call(client, "stop_checking"))
                    if self.adapter:
                        folder = str(self._adapter.folder)
                        if not server.adapter_id and (
                            problem := register_adapter(server, client, self.adapter, folder)
                        ):
                            return problem
                        call(client, "load_adapter", folder=folder, number=str(server.adapter_id))
                    # for `Completion.weights_versions`
                    version = {"new_version": f"{self.prefix}{self._sent}"}
                    client.post("/update_weight_version", json=version).raise_for_status()
                    problem = reset_cache(client)
                    if not problem:
                        client.post("/resume").raise_for_status()
                return problem
        except Exception as error:  # NCCL and HTTP have no common base class
            return f"it did not take the weights: {type(error).__name__}: {error}"

    def _open_channel(self, server: Server, client: httpx.Client) -> None:
        from gspo_env.engines.vllm.transfer import open_channel

        if server.channel is None:
            workers = client.get("/get_world_size").raise_for_status().json()["world_size"]
            server.channel = open_channel(self._transfer, server, workers, self._source)
