"""The messages of conversations and tools, in OpenAI's format or as an environment sends them.

Servers, files, datasets, environments and judges all read them here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from gspo_env.chat.fields import Fields, Json
from gspo_env.errors import RefusedError
from gspo_env.tools.schema import arguments_validator
from gspo_env.tools.tool import Tool
from gspo_env.types import Message, ToolCall

_TEXT = ("text", "refusal")


def read_messages(values: Iterable[Any], *, strict: bool = False) -> list[Message]:
    """Reads the messages of a conversation; see `read_message` and `order_results`.

    Raises:
        RefusedError: A message is malformed, or holds something else than text.
    """
    messages = [read_message(v, f"messages[{n}]", strict=strict) for n, v in enumerate(values)]
    return order_results(messages, strict=strict)


def read_message(value: Any, where: str = "message", *, strict: bool = False) -> Message:
    """Reads a message.

    Args:
        value: The message; its calls may also have the fields of `ToolCall`.
        where: Its name for errors.
        strict: Whether it has to be in OpenAI's format, and the result of a tool to have the id of
            its call.

    Raises:
        RefusedError: It is malformed, or holds something else than text.
    """
    if isinstance(value, Message):
        return value
    fields = Fields(value, where)
    role = fields.text("role")
    text = fields.content("content", _TEXT)
    name = fields.text("name") or None
    reasoning, calls = None, list[ToolCall]()
    if role == "assistant":
        reasoning = fields.take("reasoning_content", str, "a string")
        reasoning = fields.take("reasoning", str, "a string") if reasoning is None else reasoning
        items = enumerate(fields.items("tool_calls"))
        calls = [_call(call, f"{where}.tool_calls[{n}]", strict) for n, call in items]
        text = text or fields.text("refusal")
        fields.ignore(("audio", "annotations"))
    elif role not in ("system", "developer", "user", "tool"):
        fields.refuse("role", role, '"system", "developer", "user", "assistant" or "tool"')
    need = fields.need if strict and role == "tool" else fields.take
    call_id = need("tool_call_id", str, "the id of a call") if role == "tool" else None
    if not fields.values.get("tool_calls"):
        fields.ignore(("tool_calls",))
    fields.done()
    return Message(
        role="system" if role == "developer" else role,  # type: ignore[arg-type]
        content=text,
        reasoning=reasoning,
        tool_calls=tuple(calls),
        tool_call_id=call_id,
        name=name,
    )


def order_results(messages: Sequence[Message], *, strict: bool = False) -> list[Message]:
    """Returns a conversation whose results of tools are in the order of the calls.

    Templates that show no ids show a result by its place alone.

    Args:
        messages: The conversation. Results without an id are those of the calls that no other
            result names, in the order of the calls; where there are more, those without an id stay
            where they are, because some answer calls that could not be read.
        strict: Whether each result has to be that of a call.

    Raises:
        RefusedError: A result is of no call, or is a second one, or an earlier call has none.
    """
    ordered = list(messages)
    rounds: list[tuple[list[str], list[int]]] = [([], [])]
    by_speaker = itertools.groupby(range(len(messages)), lambda n: messages[n].role == "assistant")
    for is_assistant, run in by_speaker:
        numbers = list(run)
        if not is_assistant:
            rounds[-1][1].extend(n for n in numbers if messages[n].role == "tool")
        elif ids := [call.id for n in numbers for call in messages[n].tool_calls]:
            rounds.append((ids, []))
    for ids, places in rounds:
        names = [messages[n].tool_call_id for n in places]
        if not any(names) or not (strict or any(ids)):
            continue
        open_calls: list[str | None] = list(ids)
        unnamed = [i for i, call in enumerate(ids) if call not in names]
        if names.count(None) > len(unnamed):
            places = [n for n in places if messages[n].tool_call_id is not None]
            names = [call for call in names if call is not None]
        order = {}
        for n, call in zip(places, names, strict=True):
            named = [i for i, other in enumerate(open_calls) if other == call]
            indices = unnamed if call is None else named
            if not indices:
                expected = f"one of {ids}, each once" if ids else "a call before it"
                text = f"the result of a tool has the tool_call_id {call!r}; expected {expected}"
                raise RefusedError(text[:500], param="messages")
            order[n] = indices.pop(0)
            open_calls[order[n]] = None
        before_last = open_calls[: max(order.values(), default=0)]
        if missing := [call for call in before_last if call is not None]:
            raise RefusedError(
                f"the call {missing[0]!r} has no result, but one after it has; expected all results"
                " up to it",
                param="messages",
            )
        for place, n in zip(places, sorted(places, key=order.__getitem__), strict=True):
            ordered[place] = messages[n]
    return ordered


def _call(value: Any, where: str, strict: bool) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    fields = Fields(value, where)
    call_id = fields.text("id")
    if strict or "function" in fields.values:
        fields = Fields(fields.need("function", dict, "an object"), f"{where}.function")
    return fields.call("arguments", call_id)


def write_message(message: Message) -> Json:
    """Returns a message in OpenAI's format."""
    calls = [write_call(call) for call in message.tool_calls]
    fields: Json = {"role": message.role, "content": message.content or (None if calls else "")}
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if calls:
        fields["tool_calls"] = calls
    names = {"tool_call_id": message.tool_call_id, "name": message.name}
    return fields | {key: value for key, value in names.items() if value is not None}


def write_call(call: ToolCall) -> Json:
    """Returns a call in OpenAI's format."""
    function = {"name": call.name, "arguments": format_arguments(call)}
    return {"id": call.id, "type": "function", "function": function}


def format_arguments(call: ToolCall) -> str:
    """Returns the arguments of a call as JSON."""
    return json.dumps(call.arguments, ensure_ascii=False)


def read_tools(values: Sequence[Any]) -> list[Tool]:
    """Reads tools in OpenAI's format.

    Raises:
        RefusedError: A tool is malformed, or no function.
    """
    return [_tool(value, f"tools[{n}]") for n, value in enumerate(values)]


def make_tool(fields: Fields, schema: str) -> Tool:
    """Returns a tool from its name, its description and the field with its JSON schema."""
    name = fields.tool()
    description = fields.text("description")
    parameters = fields.take(schema, dict, "a JSON schema") or {}
    parameters = {"type": "object", "properties": {}, **parameters}
    strict = bool(fields.take("strict", bool, "true or false"))
    tool = Tool(name=name, description=description, parameters=parameters, strict=strict)
    where = fields.name("strict")
    return replace(tool, validator=_schema_validator(parameters, where)) if strict else tool


def _schema_validator(schema: Json, where: str) -> TypeAdapter[dict[str, Any]]:
    """Returns the validator of a strict tool.

    Raises:
        RefusedError: The schema is none, takes long to check, or `jsonschema` is not installed.
    """
    try:
        return arguments_validator(schema, complete=True)
    except ImportError:
        raise RefusedError(
            f"{where} is true, which needs the package jsonschema; expected false, or "
            "pip install 'gspo-env[agents]' for the trainer",
            code="unsupported_parameter",
            param=where,
        ) from None
    except ValueError as error:
        raise RefusedError(f"the schema of a strict tool is refused: {error}") from None


def _tool(value: Any, where: str) -> Tool:
    fields = Fields(value, where)
    if (kind := fields.text("type") or "function") != "function":
        fields.refuse("type", kind, '"function": other tools run on a server of their maker')
    function = Fields(fields.need("function", dict, "an object"), f"{where}.function")
    fields.done()
    tool = make_tool(function, "parameters")
    function.done()
    return tool
