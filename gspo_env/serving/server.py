"""The policy server: one HTTP server a process, with a key for each session."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import os
import secrets
import socket
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from gspo_env.errors import ConfigError, RefusedError, raised_as
from gspo_env.serving.session import (
    ANSWER_SECONDS,
    Answer,
    Reward,
    Session,
    session_closed,
)

logger = logging.getLogger(__name__)

_CLOSED = 4096
"""Closed sessions whose keys are remembered, so that they get 410 instead of 401."""
_END_SECONDS = 5.0
"""Time that the thread of a server has to end."""
_LISTEN_SECONDS = 60.0
"""Time in which the thread of the server has to take a further socket."""
_BACKLOG = 128
"""Connections of such a socket that wait to be accepted."""
_KEEP_ALIVE = 75
"""Seconds of an idle connection; more than the pools of clients keep one."""


class PolicyServer:
    """An HTTP server in a thread of its own, which serves any number of sessions.

    Args:
        host: The address to listen on.
        port: The port; 0 takes a free one.
        log: Whether each request is logged, at the level INFO of the logger `uvicorn.access`.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, log: bool = False) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        with raised_as(ConfigError, f"cannot listen on {host}:{port}", OSError):
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
            # asyncio does not set it on such sockets; without it each answer waits for 40 ms
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._server = self._make_server(log)
        self._thread = threading.Thread(target=self._run, name="gspo-env-server", daemon=True)
        self._thread.start()
        _RUNNING.add(self)

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
        session = Session(
            self, answer, reward, key=key, training=training, model=model, seconds=seconds
        )
        with self._lock:
            if self._sessions.setdefault(_digest(key), session) is not session:
                raise ConfigError("another session of this server has the same key")
            self._closed.pop(_digest(key), None)
        return session

    def listen(self, session: Session, listener: socket.socket) -> None:
        """See `Session.listen`."""
        work = self._listen(session, listener)
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_LISTEN_SECONDS)

    async def _listen(self, session: Session, listener: socket.socket) -> None:
        from gspo_env.serving.connection import Connection

        def connect() -> Connection:
            state = {"server_state": self._server.server_state, "app_state": {}}
            connection = Connection(config=self._server.config, _loop=self._loop, **state)
            connection.only = session
            return connection

        server = await self._loop.create_server(connect, sock=listener, backlog=_BACKLOG)
        session.listeners.append((listener, server))
        if session.closed:
            session.end()

    def find(self, key: str, only: Session | None = None) -> Session:
        """Returns the session of a key.

        Args:
            key: The key.
            only: The only session that counts.

        Raises:
            RefusedError: No session has it, or its session has ended.
        """
        digest = _digest(key)  # its time of look-up says nothing about a guess of the key
        session = self._sessions.get(digest)
        if session is not None and only in (None, session):
            return session
        if digest in self._closed and (only is None or digest == _digest(only.key)):
            raise session_closed()
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
        """Closes all sessions and ends the server. Safe to call twice."""
        for session in list(self._sessions.values()):
            session.close()
        self._server.should_exit = True
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(_END_SECONDS)
        self._socket.close()

    def leave_to_parent(self) -> None:
        """Gives up the sockets in a child that was forked; those of the parent stay open."""
        listeners = [one for s in self._sessions.values() for one, _ in s.listeners]
        transports = [c.transport for c in self._server.server_state.connections]
        sockets = [self._socket, *listeners, *(t.get_extra_info("socket") for t in transports)]
        null = os.open(os.devnull, os.O_RDWR)
        for number in (one.fileno() for one in sockets):
            if number >= 0:
                os.dup2(null, number, inheritable=False)  # its object may close the number later
        os.close(null)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has ended, and with it all requests
            logger.debug("the server has ended already")

    def _make_server(self, log: bool) -> Any:
        import uvicorn

        from gspo_env.serving.app import make_app
        from gspo_env.serving.connection import Connection

        config = uvicorn.Config(
            make_app(self),
            http=Connection,
            ws="none",
            lifespan="off",
            loop="asyncio",
            access_log=log,
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


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


_LOCK = threading.Lock()
_SHARED: list[PolicyServer] = []
_RUNNING: weakref.WeakSet[PolicyServer] = weakref.WeakSet()


def address() -> PolicyServer:
    """Returns the server of this process on 127.0.0.1, which starts at the first call."""
    with _LOCK:
        if not _SHARED:
            _SHARED.append(PolicyServer())
        return _SHARED[0]


def _close_shared() -> None:
    while _SHARED:
        _SHARED.pop().close()


def _leave_to_parent() -> None:
    for server in _RUNNING:
        server.leave_to_parent()
    _RUNNING.clear()
    _SHARED.clear()


atexit.register(_close_shared)
os.register_at_fork(after_in_child=_leave_to_parent)
