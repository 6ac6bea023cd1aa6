"""A connection of the server with limits for clients that are slow, silent or do not read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from gspo_env.serving.session import Session

SCOPE = "gspo_env.connection"
"""Key of the connection in the scope of a request."""
HEAD_SECONDS = 60.0
"""Time in which a connection has to send the head of a request once it has begun; with
hundreds of programs on a busy machine, seconds pass between the two."""
STALL_SECONDS = 60.0
"""Time for which a client may leave an answer unread."""
MOST = 4096
"""Open connections; a further one takes the place of the one that was idle for the longest time."""
MOST_OF_ONE = 64
"""Open connections of a socket that serves one session only."""
_LENGTHS = {b"content-length", b"transfer-encoding"}
"""Headers that tell where a body ends."""


class Connection(H11Protocol):
    """A connection, which belongs to a session from its request until the answer is sent.

    An idle one belongs to nobody: its client may be about to use it for another session.
    """

    session: Session | None = None
    only: Session | None = None
    """The session of the socket from which it comes; None where it may be any."""
    idle_since = 0.0
    """Time of the loop since which it has no request."""
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes a connection too many: the longest idle one, or this one if all are in use."""
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        others, most = self.connections, MOST
        if self.only is not None:
            others, most = self.only.opened, MOST_OF_ONE
            others.add(self)
        if len(others) > most:
            idle = [c for c in others if isinstance(c, Connection) and c.is_idle()]
            min(idle, key=lambda c: c.idle_since, default=self).transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Passes data on and watches that a head becomes complete."""
        super().data_received(data)
        self._mark()
        self._watch()

    def on_response_complete(self) -> None:
        """Leaves the session, unless its client has yet to read the answer."""
        self.idle_since = self.loop.time()
        if self._stall is None:
            self.use(None)
        super().on_response_complete()
        self._mark()  # a further request may have come already

    def is_idle(self) -> bool:
        """Returns whether it has no request, and its client has read the answers."""
        done = self.cycle is None or self.cycle.response_complete
        return done and self._stall is None and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timers."""
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        self.use(None)
        if self.only is not None:
            self.only.opened.discard(self)
        super().connection_lost(exc)

    def use(self, session: Session | None) -> None:
        """Notes the session that uses the connection."""
        if self.session is not None:
            self.session.connections.discard(self)
        self.session = session
        if session is not None:
            session.connections.add(self)

    def end(self) -> None:
        """Ends a connection in use: now if its answer is not read, else after the answer."""
        if self.cycle is not None and not self.cycle.response_complete and self._stall is None:
            self.cycle.keep_alive = False
            self.loop.call_later(1.0, self.transport.abort)
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Begins to wait for a client that does not read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Ends that wait."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self.is_idle():
            self.use(None)

    def timeout_keep_alive_handler(self) -> None:
        """Ends an idle connection, also one whose last answer was not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _mark(self) -> None:
        """Lets the request find its connection, which ends after one of an ambiguous length."""
        if self.scope is not None:
            cast(dict[str, Any], self.scope)[SCOPE] = self
            lengths = {name for name, _ in self.scope["headers"]} & _LENGTHS
            if self.cycle is not None and len(lengths) > 1:  # RFC 9112, 6.1
                self.cycle.keep_alive = False

    def _watch(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        elif not waits and self._head is not None:
            self._head.cancel()
            self._head = None
