"""Reads the tool calls and the reasoning in what a model writes, in the formats of chat templates.

`READERS` has a reader for the mark that begins a call in each family. A call is read wherever it
stands; the names of a mark in prose are text if a call follows. No function here raises, whatever
the text.
"""

from __future__ import annotations

import ast
import json.decoder
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from gspo_env.errors import ConfigError
from gspo_env.types import Message, ToolCall

_THINK, _END_OF_THINK = "<think>", "</think>"
_HERMES, _XML, _LLAMA, _MISTRAL = "<tool_call>", "<function=", "<|python_tag|>", "[TOOL_CALLS]"
_END_OF_HERMES = "</tool_call>"
_ARGUMENTS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_MOST_MALFORMED = 32
"""Malformed calls after which the rest of a text is not searched, so that the time is linear."""
_DEEPEST = 100
"""Most levels of the arguments of a call."""
_LONGEST_LITERAL = 1 << 16
"""Characters of a call that is written in Python."""
_SPACE: Any = json.decoder.WHITESPACE  # type: ignore[attr-defined]
_KEYS = {"name", "arguments", "parameters", "id", "type"}
_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_BEFORE = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|tool_calls_section_begin|>",
    "<atem:function_calls>",
    "<|channel|>commentary",
    "<|start|>assistant",
)
"""Marks before the first call that belong to none."""
_ENDS = (
    "</tool_call>",
    "<|/tool_call|>",
    "</atem:function_calls>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<|tool_calls_section_end|>",
    "<|tool_response>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|eom|>",
)
"""Marks behind a call that belong to none."""
_AFTER = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, _ENDS))}))*")
_BARE = re.compile(r"^[ \t]*(?=[{\[])", re.MULTILINE)
_BROKEN = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"')
_GLM_PAIR = re.compile(r"(.*?)</arg_key>\s*<arg_value>(.*)</arg_value>\s*", re.DOTALL)
_END_OF_GEMMA = "<tool_call|>"
_GEMMA_MARK = re.compile(r'<\|"\|>|<tool_call\|>')
_GEMMA_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')
_UNCLOSED = (
    f"the tool call is in reasoning that has no closing {_END_OF_THINK}, write {_END_OF_THINK} "
    "before it."
)
_LLAMA_FORM = 'the tool call must be a JSON object of "name" and "parameters".'
_PYTHON_FORM = "the tool call must be [NAME(KEY=VALUE, ...)] with literal values."


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


