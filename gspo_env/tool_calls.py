"""Reads the tool calls and the reasoning in what a model writes, for four families of templates.

The families: JSON in `<tool_call>` (Hermes, Qwen), XML in `<function=NAME>` (Qwen3-Coder), JSON
alone or behind `<|python_tag|>` (Llama 3), and `[TOOL_CALLS]` (Mistral). The first mark in the text
decides. No function here raises, whatever the text.
"""

from __future__ import annotations

import json.decoder
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gspo_env.errors import ConfigError
from gspo_env.types import Message, ToolCall

_THINK, _END_OF_THINK = "<think>", "</think>"
_HERMES, _XML, _LLAMA, _MISTRAL = "<tool_call>", "<function=", "<|python_tag|>", "[TOOL_CALLS]"
_END_OF_HERMES, _END_OF_XML = "</tool_call>", "</function>"
_ARGUMENTS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_MOST_MALFORMED = 32
"""Malformed calls after which the rest of a text is not searched, so that the time is linear."""
_DEEPEST = 100
"""Most levels of the arguments of a call."""
_SPACE: Any = json.decoder.WHITESPACE  # type: ignore[attr-defined]
_UNCLOSED = (
    f"the tool call is in reasoning that has no closing {_END_OF_THINK}, write {_END_OF_THINK} "
    "before it."
)
_XML_FORM = "the tool call must be <function=NAME> with <parameter=KEY>VALUE</parameter> in it."
_LLAMA_FORM = 'the tool call must be a JSON object of "name" and "parameters".'


class ToolSchema(Protocol):
    """What this module reads of a tool; `gspo_env.env.Tool` has it."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments."""

    @property
    def strict(self) -> bool:
        """Whether a program is promised that the arguments of each call fit `parameters`."""

    def validate(self, arguments: dict[str, Any]) -> object:
        """Checks arguments; raises `ConfigError` if they do not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallError:
    """A malformed call."""

    message: str
    """The error in one sentence."""


Types = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each argument, by tool."""
Reading = tuple[list[ToolCall] | str, int]
"""The calls at a mark, or what is wrong with them, and where the text goes on."""


def parse_tool_calls(
    text: str, tools: Sequence[ToolSchema] = (), message: Message | None = None
) -> list[ToolCall | ToolCallError]:
    """Returns the tool calls of an action in order, malformed ones included.

    Calls inside the reasoning are ignored. If the reasoning never ends, a call in it is an error.

    Args:
        text: What the policy wrote, without the token that ended it.
        tools: The tools that it may call. Their schemas give the types of XML arguments, and a bare
            JSON object is a call only if it names one of them. Without tools, any name is accepted.
        message: The action as the tokenizer's response template has parsed it, if it has one. Its
            calls come before those in the text.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
        [ToolCall(name='now', arguments={}, id='')]
    """
    if message is not None and message.tool_calls:
        return list(message.tool_calls)
    return _split(text, tools)[2]


def parse_message(text: str, tools: Sequence[ToolSchema] = ()) -> tuple[Message, int]:
    """Parses an action into a message.

    Args:
        text: See `parse_tool_calls`.
        tools: See `parse_tool_calls`.

    Returns:
        The assistant's message, and the number of malformed calls, which stay in its content. Calls
        in reasoning that never ends count as one, and stay in the reasoning.

    Example:
        >>> message, malformed = parse_message('<tool_call>{"name": "now"}</tool_call>')
        >>> message.tool_calls, malformed
        ((ToolCall(name='now', arguments={}, id=''),), 0)
    """
    reasoning, content, calls = _split(text, tools)
    valid = tuple(call for call in calls if isinstance(call, ToolCall))
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=valid)
    return message, len(calls) - len(valid)


def read_action(
    text: str, tools: Sequence[ToolSchema] = (), message: Message | None = None
) -> tuple[Message, int]:
    """Returns an action as the program that requested it receives it.

    A program that offers no tools gets text. So does a program whose strict tools a call does not
    fit: the policy is not constrained, and the program is promised that calls fit.

    Args:
        text: See `parse_tool_calls`.
        tools: The tools that the request offers.
        message: See `parse_tool_calls`.

    Returns:
        The assistant's message, and the number of malformed calls.
    """
    if not tools:
        return (_as_text(text) if message is None or message.tool_calls else message), 0
    malformed = 0
    if message is None or not message.tool_calls:
        parsed, malformed = parse_message(text, tools)
        message = parsed if message is None or parsed.tool_calls else message
    strict = {tool.name: tool for tool in tools if tool.strict}
    invalid = sum(
        not _is_valid(strict[call.name], call) for call in message.tool_calls if call.name in strict
    )
    return (_as_text(text) if invalid else message), malformed + invalid


