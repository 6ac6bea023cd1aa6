"""A session of the address: a key, and what answers the requests with it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gspo_env.serving.records import Answer, RefusedError, Reply, Request, Reward

if TYPE_CHECKING:
    from gspo_env.serving.server import PolicyServer

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 3600.0
"""Default of the time in which an answer has to come."""
_SAID: set[str] = set()
"""What the log has said once."""


class Session:
    """One place of the address: a key, and what answers the requests with it.

    Attributes:
        url: The base URL of OpenAI's clients, which ends with `/v1`.
        key: The key of all requests.
        model: The model's name in `/v1/models`.
        counts: Requests by what they asked for without effect, such as `temperature`.
        connections: Those with a request in flight, or with an answer that is not read yet.
        opened: All connections of sockets that serve this session only.
    """

    def __init__(
        self, address: PolicyServer, answer: Answer, reward: Reward | None, key: str, **terms: Any
    ) -> None:
        """Makes a session; use `PolicyServer.open`."""
        self.url, self.key = f"{address.url}/v1", key
        self.training: bool = terms["training"]
        self.model: str = terms["model"]
        self.seconds: float = terms["seconds"]
        self.counts: Counter[str] = Counter()
        self.connections: set[Any] = set()
        self.opened: set[Any] = set()
        self.listeners: list[tuple[socket.socket, asyncio.Server]] = []
        self.closed = False
        self.reward = reward
        self._address, self._answer = address, answer
        self._tasks: set[asyncio.Future[Reply]] = set()
        self._numbers, self._calls = itertools.count(1), itertools.count(1)
        self._answered: set[str] = set()

    def listen(self, listener: socket.socket) -> None:
        """Serves a further socket, with the key of this session only.

        Args:
            listener: It listens already, such as in another network namespace. It is closed with
                the session.
        """
        self._address.listen(self, listener)

    def environment(self, root: str | None = None) -> dict[str, str]:
        """Returns the variables in which programs look for an address and a key.

        Args:
            root: Where the program reaches the server; by default its own address.
        """
        base = root or self._address.url
        return {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_BASE": f"{base}/v1",
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
        for listener, server in self.listeners:
            server.close()
            listener.close()
        self.listeners.clear()
        for connection in list(self.connections):
            connection.end()
        for connection in self.opened - self.connections:
            connection.transport.abort()

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
        if reason != "context" and self.reward is not None:
            self._answered.add(reply.id)
        return reply


def gone() -> RefusedError:
    """Returns the error of a request to a session that has ended."""
    return RefusedError("the episode of this key has ended", status=410, code="session_closed")


def _as_future(answer: Awaitable[Reply] | Future[Reply]) -> asyncio.Future[Reply]:
    if isinstance(answer, Future):
        return asyncio.wrap_future(answer)
    return asyncio.ensure_future(answer)
