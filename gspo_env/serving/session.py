"""A session of the policy server: a key, and what answers the requests made with it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from gspo_env.errors import GspoEnvError, RefusedError
from gspo_env.tools.tool import Tool
from gspo_env.types import Message, ToolCall

if TYPE_CHECKING:
    from gspo_env.serving.server import PolicyServer

logger = logging.getLogger(__name__)

Finish = Literal["stop", "length", "tool_calls", "context"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A program's request: a conversation whose next message the policy writes."""

    messages: tuple[Message, ...]
    """The whole conversation; the last message is not the assistant's."""
    tools: tuple[Tool, ...] = ()
    """The tools that the policy may call; none if the request forbids calls."""
    max_tokens: int | None = None
    """Most tokens of the answer; None leaves it to the answering side."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""
    agent: str | None = None
    """Name of the agent that asks: header `X-Agent`, `metadata.agent` or `user`."""
    id: str
    """Name of the answer, which `/v1/reward` takes as `completion_id`."""
    temperature: float | None = None
    """The requested temperature; None in training, where the rollout's applies."""
    seed: int | None = None
    """The requested seed; None in training, where the rollout's applies."""
    model: str = ""
    """The requested model, which answers repeat; that of the session if the request has none."""
    effort: str = ""
    """How much the program wants the policy to think, which has no effect."""
    counts: bool = False
    """Whether the tokens of the prompt are counted, and nothing is answered."""
    stream: bool = False
    """Whether the answer is a stream of events."""
    stream_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The answer to a request."""

    message: Message
    """The assistant's message. Calls without an id get one."""
    finish_reason: Finish = "stop"
    """"length": cut at the limit of tokens; "context": the message says why the prompt did not fit.
    "stop" with calls counts as "tool_calls"."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stop_text: str | None = None
    """The text of `Request.stop` that ended the answer, if one did."""
    id: str = ""
    """Name of the answer; by default that of the request."""


Answer = Callable[[Request], Awaitable[Reply] | Future[Reply]]
"""Answers a request. It is called in the thread of the server; an awaitable runs there too. It is
cancelled when the program hangs up and when the session closes."""
Reward = Callable[[str, float], None]
"""Takes the reward of an answer by its id; raises `KeyError` or `LateRewardError`."""


class LateRewardError(GspoEnvError, ValueError):
    """A reward for a turn whose step has returned."""


ANSWER_SECONDS = 3600.0
"""Default of the time in which an answer has to come."""
_LOGGED: set[str] = set()
"""The ignored fields of requests that the log has named."""


class Session:
    """A key, and what answers the requests made with it.

    Attributes:
        url: The base URL of OpenAI's clients, which ends with `/v1`.
        key: The key of all requests.
        model: The model's name in `/v1/models`.
        counts: Requests by the field that had no effect, such as `temperature`.
        connections: Those with a request in flight, or with an answer that is not read yet.
        opened: All connections of sockets that serve this session only.
    """

    def __init__(
        self,
        server: PolicyServer,
        answer: Answer,
        reward: Reward | None,
        *,
        key: str,
        training: bool,
        model: str,
        seconds: float,
    ) -> None:
        """Makes a session; use `PolicyServer.open`."""
        self.url, self.key = f"{server.url}/v1", key
        self.training, self.model, self.seconds = training, model, seconds
        self.counts: Counter[str] = Counter()
        self.connections: set[Any] = set()
        self.opened: set[Any] = set()
        self.listeners: list[tuple[socket.socket, asyncio.Server]] = []
        self.closed = False
        self.reward = reward
        self._server, self._answer = server, answer
        self._tasks: set[asyncio.Future[Reply]] = set()
        self._numbers, self._calls = itertools.count(1), itertools.count(1)
        self._call_ids = set[str]()
        self._answered: set[str] = set()

    def listen(self, listener: socket.socket) -> None:
        """Serves a further socket, with the key of this session only.

        Args:
            listener: It listens already, such as in another network namespace. It is closed with
                the session.
        """
        self._server.listen(self, listener)

    def environment(self, root: str | None = None) -> dict[str, str]:
        """Returns the variables in which programs look for a server and a key.

        Args:
            root: Where the program reaches the server; by default its own address.
        """
        base = root or self._server.url
        return {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_BASE": f"{base}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": self.key,
        }

    def close(self) -> None:
        """Ends the open requests and refuses later ones. Safe to call twice, from any thread."""
        self._server.forget(self)

    def new_id(self, prefix: str) -> str:
        """Returns the id of the next answer; the same requests get the same ids."""
        return f"{prefix}{next(self._numbers):06d}"

    async def reply(self, request: Request) -> Reply:
        """Gets the answer to a request, in the event loop of the server.

        Raises:
            RefusedError: The session was closed, the answer took too long, or was refused.
        """
        if request.effort:
            self._count_ignored("effort", "the policy decides how long it thinks")
        if self.training:
            if request.temperature is not None:
                self._count_ignored("temperature", "training uses the rollout's instead")
            request = replace(request, temperature=None, seed=None)
        if self.closed:
            raise session_closed()
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
                raise session_closed() from None
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

    def _count_ignored(self, name: str, why: str) -> None:
        self.counts[name] += 1
        if name not in _LOGGED:
            _LOGGED.add(name)
            logger.warning("A program requested the %s of answers; %s (logged once).", name, why)

    def _identified(self, call: ToolCall) -> ToolCall:
        """Returns a call with an id that no other of the session has; a model may repeat one."""
        if not call.id or call.id in self._call_ids:
            call = replace(call, id=f"call{next(self._calls):05d}")
        self._call_ids.add(call.id)
        return call

    def _finish(self, request: Request, reply: Reply) -> Reply:
        """Returns the reply with all ids and the reason that wire formats have."""
        calls = tuple(self._identified(call) for call in reply.message.tool_calls)
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


def session_closed() -> RefusedError:
    """Returns the error of a request to a session that has ended."""
    return RefusedError("the episode of this key has ended", status=410, code="session_closed")


def _as_future(answer: Awaitable[Reply] | Future[Reply]) -> asyncio.Future[Reply]:
    if isinstance(answer, Future):
        return asyncio.wrap_future(answer)
    return asyncio.ensure_future(answer)