def split_reasoning(text: str) -> tuple[str | None, str | None]:
    """Returns the reasoning at the start of an action and what follows it.

    A template may have written `<think>` at the end of the prompt, so that the action lacks it.

    Returns:
        The reasoning, None if there is none, and the rest, None if the reasoning never ends.

    Example:
        >>> split_reasoning("<think>two links</think>stone")
        ('two links', 'stone')
    """
    start = text.lstrip()
    is_open = start.startswith(_THINK)
    reasoning, end, rest = start.removeprefix(_THINK).partition(_END_OF_THINK)
    if not end:
        return (reasoning.strip("\n"), None) if is_open else (None, text)
    if not is_open and _THINK in reasoning:
        return None, text
    return reasoning.strip("\n"), rest.lstrip("\n")


def levels(tree: Any) -> Iterator[list[Any]]:
    """Yields what a JSON value has at each depth: itself, then its items, keys and values, ...

    Example:
        >>> list(levels({"a": [1]}))
        [[{'a': [1]}], ['a', [1]], [1]]
    """
    level = [tree]
    while level:
        yield level
        level = [child for node in level for child in _children(node)]


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node, *node.values()]
    return node if isinstance(node, list) else []


def _as_text(text: str) -> Message:
    reasoning, content = split_reasoning(text)
    return Message(role="assistant", content=content or "", reasoning=reasoning)


def _is_valid(tool: ToolSchema, call: ToolCall) -> bool:
    try:
        tool.validate(call.arguments)
    except ConfigError:
        return False
    return True


def _split(
    text: str, tools: Sequence[ToolSchema]
) -> tuple[str | None, str, list[ToolCall | ToolCallError]]:
    """Returns the reasoning, the content without its calls, and the calls."""
    reasoning, rest = split_reasoning(text)
    if rest is None:
        has_call = any(mark in text for mark in _READERS)
        return reasoning, "", [ToolCallError(message=_UNCLOSED)] if has_call else []
    calls, content = _find_calls(rest, tools)
    is_call = any(isinstance(call, ToolCall) for call in calls)
    return reasoning, content.strip() if is_call else rest, calls


def _find_calls(
    text: str, tools: Sequence[ToolSchema]
) -> tuple[list[ToolCall | ToolCallError], str]:
    """Returns the calls, and the text around them with the malformed ones."""
    present = [mark for mark in _READERS if mark in text]
    if not present:
        bare = _bare(text, tools)
        return list(bare), "" if bare else text
    types = {tool.name: tool.parameters.get("properties", {}) for tool in tools}
    mark = min(present, key=text.find)
    calls: list[ToolCall | ToolCallError] = []
    pieces: list[str] = []
    position, malformed = 0, 0
    while (start := text.find(mark, position)) >= 0 and malformed < _MOST_MALFORMED:
        reading, end = _READERS[mark](text, start + len(mark), types)
        if isinstance(reading, str):
            malformed += 1
            calls.append(ToolCallError(message=reading))
            pieces.append(text[position:end])
        else:
            calls += reading
            pieces.append(text[position:start])
        position = end
    return calls, "".join([*pieces, text[position:]])


def _hermes(text: str, start: int, types: Types) -> Reading:
    inner = _skip(text, start)
    if text.startswith(_XML, inner):
        calls, end = _xml(text, inner + len(_XML), types)
        tag = _skip(text, end)
        return calls, tag + len(_END_OF_HERMES) if text.startswith(_END_OF_HERMES, tag) else end
    value, end, fault = _decode(text, inner)
    close = text.find(_END_OF_HERMES, max(start, end))
    if close < 0:
        return f"the tool call has no closing {_END_OF_HERMES}.", len(text)
    if not fault and text[end:close].strip():
        fault = f"the tool call has text between its JSON object and {_END_OF_HERMES}."
    call = fault or _call(value)
    return call if isinstance(call, str) else [call], close + len(_END_OF_HERMES)


def _xml(text: str, start: int, types: Types) -> Reading:
    """Reads `NAME>`, parameters and `</function>`."""
    close = text.find(_END_OF_XML, start)
    if close < 0:
        return f"the tool call has no closing {_END_OF_XML}.", len(text)
    end = close + len(_END_OF_XML)
    name, bracket, body = text[start:close].partition(">")
    name = name.strip()
    lead, *parameters = body.split("<parameter=")
    if not bracket or not name or "<" in name or lead.strip():
        return _XML_FORM, end
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        key, bracket, value = parameter.partition(">")
        value, tag, trail = value.rpartition("</parameter>")
        key = key.strip()
        if not (bracket and tag and key) or trail.strip():
            return _XML_FORM, end
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, types.get(name, {}).get(key))
    call = _call({"name": name, "arguments": arguments})
    return call if isinstance(call, str) else [call], end