class _Tags(NamedTuple):
    """The tags of a family whose calls are XML."""

    parameter: str
    close_parameter: str
    close: str
    form: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallError:
    """A malformed call."""

    message: str
    """The error in one sentence."""


Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool."""
Reading = tuple[list[ToolCall] | str, int]
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

    Calls inside the reasoning are ignored. If the reasoning never ends, a call in it is an error.

    Args:
        text: What the policy wrote, without the token that ended it.
        tools: The tools that it may call. Their schemas give the types of XML arguments, and a bare
            JSON object is a call only if it names one of them. Without tools, any name is accepted.
        message: The action as the tokenizer's response template has parsed it, if it has one. Its
            calls come before those in the text.
        in_reasoning: Whether the prompt has opened the reasoning, with `<think>` at its end.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
        [ToolCall(name='now', arguments={}, id='')]
    """
    if message is not None and message.tool_calls:
        return list(message.tool_calls)
    return _split(text, tools, in_reasoning)[2]


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
        in reasoning that never ends count as one, and stay in the reasoning.

    Example:
        >>> message, malformed = parse_message('<tool_call>{"name": "now"}</tool_call>')
        >>> message.tool_calls, malformed
        ((ToolCall(name='now', arguments={}, id=''),), 0)
    """
    reasoning, content, calls = _split(text, tools, in_reasoning)
    valid = tuple(call for call in calls if isinstance(call, ToolCall))
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
    malformed = 0
    if message is None or not message.tool_calls:
        parsed, malformed = parse_message(text, tools, in_reasoning=in_reasoning)
        message = parsed if message is None or parsed.tool_calls else message
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
    calls = _calls(list(values)) if values else []
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
    start = text.lstrip()
    if not in_reasoning and not start.startswith(_THINK):
        return None, text
    reasoning, end, rest = start.removeprefix(_THINK).partition(_END_OF_THINK)
    return reasoning.strip("\n"), rest.lstrip("\n") if end else None


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
    if rest is None:
        has_call = _MARK.search(text)
        return reasoning, "", [ToolCallError(message=_UNCLOSED)] if has_call else []
    calls, content = _find_calls(rest, tools)
    is_call = any(isinstance(call, ToolCall) for call in calls)
    return reasoning, content.strip() if is_call else rest, calls


def _find_calls(
    text: str, tools: Sequence[ToolSchema]
) -> tuple[list[ToolCall | ToolCallError], str]:
    """Returns the calls, and the text around them with the malformed ones."""
    schemas = {tool.name: tool.parameters for tool in tools}
    bare, start = _bare(text, schemas, anywhere=_MARK.search(text) is None)
    if bare:
        return bare, text[:start]
    calls: list[ToolCall | ToolCallError] = []
    mentions: list[ToolCall | ToolCallError] = []
    pieces: list[str] = []
    position, malformed = 0, 0
    while (mark := _MARK.search(text, position)) and malformed < _MOST_MALFORMED:
        start = mark.end()
        reading, end = READERS[mark[0]](text, start, schemas)
        if isinstance(reading, str):
            malformed += 1
            (mentions if end == start else calls).append(ToolCallError(message=reading))
            following = text.find(mark[0], start)
            end = min(end, following) if following >= 0 else end
            pieces.append(text[position:end])
        else:
            calls += reading
            pieces.append(_without_end(text[position : mark.start()], _BEFORE))
            end = _AFTER.match(text, end).end()  # type: ignore[union-attr]  # it may be empty
        position = end
    return calls or mentions, "".join([*pieces, text[position:]])


def _hermes(text: str, start: int, schemas: Schemas) -> Reading:
    inner = _skip(text, start)
    if text.startswith(_XML, inner):
        calls, end = _xml(text, inner + len(_XML), schemas)
        tag = _skip(text, end)
        return calls, tag + len(_END_OF_HERMES) if text.startswith(_END_OF_HERMES, tag) else end
    if text[inner : inner + 1] not in ("{", "["):
        return _glm(text, inner, start, schemas)
    value, end, fault = _decode(text, inner)
    close = text.find(_END_OF_HERMES, max(start, end))
    if close < 0:
        return f"the tool call has no closing {_END_OF_HERMES}.", inner + 1
    if not fault and text[end:close].strip():
        fault = f"the tool call has text between its JSON and {_END_OF_HERMES}."
    return fault or _calls(value), close + len(_END_OF_HERMES)


def _glm(text: str, inner: int, start: int, schemas: Schemas) -> Reading:
    """Reads `NAME`, pairs of `<arg_key>` and `<arg_value>`, and `</tool_call>`."""
    close = text.find(_END_OF_HERMES, start)
    if close >= 0 and text.find(_HERMES, inner, close) >= 0:
        close = -1  # the closing mark is that of a later call
    body = text[inner : close if close >= 0 else inner]
    name, *parts = body.split("<arg_key>")
    name = name.strip()
    if close < 0 or not (parts or name in schemas):
        is_call = close >= 0 and (any(map(body.__contains__, schemas)) if schemas else body.strip())
        what = "JSON object in it" if close >= 0 else f"closing {_END_OF_HERMES}"
        return f"the tool call has no {what}.", close if is_call else start
    pairs = [_GLM_PAIR.fullmatch(part) for part in parts]
    end = close + len(_END_OF_HERMES)
    if not all(pairs):
        return "the tool call must be NAME with <arg_key>KEY</arg_key><arg_value>VALUE...", end
    return _typed_call(name, [(pair[1], pair[2]) for pair in pairs if pair], schemas), end


def _tagged(tags: _Tags, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads the rest of the opening tag, parameters in tags, and the closing tag."""
    close = text.find(tags.close, start)
    if close < 0:
        return f"the tool call has no closing {tags.close}.", start
    end = close + len(tags.close)
    form = f"the tool call must be {tags.form} in it."
    name, bracket, body = text[start:close].partition(">")
    name = name.strip(' "')
    lead, *parameters = body.split(tags.parameter)
    if not bracket or not name or "<" in name or lead.strip():
        return form, end
    pairs = []
    for parameter in parameters:
        key, bracket, value = parameter.partition(">")
        value, tag, trail = value.rpartition(tags.close_parameter)
        key = key.strip(' "')
        if not (bracket and tag and key) or trail.strip():
            return form, end
        pairs.append((key, value.removeprefix("\n").removesuffix("\n")))
    return _typed_call(name, pairs, schemas), end


