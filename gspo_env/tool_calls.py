"""Reads the tool calls and the reasoning in a model's text, by family of chat templates.

The families: JSON in `<tool_call>` (Hermes, Qwen), XML in `<function=NAME>` (Qwen3-Coder), JSON
alone or behind `<|python_tag|>` (Llama 3), and `[TOOL_CALLS]` (Mistral). The first mark in the text
decides. A malformed call stays text.
"""

from __future__ import annotations

import json.decoder
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo_env.env.base import clean, levels
from gspo_env.env.tools import DECODER, Tool, call_from_json, parse_tool_call, split_reasoning
from gspo_env.errors import ConfigError
from gspo_env.types import Message, ToolCall

_HERMES, _XML, _LLAMA, _MISTRAL = "<tool_call>", "<function=", "<|python_tag|>", "[TOOL_CALLS]"
_MOST_MALFORMED = 32
"""Malformed calls after which the rest of a text is not searched, so that the time is linear."""
_DEEPEST = 100
"""Most levels of the arguments of a call."""
_SPACE: Any = json.decoder.WHITESPACE  # type: ignore[attr-defined]

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each argument, by tool."""
Found = tuple[list[ToolCall] | None, int]
"""The calls at a mark, or None if they are malformed, and where the text goes on."""


def parse_message(text: str, tools: Sequence[Tool] = ()) -> tuple[Message, int]:
    """Reads an action as a message; never raises.

    Args:
        text: What the policy wrote, without the token that ended it.
        tools: The tools that it may call. Their schemas give the types of XML arguments, and a bare
            JSON object is a call only if it names one of them. Without tools any name is taken.

    Returns:
        The assistant's message, and the number of malformed calls, which stay in its content. Calls
        in reasoning that never ends count as one, and stay in the reasoning.

    Example:
        >>> message, malformed = parse_message('<tool_call>{"name": "now"}</tool_call>')
        >>> message.tool_calls, malformed
        ((ToolCall(name='now', arguments={}, id=''),), 0)
    """
    reasoning, content = split_reasoning(text)
    if content is None:
        message = Message(role="assistant", content="", reasoning=reasoning)
        return message, int(any(mark in text for mark in _READERS))
    calls, rest, malformed = _find_calls(content, tools)
    message = Message(
        role="assistant",
        content=rest.strip() if calls else content,
        reasoning=reasoning,
        tool_calls=tuple(calls),
    )
    return message, malformed


def read_action(
    text: str, tools: Sequence[Tool] = (), message: Message | None = None
) -> tuple[Message, int]:
    """Returns an action as the program that asked for it gets it; never raises.

    A program that offers no tools gets text. So does one of whose strict tools a call does not fit
    the schema: the policy was not constrained, and the program is promised that calls fit.

    Args:
        text: See `parse_message`.
        tools: The tools that the request offers.
        message: The action as the tokenizer's response template has parsed it, if it has one.

    Returns:
        The assistant's message, and the number of malformed calls.
    """
    if not tools:
        return (_as_text(text) if message is None or message.tool_calls else message), 0
    malformed = 0
    if message is None:
        message, malformed = parse_message(text, tools)
    strict = {tool.name: tool for tool in tools if tool.strict}
    wrong = sum(
        not _is_valid(strict[call.name], call) for call in message.tool_calls if call.name in strict
    )
    return (_as_text(text) if wrong else message), malformed + wrong


def _as_text(text: str) -> Message:
    reasoning, content = split_reasoning(text)
    return Message(role="assistant", content=content or "", reasoning=reasoning)


def _is_valid(tool: Tool, call: ToolCall) -> bool:
    try:
        tool.validate(call.arguments)
    except ConfigError:
        return False
    return True


def _find_calls(text: str, tools: Sequence[Tool]) -> tuple[list[ToolCall], str, int]:
    """Returns the calls, the text around them, and the number of malformed ones."""
    marks = {mark: text.find(mark) for mark in (_HERMES, _XML, _LLAMA, _MISTRAL)}
    present = [mark for mark, place in marks.items() if place >= 0]
    if not present:
        bare = _bare(text, tools)
        return bare, "" if bare else text, 0
    schemas = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
    mark = min(present, key=lambda m: marks[m])
    read = _READERS[mark]
    found: list[ToolCall] = []
    pieces: list[str] = []
    at, malformed = 0, 0
    while (place := text.find(mark, at)) >= 0 and malformed < _MOST_MALFORMED:
        calls, end = read(text, place + len(mark), schemas)
        if calls is None:
            malformed += 1
            pieces.append(text[at:end])
        else:
            found += calls
            pieces.append(text[at:place])
        at = end
    return found, "".join([*pieces, text[at:]]), malformed


def _hermes(text: str, start: int, schemas: Schemas) -> Found:
    inner = _skip(text, start)
    if text.startswith(_XML, inner):
        calls, end = _xml(text, inner + len(_XML), schemas)
        behind = _skip(text, end)
        close = "</tool_call>"
        return calls, behind + len(close) if text.startswith(close, behind) else end
    call, end = parse_tool_call(text, start)
    good = isinstance(call, ToolCall) and _fits(call.arguments)
    return ([call] if good and isinstance(call, ToolCall) else None), end


def _xml(text: str, start: int, schemas: Schemas) -> Found:
    """Reads `NAME>`, parameters and `</function>`."""
    close = text.find("</function>", start)
    if close < 0:
        return None, len(text)
    end = close + len("</function>")
    name, closed, body = text[start:close].partition(">")
    name = name.strip()
    if not closed or not name or "<" in name:
        return None, end
    arguments: dict[str, Any] = {}
    types = schemas.get(name, {})
    for part in body.split("<parameter=")[1:]:
        key, closed, value = part.partition(">")
        value, ended, behind = value.rpartition("</parameter>")
        if not (closed and ended and key.strip()) or behind.strip():
            return None, end
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _typed(value, types.get(key.strip()))
    good = not body.partition("<parameter=")[0].strip() and _fits(arguments)
    return ([ToolCall(name=name, arguments=arguments)] if good else None), end


def _typed(value: str, schema: Any) -> Any:
    """Returns an XML argument with the type of its schema; text that has no such type stays."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return value
    try:
        found = DECODER.decode(value)
    except (ValueError, RecursionError):
        return value
    return value if isinstance(found, str) and kind is None else found


