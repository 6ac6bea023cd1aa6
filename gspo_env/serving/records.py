"""What the address passes on and gets back, independent of the wire format of the program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from gspo_env.env.tools import Tool
from gspo_env.errors import GspoEnvError
from gspo_env.types import Message

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
    """The temperature asked for; None in training, where the rollout's holds."""
    seed: int | None = None
    """The seed asked for; None in training, where the rollout's holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The answer to a request."""

    message: Message
    """The assistant's message. Calls without an id get one."""
    finish_reason: Finish = "stop"
    """"length": cut at the limit of tokens; "context": the prompt did not fit, there is no answer.
    "stop" with calls counts as "tool_calls"."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    id: str = ""
    """Name of the answer; by default that of the request."""


Answer = Callable[[Request], Awaitable[Reply] | Future[Reply]]
"""Answers a request. It is called in the thread of the address; an awaitable runs there too. It is
cancelled when the program hangs up and when the session closes."""
Reward = Callable[[str, float], None]
"""Takes the reward of an answer by its id; raises `KeyError` or `LateRewardError`."""


class RefusedError(GspoEnvError, ValueError):
    """A request that is refused with a status of HTTP.

    Attributes:
        status: The status.
        code: A short name of the reason, such as `context_length_exceeded`.
        param: The field of the request that is at fault.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        """Stores the parts."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class LateRewardError(GspoEnvError, ValueError):
    """A reward for a turn whose step has returned."""
