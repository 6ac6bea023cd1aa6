"""Reads the tool calls and the reasoning in what a model writes, in the formats of chat templates.

A call is read wherever it stands; a mark that prose only names is text if a call follows. The
formats of other families than Hermes and Qwen are in `gspo_env.tool_formats`, which is loaded when
a text has one. No function raises, whatever the text.
"""

from __future__ import annotations

import json.decoder
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from gspo_env.errors import ConfigError
from gspo_env.registry import load_module
from gspo_env.types import Message, ToolCall

HERMES, END_OF_HERMES, XML = "<tool_call>", "</tool_call>", "<function="
_MOST_MALFORMED = 32
"""Malformed calls after which the rest of a text is not searched, so that the time is linear."""
MOST_THOUGHTS = 32
"""Reasoning at the start of an action that is split off, so that the time is linear."""
_DEEPEST = 90
"""Most levels of the arguments of a call, which a request of 100 levels holds."""
_SPACE: Any = json.decoder.WHITESPACE  # type: ignore[attr-defined]
_KEYS = {"name", "arguments", "parameters", "id", "type"}
REASONING = {
    "<think>": "</think>",
    "<mm:think>": "</mm:think>",
    "<seed:think>": "</seed:think>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|>",
    "to=self<|message|>": "<|eom|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
"""The marks around reasoning."""
MARKS = (
    *("<\uff5ctool\u2581call\u2581begin\uff5c>", "<|plamo:begin_tool_name:plamo|>", "[TOOL_CALLS]"),
    *("<start_function_call>call:", "<|action_start|><|plugin|>", "<|channel|>commentary to=", XML),
    *("]<]minimax[>[<tool_call>", "<|tool_call_start|>", "<|tool_call_begin|>", "<|python_start|>"),
    *('<|open|>call tool="', "<longcat_tool_call>", "<|tool_call:begin|>", "<|tool_call>call:"),
    *("<|function_call|>", "<|tools_prefix|>", "<function_calls>", "<|START_ACTION|>", "<invoke>"),
    *("<function name=", "<ifm|tool_call>", "<function_call>", "<|python_tag|>", "<use_mcp_tool>"),
    *("[TOOL_REQUEST]", "<|tool_call|>", "<invoke name=", "to=functions.", "<tool_calls>", HERMES),
    *("```tool_code", "[TOOL_CALL]", "<tool_use>", "<TOOLCALL>", "functools["),
)
"""Marks that begin a call, of all families whose tags have no namespace."""
SPACE = r"(?:\w{1,16}:|[ |\uff5c\u2016]{0,5}DSML[ |\uff5c\u2016]{0,5})"
"""What precedes the names of XML tags, as a pattern: a namespace, or DSML in any bars."""
_IN_REASONING = (
    "the tool call is in the reasoning, write it behind </think> or the mark that ends it."
)


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


Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool."""
Reading = tuple[Sequence[ToolCall | ToolCallError] | str, int]
"""The calls at a mark, or what is wrong with them, and where the text goes on. An error at the mark
itself is text that only names the mark, if the text has calls."""


def parse_tool_calls(
    text: str,
    tools: Sequence[ToolSchema] = (),
    message: Message | None = None,
    *,
    in_reasoning: bool = False,
) -> list[ToolCall | ToolCallError]:
    """Returns the tool calls of an action in order, malformed ones included.

    Calls inside the reasoning are ignored. If nothing follows it, a call in it is an error.

    Args:
        text: What the policy wrote, without the token that ended it.
        tools: The tools that it may call. Their schemas give the types of XML arguments, and a bare
            JSON object is a call only if it names one of them. Without tools, any name is accepted.
        message: The action as the tokenizer's response template has parsed it, if it has one. Its
            calls count if the text itself has none that can be read.
        in_reasoning: Whether the prompt has opened the reasoning, with `<think>` at its end.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
        [ToolCall(name='now', arguments={}, id='')]
    """
    calls = _split(text, tools, in_reasoning)[2]
    if message is not None and message.tool_calls and not _valid(calls):
        return list(message.tool_calls)
    return calls


def parse_message(
    text: str, tools: Sequence[ToolSchema] = (), *, in_reasoning: bool = False
) -> tuple[Message, int]:
    """Parses an action into a message.

    Args:
        text: See `parse_tool_calls`.
        tools: See `parse_tool_calls`.
        in_reasoning: See `parse_tool_calls`.

    Returns:
        The assistant's message, and the number of malformed calls, which stay in its content. Calls
        in reasoning that nothing follows count as one, and stay in the reasoning.

    Example:
        >>> message, malformed = parse_message('<tool_call>{"name": "now"}</tool_call>')
        >>> message.tool_calls, malformed
        ((ToolCall(name='now', arguments={}, id=''),), 0)
    """
    reasoning, content, calls = _split(text, tools, in_reasoning)
    valid = _valid(calls)
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=valid)
    return message, len(calls) - len(valid)


def read_action(
    text: str,
    tools: Sequence[ToolSchema] = (),
    message: Message | None = None,
    *,
    in_reasoning: bool = False,
) -> tuple[Message, int]:
    """Returns an action as the program that requested it receives it.

    A program that offers no tools gets text. So does a program whose strict tools a call does not
    fit: the policy is not constrained, and the program is promised that calls fit.

    Args:
        text: See `parse_tool_calls`.
        tools: The tools that the request offers.
        message: See `parse_tool_calls`.
        in_reasoning: See `parse_tool_calls`.

    Returns:
        The assistant's message, and the number of malformed calls.
    """
    if not tools:
        if message is None or message.tool_calls:
            message = _as_text(text, in_reasoning)
        return message, 0
    parsed, malformed = parse_message(text, tools, in_reasoning=in_reasoning)
    if message is None or (parsed.tool_calls and not message.tool_calls):
        message = parsed
    elif message.tool_calls and not parsed.tool_calls:
        malformed = 0
    strict = {tool.name: tool for tool in tools if tool.strict}
    invalid = sum(
        not _is_valid(strict[call.name], call) for call in message.tool_calls if call.name in strict
    )
    return (_as_text(text, in_reasoning) if invalid else message), malformed + invalid


def read_calls(values: Sequence[Any]) -> tuple[ToolCall, ...]:
    """Returns calls in the form of JSON, as `transformers` parses them.

    Raises:
        ValueError: One is malformed.
    """
    calls = to_calls(list(values)) if values else []
    if isinstance(calls, str):
        raise ValueError(calls)
    return tuple(calls)


def split_reasoning(text: str, in_reasoning: bool = False) -> tuple[str | None, str | None]:
    """Returns the reasoning at the start of an action and what follows it.

    Args:
        text: The action.
        in_reasoning: See `parse_tool_calls`.

    Returns:
        The reasoning, None if there is none, and the rest, None if the reasoning never ends.

    Example:
        >>> split_reasoning("<think>two links</think>stone")
        ('two links', 'stone')
    """
    thoughts: list[str] = []
    while len(thoughts) < MOST_THOUGHTS:
        start = text.lstrip()
        mark = next(filter(start.startswith, REASONING), "")
        if not mark and not in_reasoning:
            break
        ends = [REASONING[mark]] if mark else REASONING.values()
        thought = start.removeprefix(mark)
        place, end = min(((thought.find(e), e) for e in ends if e in thought), default=(None, ""))
        thoughts.append(thought[:place].strip("\n"))
        if place is None:
            return "\n".join(filter(None, thoughts)), None
        text, in_reasoning = thought[place + len(end) :].lstrip("\n"), False
    return "\n".join(filter(None, thoughts)) if thoughts else None, text


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


def _valid(calls: Sequence[ToolCall | ToolCallError]) -> tuple[ToolCall, ...]:
    return tuple(call for call in calls if isinstance(call, ToolCall))


def _as_text(text: str, in_reasoning: bool) -> Message:
    reasoning, content = split_reasoning(text, in_reasoning)
    return Message(role="assistant", content=content or "", reasoning=reasoning)


def _is_valid(tool: ToolSchema, call: ToolCall) -> bool:
    try:
        tool.validate(call.arguments)
    except ConfigError:
        return False
    return True


def _split(
    text: str, tools: Sequence[ToolSchema], in_reasoning: bool
) -> tuple[str | None, str, list[ToolCall | ToolCallError]]:
    """Returns the reasoning, the content without its calls, and the calls."""
    reasoning, rest = split_reasoning(text, in_reasoning)
    if rest is None or not rest.strip():
        has_call = _find_calls(reasoning or "", tools)[0]
        return reasoning, rest or "", [ToolCallError(message=_IN_REASONING)] if has_call else []
    calls, content = _find_calls(rest, tools)
    return reasoning, content.strip() if _valid(calls) else rest, calls


def _find_calls(
    text: str, tools: Sequence[ToolSchema]
) -> tuple[list[ToolCall | ToolCallError], str]:
    """Returns the calls, and the text around them with the malformed ones."""
    schemas = {tool.name: tool.parameters for tool in tools}
    mark = MARK.search(text)
    before = text[: mark.start()] if mark else text
    if _may_have_bare(before, schemas):
        bare, start = _formats().read_bare(text, schemas, len(before))
        if bare:
            return bare, text[:start]
    calls: list[ToolCall | ToolCallError] = []
    mentions: list[ToolCall | ToolCallError] = []
    pieces: list[str] = []
    position, malformed = 0, 0
    while mark and malformed < _MOST_MALFORMED:
        start = mark.end()
        reading, end = _read(mark[0], text, start, schemas)
        if isinstance(reading, str):
            malformed += 1
            (mentions if end == start else calls).append(ToolCallError(message=reading))
            following = text.find(mark[0], start)
            end = min(end, following) if following >= 0 else end
            pieces.append(text[position:end])
        else:
            calls += reading
            pieces.append(_formats().without_start_marks(text[position : mark.start()]))
            end = _formats().skip_end_marks(text, end)
        position = end
        mark = MARK.search(text, position)
    pieces.append(text[position:])
    if calls and not malformed:
        outer = [piece for piece in (pieces[0], pieces[-1]) if _may_have_bare(piece, schemas)]
        calls += _formats().bare_beside(calls, outer, schemas) if outer else []
    return calls or mentions, "".join(pieces)


def _may_have_bare(text: str, schemas: Schemas) -> bool:
    """Returns whether a text may have calls without a mark: most texts have none."""
    starts = ("{", "[", "Action:", "\u273fFUNCTION\u273f:")
    return bool(text) and (
        any(start in text for start in starts)
        or any(f"{name}(" in text or f"<{name}" in text for name in schemas)
    )


def _read(mark: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads what follows a mark."""
    inner = skip_space(text, start)
    if mark != HERMES or text[inner : inner + 1] not in ("{", "["):
        reading: Reading = _formats().reader_of(mark)(text, start, schemas)
        return reading
    value, end, fault = decode(text, inner)
    close = text.find(END_OF_HERMES, max(start, end))
    if close < 0:
        return f"the tool call has no closing {END_OF_HERMES}.", inner + 1
    if not fault and text[end:close].strip():
        fault = f"the tool call has text between its JSON and {END_OF_HERMES}."
    return fault or to_calls(value), close + len(END_OF_HERMES)


@cache
def _formats() -> Any:
    return load_module("gspo_env.tool_formats")


def to_calls(value: Any, with_ids: bool = False) -> list[ToolCall] | str:
    """Returns a call or a list of calls, or what is wrong with one of them."""
    calls: list[ToolCall] = []
    for each in value if isinstance(value, list) else [value]:
        call = to_call(each)
        if isinstance(call, str):
            return call
        is_named = with_ids and isinstance(each.get("id"), str)
        calls.append(replace(call, id=each["id"]) if is_named else call)
    return calls or "the list of tool calls is empty."


def to_call(value: Any) -> ToolCall | str:
    """Returns the call, or what is wrong with it in one sentence."""
    if not isinstance(value, dict):
        return f"the tool call must be a JSON object, got {type(value).__name__}."
    if isinstance(value.get("function"), dict) and value.keys() <= {"type", "id", "function"}:
        value = value["function"]
    if unknown := value.keys() - _KEYS:
        return (
            f'the tool call has the unknown key {min(unknown)[:40]!r}; expected "name" and '
            '"arguments".'
        )
    if {"arguments", "parameters"} <= value.keys():
        return 'the tool call has both "arguments" and "parameters".'
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        return 'the tool call needs a "name" that is a string.'
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = {} if arguments == "null" else DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return f'the "arguments" are not valid JSON: {_reason(error)}.'
    if not isinstance(arguments, dict):
        return f'the "arguments" must be a JSON object, got {type(arguments).__name__}.'
    if not all(isinstance(x, str) and x.isascii() for x in (name, *arguments, *arguments.values())):
        if any(depth == _DEEPEST for depth, _ in enumerate(levels(arguments))):
            return f"the tool call is nested more than {_DEEPEST} levels deep."
        try:
            json.dumps([name, arguments], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "the tool call has a lone surrogate, which is no character."
    return ToolCall(name=name, arguments=arguments)


def decode(text: str, start: int) -> tuple[Any, int, str]:
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


def skip_space(text: str, start: int) -> int:
    """Returns the position of the next character that is not white space."""
    end: int = _SPACE.match(text, start).end()
    return end


def reject_constant(name: str) -> float:
    """Refuses `NaN` and `Infinity`, which Python reads in JSON."""
    raise ValueError(f"{name} is not JSON")


def finite_number(text: str) -> float:
    """Reads a number of JSON, unless it is too large for one."""
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(keys := dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice")
    return keys


DECODER = json.JSONDecoder(
    parse_constant=reject_constant, parse_float=finite_number, object_pairs_hook=_unique
)
"""Decodes JSON without NaN, infinite numbers and keys that an object has twice."""
MARK = re.compile("|".join([*map(re.escape, MARKS), rf'<{SPACE}invoke name="']))