def _llama(text: str, start: int, schemas: Schemas) -> Found:
    calls, end = _objects(text, start, "parameters")
    return calls or None, end if calls else start


def _bare(text: str, tools: Sequence[Tool]) -> list[ToolCall]:
    """Returns the calls of a text that is nothing but the JSON of calls."""
    start = _skip(text, 0)
    if not text.startswith("{", start):
        return []
    calls, end = _objects(text, start, "parameters")
    names = {tool.name for tool in tools}
    known = all(call.name in names for call in calls) if tools else True
    return calls if known and end == len(text) else []


def _objects(text: str, start: int, key: str) -> tuple[list[ToolCall], int]:
    """Reads JSON objects that `;` or white space divides; returns those before the first fault."""
    calls: list[ToolCall] = []
    at = _skip(text, start)
    while text.startswith("{", at):
        value, end = _decode(text, at)
        if not isinstance(value, dict) or not {"name", key} <= value.keys() <= _KEYS | {key}:
            break
        call = call_from_json({"name": value["name"], "arguments": value[key]})
        if isinstance(call, str) or not _fits(call.arguments):
            break
        calls.append(call)
        at = _skip(text, end)
        at = _skip(text, at + 1) if text.startswith(";", at) else at
    return calls, at


_KEYS = {"name", "type", "id"}


def _mistral(text: str, start: int, schemas: Schemas) -> Found:
    at = _skip(text, start)
    if not text.startswith("[", at):
        return _mistral_call(text, at)
    values, end = _decode(text, at)
    calls = [_with_id(value) for value in values] if isinstance(values, list) else []
    good = [call for call in calls if call is not None]
    return (good, end) if good and len(good) == len(calls) else (None, max(end, start))


def _mistral_call(text: str, start: int) -> Found:
    """Reads `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`."""
    stop = text.find(_MISTRAL, start)
    mark = text.find("[ARGS]", start, stop if stop >= 0 else len(text))
    if mark < 0:
        return None, start
    name, _, number = text[start:mark].partition("[CALL_ID]")
    value, end = _decode(text, _skip(text, mark + len("[ARGS]")))
    call = _with_id({"name": name.strip(), "arguments": value, "id": number.strip()})
    return (None, start) if call is None or end < 0 else ([call], end)


def _with_id(value: Any) -> ToolCall | None:
    call = call_from_json(value)
    if isinstance(call, str) or not _fits(call.arguments):
        return None
    name = value.get("id")
    return ToolCall(
        name=call.name, arguments=call.arguments, id=name if isinstance(name, str) else ""
    )


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Decodes the JSON at a place; None and -1 if there is none."""
    try:
        value, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, -1
    return value, end


def _skip(text: str, start: int) -> int:
    """Returns the place of the next character that is no white space."""
    end: int = _SPACE.match(text, start).end()
    return end


def _fits(arguments: dict[str, Any]) -> bool:
    """Returns whether arguments can be written again: not too deep, and without surrogates."""
    for depth, level in enumerate(levels(arguments)):
        texts = (text for text in level if isinstance(text, str))
        if depth == _DEEPEST or any(clean(text) != text for text in texts):
            return False
    return True


_READERS: Mapping[str, Callable[[str, int, Schemas], Found]] = {
    **{_HERMES: _hermes, _XML: _xml, _LLAMA: _llama, _MISTRAL: _mistral}
}
