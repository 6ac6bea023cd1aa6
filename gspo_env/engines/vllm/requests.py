"""Requests to vLLM servers, from the process that looks after them or from another one.

Imports no torch, so that the workers of a rollout do not need its memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2 as httpx

from gspo_env.engines.base import Completion, NamedTensors, Sampling, check_room, sample_parts
from gspo_env.engines.vllm.calls import read_completion, sampling_fields
from gspo_env.engines.vllm.process import Server, State
from gspo_env.errors import EngineError

_KEEP_ALIVE = 2.0
"""Seconds until an idle connection is closed. A server closes it after 5 seconds; a longer time
here would let requests use a connection that the server is closing."""
_MAX_FAILURES = 512
"""Broken connections to a healthy server, between two updates of the weights, before it is lost."""
_HEALTH_SECONDS = 30.0
"""Time in which a server that broke a connection must say that it is healthy. It may be busy: the
other servers' requests come to it when they are lost."""


class ServerRequests:
    """Samples on the server with the fewest requests; repeats what a server drops on another one.

    Args:
        max_slots: Maximum number of requests in flight.
        max_context: Maximum tokens of one sequence.
        request_timeout: Seconds that a server may take for one action.
    """

    def __init__(self, *, max_slots: int, max_context: int, request_timeout: float) -> None:
        self.weights_version = 0
        self._max_slots, self._max_context = max_slots, max_context
        self._request_timeout = request_timeout
        self._servers: list[Server] = []
        self._clients: tuple[asyncio.AbstractEventLoop, dict[Server, httpx.AsyncClient]] | None
        self._clients = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`.

        Raises:
            EngineError: The prompt is empty or leaves no room for `max_tokens`, a server refused
                the request, or no server is left.
        """
        check_room(prompt_ids, sampling, self._max_context)
        if sampling.ends is not None:
            return await sample_parts(self.generate, prompt_ids, sampling)
        return await self._sample(prompt_ids, sampling)

    async def generate_on(
        self, copy: int, prompt_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        """Samples one action on a server, or on another one if it is lost.

        Args:
            copy: Its place among the servers that serve.
            prompt_ids: See `generate`.
            sampling: See `generate`, without `ends`.

        Raises:
            EngineError: See `generate`.
        """
        check_room(prompt_ids, sampling, self._max_context)
        serving = [server for server in self._servers if server.state is State.SERVING]
        first = serving[copy] if copy < len(serving) else None
        return await self._sample(prompt_ids, sampling, first)

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, first: Server | None = None
    ) -> Completion:
        """Samples on a server, and on others as long as that fails."""
        body = {"token_ids": list(prompt_ids), "sampling_params": sampling_fields(sampling)}
        while True:
            server, first = first or await self._choose(), None
            post = self._client(server).post("/inference/v1/generate", json=body)
            request = asyncio.ensure_future(post)
            server.requests.add(request)
            if server.state is not State.SERVING:  # lost by another thread
                request.cancel()
            try:
                response = await request
                reason = f"answered {response.status_code}"
                if response.status_code < 500:
                    done = read_completion(server, response)
                    if isinstance(done, Completion):
                        return done
                    reason = done
                self._lose(server, reason)
            except httpx.TransportError as error:
                # one connection may break; the server is lost if it is not healthy either
                server.failures += 1
                usable = server.failures <= _MAX_FAILURES
                healthy = usable and await asyncio.to_thread(server.is_healthy, _HEALTH_SECONDS)
                if not healthy:
                    self._lose(server, f"{type(error).__name__}: {error}")
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # else `_redirect` cancelled the request
            finally:
                server.requests.discard(request)

    def release(self, session: str) -> None:
        """Does nothing: vLLM's prefix cache evicts the least recently used blocks."""

    async def _choose(self) -> Server:
        """Returns the serving server with the fewest requests; waits for one that is starting."""
        while True:
            serving = [server for server in self._servers if server.state is State.SERVING]
            if serving:
                return min(serving, key=lambda server: len(server.requests))
            self._require_one(*self._coming)
            await asyncio.sleep(0.1)

    def _redirect(self, server: Server) -> None:
        """Sends the requests of a server that is not used any more to other ones; in any thread.

        It may be paused or hang, so that they would wait for it.
        """
        for request in tuple(server.requests):
            request.get_loop().call_soon_threadsafe(request.cancel)

    @property
    def _coming(self) -> tuple[State, ...]:
        """The states of servers that will serve without anything else happening."""
        return (State.STARTING,)

    def _require_one(self, *states: State) -> None:
        """Raises an error if no server has one of the states."""
        raise NotImplementedError

    def _lose(self, server: Server, reason: str) -> None:
        """Stops using a server."""
        raise NotImplementedError

    def _client(self, server: Server) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._clients is None or self._clients[0] is not loop:
            self._clients = loop, {}
        if server not in self._clients[1]:
            limits = httpx.Limits(max_connections=self._max_slots + 8, keepalive_expiry=_KEEP_ALIVE)
            transport = None
            if server.socket:
                transport = httpx.AsyncHTTPTransport(uds=server.socket, limits=limits)
            self._clients[1][server] = httpx.AsyncClient(
                base_url=server.address,
                transport=transport,
                limits=limits,
                timeout=httpx.Timeout(self._request_timeout, connect=10.0),
            )
        return self._clients[1][server]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """A server that has the current weights."""

    address: str
    socket: str = ""
    """Path of its Unix socket; empty if it listens at its address."""
    pid: int = 0
    """Process id, which differs after a restart; 0 for a server that someone else started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerList:
    """What another process needs to know of the servers in order to sample on them."""

    number: int = 0
    """Higher than that of all earlier messages, which may arrive later."""
    servers: tuple[ServerAddress, ...] = ()
    weights_version: int = 0
    max_context: int = 4096
    request_timeout: float = 1800.0
    lost: str = ""
    """Why no server is left and none starts; empty as long as one may serve."""


class ServerClient(ServerRequests):
    """Samples on servers that another process starts, watches and updates.

    Args:
        fleet: The servers at the start; `see` replaces them.
        max_slots: Maximum number of requests in flight.
    """

    def __init__(self, fleet: ServerList, max_slots: int) -> None:
        timeout = fleet.request_timeout
        super().__init__(
            max_slots=max_slots, max_context=fleet.max_context, request_timeout=timeout
        )
        self._known: dict[ServerAddress, Server] = {}
        self._failed: dict[ServerAddress, str] = {}
        self._fleet = fleet
        self._lock = threading.Lock()
        """Held while the servers or their failures change."""
        self.see(fleet)

    def see(self, fleet: ServerList) -> None:
        """Takes over which servers serve, and the version of their weights; from any thread.

        What was told before the newest message is left out.
        """
        with self._lock:
            if fleet.number >= self._fleet.number:
                self._see(fleet)

    def _see(self, fleet: ServerList) -> None:
        for address in fleet.servers:
            if address not in self._known:
                self._known[address] = Server(
                    address=address.address, socket=address.socket, pid=address.pid
                )
        if fleet.weights_version != self.weights_version:
            for server in self._known.values():
                server.failures = 0
        self._fleet = fleet
        self.weights_version = fleet.weights_version
        before = self._servers
        self._servers = [self._known[address] for address in fleet.servers]
        for server in before:
            if server not in self._servers:
                self._redirect(server)

    def take_failed(self) -> dict[ServerAddress, str]:
        """Returns the servers that failed since the last call, with the reasons."""
        with self._lock:
            failed, self._failed = self._failed, {}
        return failed

    async def sleep(self) -> None:
        """Does nothing: servers have their own memory."""

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Raises an error: only the process that looks after the servers updates them."""
        raise EngineError("weights are sent by the process that started the servers")

    def close(self) -> None:
        """Does nothing: the servers belong to another process."""

    def _require_one(self, *states: State) -> None:
        if self._fleet.lost:
            raise EngineError(self._fleet.lost)

    def _lose(self, server: Server, reason: str) -> None:
        server.state = State.LOST  # until it is seen with another process id
        self._redirect(server)
        address = ServerAddress(address=server.address, socket=server.socket, pid=server.pid)
        with self._lock:
            self._failed[address] = reason
