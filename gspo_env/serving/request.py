"""What the wire formats share: the fields of every request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from gspo_env.chat.fields import LONGEST_NAME, Fields, Json
from gspo_env.chat.messages import order_results
from gspo_env.errors import RefusedError
from gspo_env.serving.session import Reply, Request
from gspo_env.tools.tool import Tool
from gspo_env.types import Message


class Dialect(Protocol):
    """A wire format."""

    prefix: str
    """How the ids of its answers begin."""

    def read(self, body: Json, name: str, agent: str | None = None) -> Request:
        """Reads a body.

        Args:
            body: The body.
            name: The id of the answer.
            agent: The name of the agent, if a header gives it.

        Raises:
            RefusedError: The body is malformed, or asks for what cannot be done.
        """

    def write(self, request: Request, reply: Reply) -> Json:
        """Returns a whole answer."""

    def events(self, request: Request, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        """Yields the events of a streamed answer: names, which may be empty, and data."""

    def fault(self, error: RefusedError) -> Json:
        """Returns the body of an error."""


def stops(fields: Fields, field: str) -> tuple[str, ...]:
    """Returns the texts that end an answer."""
    value = fields.take(field, (str, list), "a string or a list of strings")
    texts = [value] if isinstance(value, str) else value or []
    if len(texts) > 16 or not all(isinstance(t, str) and 0 < len(t) <= 256 for t in texts):
        fields.refuse(field, value, "up to 16 strings of 1 to 256 characters")
    return tuple(texts)


def _check_conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns a conversation with the results of tools in order.

    Raises:
        RefusedError: It is empty, its last message is the assistant's, or a result is of no call.
    """
    if not messages:
        raise RefusedError("there are no messages; expected at least one", param="messages")
    if messages[-1].role == "assistant":
        raise RefusedError(
            "the last message is the assistant's: the policy writes whole messages and continues "
            "none; expected a user's or a tool's message at the end",
            param="messages",
        )
    return tuple(order_results(messages, strict=True))


def make_request(
    fields: Fields,
    name: str,
    agent: str | None,
    *,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    hottest: float = 2.0,
    **terms: Any,
) -> Request:
    """Returns a request; takes the fields that all wire formats have.

    Args:
        fields: The body.
        name: The id of the answer.
        agent: The name of the agent, if a header gives it.
        messages: The conversation.
        tools: The tools; with `tool_choice` none, the policy sees none.
        hottest: Largest temperature.
        terms: Further fields of the request.
    """
    for name_of_tool, number in Counter(tool.name for tool in tools).items():
        if number > 1:
            fault = f"tools has {number} tools named {name_of_tool!r}; expected different names"
            raise RefusedError(fault, param="tools")
    metadata = fields.values.get("metadata")
    named = metadata.get("agent") if isinstance(metadata, dict) else None
    return Request(
        messages=_check_conversation(messages),
        tools=tuple(tools) if _may_call(fields) else (),
        agent=agent_name(agent, named, fields.values.get("user")),
        id=name,
        temperature=fields.number("temperature", 0, hottest),
        model=fields.text("model"),
        stream=bool(fields.take("stream", bool, "true or false")),
        **terms,
    )


def _may_call(fields: Fields) -> bool:
    """Reads `tool_choice`, which may not force a call."""
    value: Any = fields.values.pop("tool_choice", "auto")
    name = value
    if isinstance(value, dict) and value.keys() <= {"type", "disable_parallel_tool_use"}:
        name = None if value.get("disable_parallel_tool_use") else value.get("type")
    if name not in ("auto", "none"):
        expected = '"auto" or "none", because calls are the policy\'s choice'
        fields.refuse("tool_choice", value, expected)
    return bool(name == "auto")


def agent_name(*names: Any) -> str | None:
    """Returns the first name that is one."""
    first = next((n for n in names if isinstance(n, str) and n.strip()), None)
    return None if first is None else first.strip()[:LONGEST_NAME]