def _typed_call(
    name: str, pairs: Iterable[tuple[str, str]], schemas: Schemas
) -> list[ToolCall] | str:
    """Returns a call whose arguments are texts, with the types of their schemas."""
    arguments: dict[str, Any] = {}
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    for key, text in pairs:
        if key in arguments:
            return f"the tool call has the argument {key[:40]!r} twice."
        part = properties.get(key) if isinstance(properties, Mapping) else None
        kinds = _kinds(part, schema)
        value = _typed(text, kinds)
        kind = _KINDS[type(value)]
        if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
            expected = " or ".join(sorted(kinds))
            return f"the argument {key[:40]!r} is {text[:40]!r}; expected {expected}."
        arguments[key] = value
    return _calls({"name": name, "arguments": arguments})


def _typed(text: str, kinds: set[str]) -> Any:
    """Returns the value that a text means where these types are allowed, all if there are none."""
    word = text.strip()
    if "null" in kinds and (word in ("null", "None") or not (word or "string" in kinds)):
        return None
    if "string" in kinds:
        return text
    if "boolean" in kinds and word in ("True", "False"):
        return word == "True"
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        value = _literal(word) if kinds & {"array", "object"} else text
    return text if isinstance(value, str) else value


def _kinds(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Returns the JSON types that a schema allows; empty if it does not say."""
    kinds: set[str] = set()
    parts, seen = [schema], set[int]()
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, Mapping):
            return set()
        kind, values = part.get("type"), part.get("enum", [part["const"]] if "const" in part else 0)
        options = [part.get(key) for key in ("anyOf", "oneOf", "allOf")]
        alternatives = [each for option in options if isinstance(option, list) for each in option]
        if isinstance(reference := part.get("$ref"), str):
            parts.append(_resolve(reference, root))
        elif isinstance(kind, (str, list)):
            kinds |= {kind} if isinstance(kind, str) else {k for k in kind if isinstance(k, str)}
        elif alternatives:
            parts += alternatives
        elif isinstance(values, list):
            kinds |= {_KINDS.get(type(value), "object") for value in values}
        else:
            return set()
    return kinds


def _resolve(reference: str, root: Any) -> Any:
    """Returns the part of a schema that `#/...` refers to; None if there is none."""
    for name in reference.removeprefix("#").split("/")[1:]:
        root = root.get(name) if isinstance(root, Mapping) else None
    return root if reference.startswith("#") else None


def _literal(source: str | ast.expr) -> Any:
    """Returns the JSON value of a Python literal, or the source itself if it is none."""
    if isinstance(source, str) and len(source) > _LONGEST_LITERAL:
        return source
    try:
        return json.loads(json.dumps(ast.literal_eval(source), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return source


def _python(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `[NAME(KEY=VALUE, ...), ...]`, or JSON in its place."""
    end = text.find(close, start)
    body = text[start : end if end >= 0 else len(text)]
    end = end + len(close) if end >= 0 else len(text)
    if not body.strip().startswith("["):
        return _PYTHON_FORM, start
    value, stop, fault = _decode(body, _skip(body, 0))
    if not fault and value and not body[stop:].strip():
        return _calls(value), end
    calls = _python_calls(body)
    return calls or _PYTHON_FORM, end


def _python_calls(text: str) -> list[ToolCall]:
    """Returns the calls of a list in Python; none if it is anything else."""
    if len(text) > _LONGEST_LITERAL:
        return []
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    calls = []
    for item in tree.elts if isinstance(tree, ast.List) else []:
        if not isinstance(item, ast.Call) or not isinstance(item.func, (ast.Name, ast.Attribute)):
            return []
        arguments = {word.arg: _literal(word.value) for word in item.keywords}
        if item.args or None in arguments or len(arguments) < len(item.keywords):
            return []
        if any(isinstance(value, ast.expr) for value in arguments.values()):
            return []
        call = _call({"name": ast.unparse(item.func), "arguments": arguments})
        if isinstance(call, str):
            return []
        calls.append(call)
    return calls


def _gemma(text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `NAME{KEY:VALUE,...}<tool_call|>` with texts between `<|"|>`."""
    pieces: list[str] = []
    is_text, position = False, start
    for mark in _GEMMA_MARK.finditer(text, start):
        piece, is_end = text[position : mark.start()], mark[0] == _END_OF_GEMMA
        if is_text and is_end:
            continue
        plain = _GEMMA_KEY.sub(r'\1"\2":', piece).replace("None", "null")
        pieces.append(json.dumps(piece) if is_text else plain)
        is_text, position = not is_text, mark.end()
        if is_end:
            name, brace, body = "".join(pieces).partition("{")
            value, end, fault = _decode(brace + body, 0)
            if not fault and (brace + body)[end:].strip():
                fault = "the tool call has text behind its arguments."
            return fault or _calls({"name": name.strip(), "arguments": value}), position
    return f"the tool call has no closing {_END_OF_GEMMA}.", start


def _headed(
    header: re.Pattern[str], close: str, text: str, start: int, schemas: Schemas
) -> Reading:
    """Reads a header that has the name, a JSON object, and the closing mark if there is one."""
    match = header.match(text, start)
    if match is None:
        return "the tool call has no name and JSON object behind its mark.", start
    value, end, fault = _decode(text, match.end())
    if fault:
        return fault, match.end()
    for mark in ("```", close):
        tail = _skip(text, end)
        end = tail + len(mark) if text.startswith(mark, tail) else end
    return _calls({"name": match["name"], "arguments": value}), end


def _llama(text: str, start: int, schemas: Schemas) -> Reading:
    values, end = _values(text, start)
    return (_calls(values), end) if values else (_LLAMA_FORM, start)


def _bare(
    text: str, schemas: Schemas, anywhere: bool
) -> tuple[list[ToolCall | ToolCallError], int]:
    """Returns the calls that a text without a mark ends with, and where they begin.

    Only JSON or Python that names tools is meant so; without tools, it has to be the whole text and
    have `parameters`.

    Args:
        text: The text.
        schemas: The tools.
        anywhere: Whether other lines may precede the calls.
    """
    body = _without_end(text, _ENDS).rstrip()
    match = _BARE.search(body) if schemas and anywhere else None
    start = match.end() if match else _skip(body, 0)
    if not body.startswith(("{", "["), start):
        return [], 0
    values, end = _values(body, start)
    if not values and schemas:
        python = _python_calls(body[start:])
        if python and all(call.name in schemas for call in python):
            return list(python), start
        cut = _BROKEN.match(body, start)
        fault = _decode(body, start)[2]
        return ([ToolCallError(message=fault)] if cut and cut[1] in schemas else []), start
    if end < len(body) or not all(_is_bare_call(value, schemas) for value in values):
        return [], 0
    calls = map(_call, values)
    return [c if isinstance(c, ToolCall) else ToolCallError(message=c) for c in calls], start


def _is_bare_call(value: Any, schemas: Schemas) -> bool:
    if not isinstance(value, dict):
        return False
    if not schemas:
        return {"name", "parameters"} <= value.keys() and isinstance(_call(value), ToolCall)
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    return len(value) > 1 and str(inner.get("name")) in schemas


def _values(text: str, start: int) -> tuple[list[Any], int]:
    """Reads JSON objects that `;` or white space divides, or a list of them, up to a fault."""
    position = _skip(text, start)
    if text.startswith("[", position):
        value, end, fault = _decode(text, position)
        return ([], start) if fault else (value, _skip(text, end))
    values: list[Any] = []
    while text.startswith("{", position):
        value, end, fault = _decode(text, position)
        if fault:
            break
        values.append(value)
        position = _skip(text, end)
        position = _skip(text, position + 1) if text.startswith(";", position) else position
    return values, position


def _mistral(text: str, start: int, schemas: Schemas) -> Reading:
    position = _skip(text, start)
    if not text.startswith("[", position):
        return _newer_mistral(text, position)
    values, end, fault = _decode(text, position)
    if fault:
        return fault, start
    return _calls(values, with_ids=True), end


def _newer_mistral(text: str, start: int) -> Reading:
    """Reads `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`."""
    following = text.find(_MISTRAL, start)
    mark = text.find(_ARGUMENTS, start, following if following >= 0 else len(text))
    if mark < 0:
        return f"the tool call has neither a JSON list nor {_ARGUMENTS}.", start
    name, _, call_id = text[start:mark].partition(_CALL_ID)
    value, end, fault = _decode(text, _skip(text, mark + len(_ARGUMENTS)))
    call = {"name": name.strip(), "arguments": value, "id": call_id.strip()}
    calls = fault or _calls(call, with_ids=True)
    return calls, mark if isinstance(calls, str) else end


def _calls(value: Any, with_ids: bool = False) -> list[ToolCall] | str:
    """Returns a call or a list of calls, or what is wrong with one of them."""
    calls: list[ToolCall] = []
    for each in value if isinstance(value, list) else [value]:
        call = _call(each)
        if isinstance(call, str):
            return call
        is_named = with_ids and isinstance(each.get("id"), str)
        calls.append(replace(call, id=each["id"]) if is_named else call)
    return calls or "the list of tool calls is empty."


def _call(value: Any) -> ToolCall | str:
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


def _without_end(text: str, marks: Sequence[str]) -> str:
    """Returns a text without marks at its end, each removed once."""
    for mark in marks:
        trimmed = text.rstrip()
        text = trimmed.removesuffix(mark) if trimmed.endswith(mark) else text
    return text


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
_FUNCTIONS = _Tags(
    "<parameter=",
    "</parameter>",
    "</function>",
    "<function=NAME> with <parameter=KEY>VALUE</parameter>",
)
_ATEM = _Tags(
    '<atem:parameter name="',
    "</atem:parameter>",
    "</atem:invoke>",
    '<atem:invoke name="NAME"> with <atem:parameter name="KEY">VALUE</atem:parameter>',
)
_DEEPSEEK = re.compile(
    r"(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<name>[\w.-]+)"
    r"(?:<\uff5ctool\u2581sep\uff5c>|\s*```json)\s*"
)
_HARMONY = re.compile(
    r"(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>\s*"
)
_KIMI = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>\s*")
_xml = partial(_tagged, _FUNCTIONS)
READERS: Mapping[str, Callable[[str, int, Schemas], Reading]] = {
    _HERMES: _hermes,
    _XML: _xml,
    _LLAMA: _llama,
    _MISTRAL: _mistral,
    "<|tool_call|>": _mistral,
    "<|tool_call_start|>": partial(_python, "<|tool_call_end|>"),
    "<|python_start|>": partial(_python, "<|python_end|>"),
    "<|tool_call>call:": _gemma,
    '<atem:invoke name="': partial(_tagged, _ATEM),
    "<\uff5ctool\u2581call\u2581begin\uff5c>": partial(
        _headed, _DEEPSEEK, "<\uff5ctool\u2581call\u2581end\uff5c>"
    ),
    "to=functions.": partial(_headed, _HARMONY, "<|call|>"),
    "<|tool_call_begin|>": partial(_headed, _KIMI, "<|tool_call_end|>"),
}
"""The reader of what follows each mark."""
_MARK = re.compile("|".join(map(re.escape, READERS)))
