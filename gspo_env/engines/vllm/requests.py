"""Requests to vLLM servers, from the process that looks after them or from another one.

Imports no torch, so that the workers of a rollout do not need its memory.
"""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx

from gspo_env.engines.base import Completion, Engine, Sampling, check_room
from gspo_env.engines.parts import sample_parts
from gspo_env.engines.vllm.process import Server, State
from gspo_env.engines.vllm.settings import EXTENSION
from gspo_env.errors import DAMAGE, EngineError, raised_as

if TYPE_CHECKING:
    from gspo_env.engines.vllm.cache_limit import CacheLimit

logger = logging.getLogger(__name__)

SERVERS_PREFIX = "gspo-env-servers-"
"""The beginning of the name of a run's temporary folder for its servers."""
KEEP = {"mode": "keep", "clear_cache": "false"}
"""Sampling stops after the current step and keeps its requests; `reset_cache` clears."""
RESET_SECONDS = 60.0
"""Maximum time until a server has reset its cache."""
_WAKE = """import sys
if not sys.stdin.read(1):
    from gspo_env.engines.vllm.requests import Server, wake
    wake(Server(address=sys.argv[1]))
"""
_KEEP_ALIVE = 2.0
"""Seconds until an idle connection is closed. A server closes it after 5 seconds; a longer time
here would let requests use a connection that the server is closing."""
_MAX_FAILURES = 512
"""Broken connections to a healthy server, between two updates of the weights, before it is lost."""
_HEALTH_SECONDS = 30.0
"""Time in which a server that broke a connection must say that it is healthy. It may be busy: the
other servers' requests come to it when they are lost."""


def cache_limit_for(share: float, read: Callable[[Any], Awaitable[str]]) -> CacheLimit | None:
    """Returns what limits requests by vLLM's cache; None for a share of 0."""
    if not share:
        return None
    from gspo_env.engines.vllm.cache_limit import CacheLimit

    return CacheLimit(read, share)