def _typed(value: str, schema: Any) -> Any:
    """Returns an XML argument with the type of its schema; text that has no such type stays."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return value
    try:
        decoded = DECODER.decode(value)
    except (ValueError, RecursionError):
        return value
    return value if isinstance(decoded, str) and kind is None else decoded


def _llama(text: str, start: int, types: Types) -> Reading:
    calls, end = _objects(text, start)
    return (calls, end) if calls else (_LLAMA_FORM, start)


def _bare(text: str, tools: Sequence[ToolSchema]) -> list[ToolCall]:
    """Returns the calls of a text that is nothing but the JSON of calls."""
    calls, end = _objects(text, 0)
    names = {tool.name for tool in tools}
    is_known = all(call.name in names for call in calls) if tools else True
    return calls if is_known and end == len(text) else []


def _objects(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Reads JSON objects that `;` or white space divides; returns those before the first fault."""
    calls: list[ToolCall] = []
    position = _skip(text, start)
    required, optional = {"name", "parameters"}, {"type", "id"}
    while text.startswith("{", position):
        value, end, _ = _decode(text, position)
        if not isinstance(value, dict) or not required <= value.keys() <= required | optional:
            break
        call = _call({"name": value["name"], "arguments": value["parameters"]})
        if isinstance(call, str):
            break
        calls.append(call)
        position = _skip(text, end)
        position = _skip(text, position + 1) if text.startswith(";", position) else position
    return calls, position


def _mistral(text: str, start: int, types: Types) -> Reading:
    position = _skip(text, start)
    if not text.startswith("[", position):
        return _newer_mistral(text, position)
    values, end, fault = _decode(text, position)
    if fault:
        return fault, start
    calls = [_call_with_id(value) for value in values]
    wrong = next((call for call in calls if isinstance(call, str)), "")
    if wrong or not calls:
        return wrong or "the list of tool calls is empty.", end
    return [call for call in calls if isinstance(call, ToolCall)], end


def _newer_mistral(text: str, start: int) -> Reading:
    """Reads `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`."""
    following = text.find(_MISTRAL, start)
    mark = text.find(_ARGUMENTS, start, following if following >= 0 else len(text))
    if mark < 0:
        return f"the tool call has neither a JSON list nor {_ARGUMENTS}.", start
    name, _, call_id = text[start:mark].partition(_CALL_ID)
    value, end, fault = _decode(text, _skip(text, mark + len(_ARGUMENTS)))
    call = fault or _call_with_id({"name": name.strip(), "arguments": value, "id": call_id.strip()})
    return (call, start) if isinstance(call, str) else ([call], end)


def _call_with_id(value: Any) -> ToolCall | str:
    call = _call(value)
    if isinstance(call, str) or not isinstance(value.get("id"), str):
        return call
    return replace(call, id=value["id"])


def _call(value: object) -> ToolCall | str:
    """Returns the call, or what is wrong with it in one sentence."""
    if not isinstance(value, dict):
        return f"the tool call must be a JSON object, got {type(value).__name__}."
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return 'the tool call needs a "name" that is a string.'
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return f'the "arguments" are not valid JSON: {_reason(error)}.'
    if not isinstance(arguments, dict):
        return f'the "arguments" must be a JSON object, got {type(arguments).__name__}.'
    if any(depth == _DEEPEST for depth, _ in enumerate(levels(arguments))):
        return f"the tool call is nested more than {_DEEPEST} levels deep."
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "the tool call has a lone surrogate, which is no character."
    return ToolCall(name=name, arguments=arguments)


def _decode(text: str, start: int) -> tuple[Any, int, str]:
    """Decodes the JSON at a position; returns the value, its end, and what is wrong with it."""
    try:
        value, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return None, -1, f"the tool call is not valid JSON: {_reason(error)}."
    return value, end, ""


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _skip(text: str, start: int) -> int:
    """Returns the position of the next character that is not white space."""
    end: int = _SPACE.match(text, start).end()
    return end


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


DECODER = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite)
"""Decodes JSON without NaN and infinite numbers."""
_READERS: Mapping[str, Callable[[str, int, Types], Reading]] = {
    _HERMES: _hermes,
    _XML: _xml,
    _LLAMA: _llama,
    _MISTRAL: _mistral,
}
