"""The address of the policy: one HTTP server a process, with a key for each session."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import hmac
import itertools
import logging
import os
import secrets
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from gspo_env.errors import ConfigError
from gspo_env.serving.records import Answer, RefusedError, Reply, Request, Reward

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 3600.0
"""Default of the time in which an answer has to come."""
_CLOSED = 4096
"""Closed sessions whose keys are remembered, so that they get 410 instead of 401."""
_END_SECONDS = 5.0
"""Time that the thread of a server has to end."""
_KEEP_ALIVE = 75
"""Seconds of an idle connection; more than the pools of clients keep one."""


class Session:
    """One place of the address: a key, and what answers the requests with it.

    Attributes:
        url: The base URL of OpenAI's clients, which ends with `/v1`.
        key: The key of all requests.
        model: The model's name in `/v1/models`.
        counts: Requests by what they asked for without effect, such as `temperature`.
        connections: Those with a request in flight, or with an answer that is not read yet.
    """

    def __init__(
        self, address: Address, answer: Answer, reward: Reward | None, key: str, **terms: Any
    ) -> None:
        """Makes a session; use `Address.open`."""
        self.url, self.key = f"{address.url}/v1", key
        self.training: bool = terms["training"]
        self.model: str = terms["model"]
        self.seconds: float = terms["seconds"]
        self.counts: Counter[str] = Counter()
        self.connections: set[Any] = set()
        self.closed = False
        self.reward = reward
        self._address, self._answer = address, answer
        self._tasks: set[asyncio.Future[Reply]] = set()
        self._numbers, self._calls = itertools.count(1), itertools.count(1)
        self._answered: set[str] = set()

    @property
    def environment(self) -> dict[str, str]:
        """The variables in which programs look for an address and a key."""
        base = self._address.url
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": self.key,
        }

    def close(self) -> None:
        """Ends the open requests and refuses later ones; may be called again, from any thread."""
        self._address.forget(self)

    def new_id(self, prefix: str) -> str:
        """Returns the id of the next answer; the same requests get the same ids."""
        return f"{prefix}{next(self._numbers):06d}"

    async def ask(self, request: Request) -> Reply:
        """Gets the answer to a request, in the event loop of the server.

        Raises:
            RefusedError: The session was closed, the answer took too long, or was refused.
        """
        if self.training:
            if request.temperature is not None:
                self._count("temperature")
            request = replace(request, temperature=None, seed=None)
        if self.closed:
            raise gone()
        future = _as_future(self._answer(request))
        self._tasks.add(future)
        try:
            async with asyncio.timeout(self.seconds):
                reply = await future
        except TimeoutError:
            raise RefusedError(
                f"the policy did not answer within {self.seconds:g} s", status=504
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.closed or task is None or not task.cancelling():
                raise gone() from None
            raise
        finally:
            self._tasks.discard(future)
            future.cancel()
        return self._finish(request, reply)

    def take_reward(self, name: str, value: float) -> None:
        """Passes a reward on.

        Raises:
            KeyError: No answer has this id.
            LateRewardError: The step of its turn has returned.
        """
        if name not in self._answered or self.reward is None:
            raise KeyError(name)
        self.reward(name, value)

    def end(self) -> None:
        """Ends what runs; called in the event loop of the server, once the session is closed."""
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self.connections):
            connection.end()

    def _count(self, name: str) -> None:
        self.counts[name] += 1
        if name not in _SAID:
            _SAID.add(name)
            logger.warning(
                "A program asked for a %s; in training the rollout's holds (said once).", name
            )

    def _finish(self, request: Request, reply: Reply) -> Reply:
        """Returns the reply with all ids and the reason that wire formats have."""
        calls = tuple(
            call if call.id else replace(call, id=f"call{next(self._calls):05d}")
            for call in reply.message.tool_calls
        )
        reason = reply.finish_reason
        reason = "tool_calls" if reason == "stop" and calls else reason
        reply = replace(
            reply,
            message=replace(reply.message, tool_calls=calls),
            finish_reason=reason,
            id=reply.id or request.id,
        )
        if reason != "context":
            self._answered.add(reply.id)
        return reply


class Address:
    """An HTTP server in a thread of its own, which serves any number of sessions.

    Args:
        host: The address to listen on.
        port: The port; 0 takes a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._nobody = _digest(secrets.token_hex(32))
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
            # asyncio does not set it on such sockets; without it each answer waits for 40 ms
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._server = self._make_server()
        self._thread = threading.Thread(target=self._run, name="gspo-env-address", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The root of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def open(
        self,
        answer: Answer,
        reward: Reward | None = None,
        *,
        training: bool = True,
        model: str = "policy",
        key: str | None = None,
        seconds: float = ANSWER_SECONDS,
    ) -> Session:
        """Opens a session.

        Args:
            answer: Answers the requests.
            reward: Takes rewards of answers; without it `/v1/reward` knows no answer.
            training: Whether the rollout's temperature and seed hold, not those of requests.
            model: The model's name in `/v1/models`.
            key: The key of requests; by default a new one.
            seconds: Time in which an answer has to come.

        Raises:
            ConfigError: The key is in use.
        """
        key = key or f"gspo-{secrets.token_hex(24)}"
        terms = {"training": training, "model": model, "seconds": seconds}
        session = Session(self, answer, reward, key, **terms)
        with self._lock:
            if self._sessions.setdefault(_digest(key), session) is not session:
                raise ConfigError("another session of this address has the same key")
            self._closed.pop(_digest(key), None)
        return session

    def find(self, key: str) -> Session:
        """Returns the session of a key.

        Raises:
            RefusedError: No session has it, or its session has ended.
        """
        name = _digest(key)  # a digest tells nothing of how much of a guess is right
        session = self._sessions.get(name)
        known = hmac.compare_digest(name, name if session is not None else self._nobody)
        if known and session is not None:
            return session
        if name in self._closed:
            raise gone()
        raise RefusedError(
            "the key is wrong or missing; expected the header `Authorization: Bearer KEY` or "
            "`x-api-key: KEY`",
            status=401,
            code="invalid_api_key",
        )

    def forget(self, session: Session) -> None:
        """Closes a session."""
        name = _digest(session.key)
        with self._lock:
            if session.closed:
                return
            session.closed = True
            self._sessions.pop(name, None)
            self._closed[name] = None
            while len(self._closed) > _CLOSED:
                self._closed.popitem(last=False)
        self._call(session.end)

    def close(self) -> None:
        """Closes all sessions and ends the server; may be called again."""
        for session in list(self._sessions.values()):
            session.close()
        self._server.should_exit = True
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(_END_SECONDS)
        self._socket.close()

    def leave_to_parent(self) -> None:
        """Closes the sockets that a forked child shares with its parent."""
        from gspo_env.serving.connection import forget

        self._socket.close()
        forget(self._server.server_state.connections)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has ended, and with it all requests
            logger.debug("the address has ended already")

    def _make_server(self) -> Any:
        import uvicorn

        from gspo_env.serving.app import make_app
        from gspo_env.serving.connection import Connection

        config = uvicorn.Config(
            make_app(self),
            http=Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=2,
        )
        return uvicorn.Server(config)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))


def gone() -> RefusedError:
    """Returns the error of a request to a session that has ended."""
    return RefusedError("the episode of this key has ended", status=410, code="session_closed")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def _as_future(answer: Awaitable[Reply] | Future[Reply]) -> asyncio.Future[Reply]:
    if isinstance(answer, Future):
        return asyncio.wrap_future(answer)
    return asyncio.ensure_future(answer)


_SAID: set[str] = set()
"""What the log has said once."""
_LOCK = threading.Lock()
_SHARED: list[Address] = []


def address() -> Address:
    """Returns the address of this process on 127.0.0.1, which starts at the first call."""
    with _LOCK:
        if not _SHARED:
            _SHARED.append(Address())
        return _SHARED[0]


def _close_shared() -> None:
    while _SHARED:
        _SHARED.pop().close()


def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.Lock()
    _FORGOTTEN.extend(_SHARED)
    _SHARED.clear()
    for shared in _FORGOTTEN:
        shared.leave_to_parent()


_FORGOTTEN: list[Address] = []
"""In a child: addresses of the parent. They are kept, because the end of an event loop would
change the parent's."""
atexit.register(_close_shared)
os.register_at_fork(after_in_child=_after_fork)