class ServerRequests(Engine):
    """Samples on the server with the fewest requests; repeats what a server drops on another one.

    Args:
        max_slots: Maximum number of requests in flight.
        max_context: Maximum tokens of one sequence.
        request_timeout: Seconds that a server may take for one action.
        cache_share: Part of the servers' caches that its requests may fill; 0 ignores the caches.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_context: int,
        request_timeout: float,
        cache_share: float = 0.0,
    ) -> None:
        self.weights_version = 0
        self.adapter = ""
        """Name of the adapter that the servers sample with; empty for whole weights."""
        self.prefix = ""
        """Begins the version that the servers give its weights, unlike those of other runs."""
        self._max_slots, self._max_context = max_slots, max_context
        self._request_timeout = request_timeout
        self._servers: list[Server] = []
        self._clients: tuple[asyncio.AbstractEventLoop, dict[Server, httpx.AsyncClient]] | None
        self._clients = None
        self._cache_limit = cache_limit_for(cache_share, self._read_metrics)

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
            part = partial(self.generate, session=session)
            return await sample_parts(part, prompt_ids, sampling)
        if self._cache_limit is None:
            return await self._sample(prompt_ids, sampling)
        while True:
            most = sampling.max_tokens
            async with self._cache_limit.room(self._serving, prompt_ids, most, session) as room:
                done = await self._post(room.copy, self._body(prompt_ids, sampling))
                if done is not None:
                    room.tokens = len(done.token_ids)
                    return done

    def release(self, session: str) -> None:
        """Makes room for other episodes; see `Engine.release`."""
        if self._cache_limit is not None:
            self._cache_limit.release(session)

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
        body = self._body(prompt_ids, sampling)
        while True:
            server, first = first or await self._choose(), None
            done = await self._post(server, body)
            if done is not None:
                return done

    def _body(self, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        body = {"token_ids": list(prompt_ids), "sampling_params": sampling_fields(sampling)}
        return {**body, "model": self.adapter} if self.adapter else body

    async def _post(self, server: Server, body: dict[str, Any]) -> Completion | None:
        """Samples on a server; returns None if it did not, and loses it if it is to blame."""
        post = self._client(server).post("/inference/v1/generate", json=body)
        request = asyncio.ensure_future(post)
        server.requests.add(request)
        if server.state is not State.SERVING:  # lost by another thread
            request.cancel()
        try:
            response = await request
            reason = f"answered {response.status_code}"
            if response.status_code == 404 and self.adapter:  # somebody started it again
                reason = f"does not have the adapter: {response.text[:200]}"
            elif response.status_code < 500:
                done = read_completion(server, response, self.prefix)
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
        return None

    async def _choose(self) -> Server:
        """Returns the serving server with the fewest requests; waits for one that is starting."""
        while True:
            if serving := self._serving():
                return min(serving, key=lambda server: len(server.requests))
            await asyncio.sleep(0.1)

    def _serving(self) -> list[Server]:
        """Returns the servers that serve.

        Raises:
            EngineError: None serves, and none is starting.
        """
        serving = [server for server in self._servers if server.state is State.SERVING]
        if not serving:
            self._require_one(*self._coming)
        return serving

    async def _read_metrics(self, server: Server) -> str:
        seconds = httpx.Timeout(5.0)
        response = await self._client(server).get("/metrics", timeout=seconds)
        return response.raise_for_status().text

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
                headers=server.headers,
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
    adapter: str = ""
    """See `ServerRequests.adapter`."""
    prefix: str = ""
    """See `ServerRequests.prefix`."""
    cache_slots: int = 0
    """Requests of all processes at once, of which each fills its part of the servers' caches; 0
    ignores the caches."""
    lost: str = ""
    """Why no server is left and none starts; empty as long as one may serve."""


class ServerClient(ServerRequests):
    """Samples on servers that another process starts, watches and updates.

    Args:
        server_list: The initial servers; `replace_servers` takes newer ones.
        max_slots: Maximum number of requests in flight.
    """

    def __init__(self, server_list: ServerList, max_slots: int) -> None:
        slots = server_list.cache_slots
        super().__init__(
            max_slots=max_slots,
            max_context=server_list.max_context,
            request_timeout=server_list.request_timeout,
            cache_share=max_slots / slots if slots else 0.0,
        )
        self._servers_by_address: dict[ServerAddress, Server] = {}
        self._failed: dict[ServerAddress, str] = {}
        self._server_list, self.prefix = server_list, server_list.prefix
        self._lock = threading.Lock()
        """Held while the servers or their failures change."""
        self.replace_servers(server_list)

    def replace_servers(self, server_list: ServerList) -> None:
        """Replaces the servers and the version of their weights; callable from any thread.

        Lists that are older than the newest one are ignored.
        """
        with self._lock:
            if server_list.number >= self._server_list.number:
                self._replace_servers(server_list)

    def _replace_servers(self, server_list: ServerList) -> None:
        for address in server_list.servers:
            if address not in self._servers_by_address:
                self._servers_by_address[address] = Server(
                    address=address.address, socket=address.socket, pid=address.pid
                )
        if server_list.weights_version != self.weights_version:
            for server in self._servers_by_address.values():
                server.failures = 0
            if self._cache_limit is not None:
                self._cache_limit.updated()
        self._server_list = server_list
        self.weights_version, self.adapter = server_list.weights_version, server_list.adapter
        before = self._servers
        self._servers = [self._servers_by_address[address] for address in server_list.servers]
        for server in before:
            if server not in self._servers:
                self._redirect(server)

    def take_failed(self) -> dict[ServerAddress, str]:
        """Returns the servers that failed since the last call, with the reasons."""
        with self._lock:
            failed, self._failed = self._failed, {}
        return failed

    def _require_one(self, *states: State) -> None:
        if self._server_list.lost:
            raise EngineError(self._server_list.lost)

    def _lose(self, server: Server, reason: str) -> None:
        server.state = State.LOST  # until it is seen with another process id
        self._redirect(server)
        address = ServerAddress(address=server.address, socket=server.socket, pid=server.pid)
        with self._lock:
            self._failed[address] = reason


def call(client: httpx.Client, method: str, **keywords: str) -> Any:
    """Calls a method in each worker of a server; returns their answers.

    Raises:
        EngineError: The method failed there, with the server's reason.
    """
    body = {"method": method, "kwargs": keywords}
    answer = client.post("/collective_rpc", json=body)
    if answer.status_code != 200:
        raise EngineError(f"{method} answered {answer.status_code}: {answer.text[:300]}")
    return answer.json().get("results")


def register_adapter(server: Server, client: httpx.Client, name: str, folder: str) -> str:
    """Has a server sample with an adapter on request; returns an error message, or "".

    Raises:
        EngineError: The server has another adapter of this name.
    """
    models = client.get("/v1/models").raise_for_status().json()["data"]
    for root in (model["root"] for model in models if model["id"] == name):
        if root != folder and not _is_left_over(root):
            raise EngineError(
                f"vLLM server {server.name} has an adapter {name!r} of its own, from {root!r}; "
                "expected none of this name: end the run that uses it, or free it with POST "
                "/v1/unload_lora_adapter"
            )
        client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
    before = call(client, "adapter_ids")
    body = {"lora_name": name, "lora_path": folder}
    answer = client.post("/v1/load_lora_adapter", json=body)
    if answer.status_code != 200:
        return (
            f"it answered {answer.status_code} to an adapter ({answer.text[:300]}); a running "
            "server needs --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    new = set(call(client, "adapter_ids")[0]).difference(before[0])
    if len(new) != 1:
        return f"it got {len(new)} adapters at the same time; expected one"
    (server.adapter_id,) = new
    return ""


def _is_left_over(root: str) -> bool:
    """Returns whether an adapter is that of a run that was killed, whose folder is gone."""
    path = Path(root)
    return path.parent.name.startswith(SERVERS_PREFIX) and not path.exists()


def free_adapter(server: Server, name: str) -> None:
    """Frees the adapter of a server that goes on without this run."""
    try:
        with server.client(RESET_SECONDS) as client:
            body = {"lora_name": name}
            client.post("/v1/unload_lora_adapter", json=body).raise_for_status()
            call(client, "free_adapter", number=str(server.adapter_id))
    except (httpx.HTTPError, EngineError) as error:
        logger.warning("vLLM server %s keeps the adapter %r: %s", server.name, name, error)


def reset_cache(client: httpx.Client) -> str:
    """Resets a paused server's prefix cache; returns an error message, or an empty string.

    Requests in flight lose their keys and values too, and compute them anew when they go on.
    """
    deadline = time.monotonic() + RESET_SECONDS
    every = {"reset_running_requests": "true"}
    while not client.post("/reset_prefix_cache", params=every).raise_for_status().json()["success"]:
        if time.monotonic() > deadline:
            return f"it did not reset its prefix cache within {RESET_SECONDS:g} s"
        time.sleep(0.05)
    return ""


def wake(server: Server) -> None:
    """Lets a server that this run lost answer others, and go on with their requests.

    Those of this run end with their connections. Its caches are cleared, and its version is none
    that the run accepts.
    """
    try:
        with server.client(RESET_SECONDS) as client:
            version = {"new_version": "unknown"}
            client.post("/update_weight_version", json=version).raise_for_status()
            client.post("/pause", params=KEEP).raise_for_status()
            problem = reset_cache(client)
            client.post("/resume").raise_for_status()
    except httpx.HTTPError as error:
        problem = f"it may stay paused, POST /resume ends it: {error}"
    if problem:
        logger.error("vLLM server %s serves others, but %s", server.name, problem)


@contextmanager
def wake_if_killed(server: Server) -> Iterator[None]:
    """Has a process wake a server of somebody else if this process is killed meanwhile."""
    if server.guard is not None:  # it ends with this process
        yield
        return
    command = [sys.executable, "-c", _WAKE, server.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield
        finally:
            process.communicate(b"\n")


def check_server(client: httpx.Client, backend: str, max_context: int) -> str:
    """Returns the dtype of a server's weights.

    Raises:
        EngineError: The server cannot check its weights, takes shorter sequences, or was started
            with another backend: the trainer would wait for it.
    """
    answer = client.get("/server_info", params={"config_format": "json"})
    if answer.is_server_error:
        raise EngineError(
            f"its /server_info failed with {answer.status_code}, as it does where its Python has "
            "no pip, which vLLM lists packages with; install pip there"
        )
    config = answer.raise_for_status().json()["vllm_config"]
    extension = config["parallel_config"]["worker_extension_cls"]
    if extension != EXTENSION:
        raise EngineError(
            f"its worker extension is {extension!r}; expected {EXTENSION!r}, which checks the "
            f"weights: install gspo-env there and start it with --worker-extension-cls {EXTENSION}"
        )
    started_with = (config["weight_transfer_config"] or {}).get("backend")
    if backend not in ("folder", started_with):
        raise EngineError(
            f"its weight transfer backend is {started_with!r}; expected {backend!r}: start it with "
            f"""--weight-transfer-config '{{"backend": "{backend}"}}' or choose --transfer folder"""
        )
    length = config["model_config"]["max_model_len"]
    if length < max_context:
        raise EngineError(
            f"its maximum length is {length} tokens; expected at least the run's {max_context}: "
            f"start it with --max-model-len {max_context} or lower --rollout.max-context"
        )
    return str(config["model_config"]["dtype"]).removeprefix("torch.")


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Returns the sampling parameters of vLLM, for an engine in this process and for a server."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # only the stop ids end an action
        "seed": sampling.seed % 2**63,
        "logprobs": 0,
        "detokenize": False,
    }


def read_completion(server: Server, response: httpx.Response, prefix: str) -> Completion | str:
    """Reads an answer; returns why the server cannot be used any more if it gave no completion.

    Args:
        server: The server.
        response: Its answer.
        prefix: See `ServerRequests.prefix`.

    Raises:
        EngineError: The server refused the request, or the answer cannot be read.
    """
    if response.status_code != 200:
        raise EngineError(
            f"vLLM server {server.name} refused a request with {response.status_code}: "
            f"{response.text[:300]}"
        )
    problem = f"vLLM server {server.name} gave an answer that cannot be read"
    with raised_as(EngineError, problem, *DAMAGE, mend=f": {response.text[:300]}"):
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "abort":  # as a server does when it is stopped
            return "aborted a request"
        spans = [(span["version"], span["start"]) for span in choice["weight_versions"]]
        pattern = re.compile(re.escape(prefix) + r"(\d+)")
        if others := [version for version, _ in spans if not pattern.fullmatch(version)]:
            return f"has the weights {others[0]!r}, which this run did not send"
        return Completion.of(
            choice["token_ids"],
            [place["logprob"] for place in choice["logprobs"]["content"]],
            choice["finish_reason"],
            [(int(version.removeprefix(prefix)), start) for version, start in spans],
        )
