"""Reads the bodies of the tool calls that begin with a mark, of all families but JSON alone."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from gspo_env.tools.arguments import Elements, typed_call
from gspo_env.tools.json_calls import (
    Reading,
    Schemas,
    ToolCallError,
    decode,
    skip_space,
    to_call,
    to_calls,
)
from gspo_env.tools.marks import MARK, MARKS, MINIMAX
from gspo_env.tools.python import QUOTED, literal, original_name, statements
from gspo_env.types import ToolCall

_WRAPPERS, _OF_MESSAGES = (
    {"tool_calls", "tool_uses", "function_call"},
    {"role", "content", "refusal"},
)
"""The keys of JSON objects that hold calls, and other keys of the messages around them."""
_SEPARATOR = re.compile(r"\s*(?:[;,]|</[\w:-]{1,64}>\s*<[\w:-]{1,64}>)?\s*")
"""What divides JSON objects."""
_MOST_MARKS = 4
"""Closing marks that are tried as the end of calls in Python."""
_KEY = (
    r"""\s*(?P<quote>["']?+)(?P<key>[^<]*?)(?P=quote)(?: (?:string|type|index)="(?P<type>\w+)")?"""
    r"\s{0,9}"
)
"""A name in a tag, and the type that `string="..."` or `type="..."` gives behind it."""
_PYTHON_NAME = re.compile(r"\s*(?:print\()?(?:default_api\.)?([A-Za-z_][\w.]*)\(")
_NAMED = re.compile(
    r"\s*(?:<server_name>[^<]*</server_name>\s*)?<((?:tool_)?name)>(?P<name>[^<]*+)</\1>\s*"
    r"(?:<(?P<box>arguments|parameters|input)>\s*)?"
)
_LONGEST_NAMING = 1024
"""Characters in which the tag of a call names a tool."""
_CHILD = r"(?P<open><(?P<key>[\w.-]{1,64})>)"
_DEEPEST_ELEMENT = 90
_MINIMAX_TAG = re.compile(rf"{re.escape(MINIMAX)}<(/?)([^<>]+)>")
_GEMMA = (
    rf"|(?P<python>{QUOTED.pattern})|\b(?P<word>None|True|False)\b"
    r'|(?P<before>[{,]\s*)(?P<key>[^\s{}\[\],:"](?:[^{}\[\],:"]*[^\s{}\[\],:"])?)\s*:'
)
_GEMMA_WORDS = {"None": "null", "True": "true", "False": "false"}
_MISTRAL = re.compile(r"\s*(?P<name>[\w./-]{1,200})(?:\[CALL_ID\](?P<id>\w{1,200}))?\[ARGS\]\s*")
_DEEPSEEK = re.compile(
    r"(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<name>[\w./-]+)"
    r"(?:<\uff5ctool\u2581sep\uff5c>|\s*```json)\s*"
)
_HARMONY = re.compile(
    r"(?:functions\.)?(?P<name>[\w./-]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:\w+)?"
    r"<\|message\|>\s*"
)
_KIMI = re.compile(
    r"(?P<prefix>functions[._]?)?(?P<name>[\w./-]{1,200}?)(?(prefix)[:_]?|:)\d{1,9}\s*"
    r"<\|tool_call_argument_begin\|>\s*"
)
_SOLAR = re.compile(r"\w*<\|tool_call:name\|>(?P<name>[\w./-]+)<\|tool_call:args\|>\s*")
_PLAMO = re.compile(
    r"(?P<name>[\w./-]+)<\|plamo:end_tool_name:plamo\|>\s*<\|plamo:begin_tool_arguments:plamo\|>"
    r"(?:[^{]{0,64}<\|plamo:msg\|>)?\s*"
)
_BODY = re.compile(r"[^\s{]{1,200}\s*\{")
"""What shows that a call is meant where its header is malformed."""
PYTHON_FORM = "the tool call must be [NAME(KEY=VALUE, ...)] with literal values."
PYTHON_LINES = "the tool calls must be lines NAME(KEY=VALUE, ...) with literal values."


class _Tags(NamedTuple):
    """The tags of a family whose calls are XML."""

    parameter: str
    close: str
    end: str = ">"
    """The end of an opening tag."""
    value: str = "(.*)"
    """A value, with what a call has as its argument in a group."""


_FUNCTION = _Tags("<parameter=", "</parameter>", value=r"\r\n(.*?)(?:\r\n)?|\n?(.*?)\n?")
ON_LINES = r"\r?\n(.*?)\r?\n"
_INVOKE = _Tags("<parameter name=", "</parameter>", value=ON_LINES)
_MINICPM = _Tags("<param name=", "</param>", value=r"<!\[CDATA\[(.*)\]\]>")
_KIMI_3 = _Tags("<|open|>argument key=", "<|close|>argument<|sep|>", "<|sep|>")


def read_values(
    text: str, start: int, rename: Callable[[Any], Any] | None = None
) -> tuple[list[Any], int]:
    """Reads JSON objects, or lists of them, that `;`, `,`, tags or white space divides."""
    position = skip_space(text, start)
    values: list[Any] = []
    while text.startswith(("{", "["), position):
        value, end, fault = decode(text, position)
        if fault:
            break
        if isinstance(value, dict) and len(inner := value.keys() - _OF_MESSAGES) == 1:
            value = value[min(inner)] if inner <= _WRAPPERS else value
        values += map(rename or _renamed, value if isinstance(value, list) else [value])
        position = _SEPARATOR.match(text, end).end()  # type: ignore[union-attr]  # may be empty
    return values, position


def _renamed(value: Any) -> Any:
    """Returns a call of Command, or of OpenAI's wrapper, with the keys that others have."""
    if not isinstance(value, dict) or not {"tool_name", "recipient_name"} & value.keys():
        return value
    if isinstance(name := value.get("recipient_name"), str):
        value = {**value, "recipient_name": name.removeprefix("functions.")}
    keys = {"tool_name": "name", "recipient_name": "name", "tool_call_id": "id"}
    return {key if keys.get(key) in value else keys.get(key, key): v for key, v in value.items()}


def _apertus(value: Any) -> Any:
    """Returns the call that `{NAME: {...}}` means."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((name, arguments),) = value.items()
    return {"name": name, "arguments": arguments}


def read_pairs(
    text: str, start: int, opening: str, closing: str, ends: tuple[str, ...]
) -> tuple[list[tuple[str, str, str]], int, bool]:
    """Reads values in tags.

    Args:
        text: The text.
        start: Where they begin.
        opening: The pattern of an opening tag with its `key`, perhaps a `type`, and the text that
            would `open` another value.
        closing: The closing tag, with KEY in place of the key.
        ends: What may follow a closing tag.

    Returns:
        Key, text and type of each value, where they end, and whether a value without an end is
        there. A value may itself name the tags or hold a call.
    """
    pairs: list[tuple[str, str, str]] = []
    position = skip_space(text, start)
    while tag := re.compile(opening).match(text, position):
        key, close = tag["key"].strip(), closing.replace("KEY", tag["key"])
        end = _value_end(text, tag.end(), tag["open"], close, ends)
        if end < 0:
            return pairs, position, True
        pairs.append((key, text[tag.end() : end], tag.groupdict().get("type") or ""))
        position = skip_space(text, end + len(close))
    return pairs, position, False


def _value_end(text: str, start: int, opening: str, closing: str, ends: tuple[str, ...]) -> int:
    """Returns where a value ends; -1 if unclear."""
    depth = 0
    for tag in re.compile(f"{re.escape(opening)}|{re.escape(closing)}").finditer(text, start):
        if tag[0] == opening:
            if depth < 0:
                break
            depth += 1
        elif depth <= 0 and text.startswith(ends, skip_space(text, tag.end())):
            return tag.start()
        else:
            depth -= 1
    return -1


def _json(
    rename: Callable[[Any], Any], close: str, text: str, start: int, schemas: Schemas
) -> Reading:
    """Reads JSON objects or lists of them, and the closing mark if there is one."""
    inner = skip_space(text, start)
    if not text.startswith(("{", "["), inner):
        form = 'the tool call must be a JSON object of "name" and "arguments", or a list of them.'
        return [] if text.startswith("<", inner) else form, start
    values, end = read_values(text, inner, rename)
    if not values:
        return decode(text, inner)[2] or to_calls(values), inner + 1
    reading = to_calls(values)
    if text.startswith(("{", "[{"), end) and not isinstance(reading, str):
        return [*reading, ToolCallError(message=decode(text, end)[2])], end + 1
    return reading, end + len(close) if text.startswith(close, end) else end


def _headed(
    header: re.Pattern[str], form: str, close: str, text: str, start: int, schemas: Schemas
) -> Reading:
    """Reads a header that has the name, a JSON object, and the closing mark if there is one."""
    match = header.match(text, start)
    if match is None:
        body = _BODY.match(text, start)
        is_meant = body and not MARK.search(text, start, body.end())
        end = body.end() if body and is_meant else start
        return f"the tool call must be {form} behind its mark.", end
    calls: list[ToolCall | ToolCallError] = []
    end = start
    while match:
        value, stop, fault = decode(text, match.end())
        if close and fault and text.startswith(close, match.end()):
            value, stop, fault = {}, match.end(), ""
        fields = {**match.groupdict(), "arguments": value}
        call = fault or to_call(
            {key: fields[key] for key in ("name", "arguments", "id") if key in fields}
        )
        if isinstance(call, str):
            return ([*calls, ToolCallError(message=call)], end) if calls else (call, match.end())
        calls.append(call)
        for mark in ("```", close) if close else ():
            tail = skip_space(text, stop)
            stop = tail + len(mark) if text.startswith(mark, tail) else stop
        end = stop
        match = header.match(text, end) if header is _MISTRAL else None
    return calls, end


def _mistral(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    if text.startswith("[", skip_space(text, start)):
        return _json(_renamed, close, text, start, schemas)
    return _headed(_MISTRAL, "NAME[ARGS]{...} or a JSON list", "", text, start, schemas)


def _hermes(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads GLM's pairs or elements; JSON is read before, and calls of other families after it."""
    inner = skip_space(text, start)
    if text.startswith(("<name>", "<tool_name>"), inner):
        return _described(close, text, start, schemas)
    nested = MARK.match(text, inner)
    return ([], start) if nested else _glm("", close, text, start, schemas)


def _glm(prefix: str, close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `NAME`, pairs of `<arg_key>` and `<arg_value>`, and a closing mark."""
    tag = (
        rf"<{prefix}arg_key>(?P<key>[^<]*)</{prefix}arg_key>\s*"
        rf"(?:<{prefix}arg_type>\w*</{prefix}arg_type>\s*)?(?P<open><{prefix}arg_value>)"
    ).replace("|", r"\|")
    first = text.find("<", start)
    name = text[start : max(first, start)].strip()
    first += len("<tool_sep>") if text.startswith("<tool_sep>", first) else 0
    ends = (f"<{prefix}arg_key>", close)
    pairs, position, is_open = read_pairs(
        text, max(first, start), tag, f"</{prefix}arg_value>", ends
    )
    if name and text.startswith(close, position) and (pairs or name in schemas):
        return typed_call(name, pairs, schemas), position + len(close)
    cut = position if pairs or is_open else start
    end = text.find(close, start)
    if end < 0 or text.find(close.replace("</", "<"), start, end) >= 0:
        return f"the tool call has no closing {close}.", cut
    body = text[start:end]
    if "arg_key>" in body:
        return "the tool call must be NAME with <arg_key>KEY</arg_key><arg_value>VALUE...", end
    is_call = any(map(body.__contains__, schemas)) if schemas else body.strip()
    return "the tool call has no JSON object in it.", end if is_call else cut


def _tagged(tags: _Tags, close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads the rest of the opening tag, parameters in tags, and the closing tag."""
    stop = text.find(close, start)
    if stop < 0:
        return f"the tool call has no closing {close}.", start
    form = f"NAME with {tags.parameter}KEY{tags.end}VALUE{tags.close}"
    fault = f"the tool call must be {form} in it.", stop + len(close)
    opening = _KEY + re.escape(tags.end)
    head = re.compile(opening).match(text, start)
    position = skip_space(text, head.end()) if head else start
    if head is None or not head["key"].strip():
        return fault
    if text.startswith("{", position):
        value, end, problem = decode(text, position)
        end = skip_space(text, max(end, 0))
        if problem or not text.startswith(close, end):
            return problem or fault[0], fault[1]
        return to_calls({"name": head["key"], "arguments": value}), end + len(close)
    opening = f"(?P<open>{re.escape(tags.parameter)}){opening}"
    ends = (tags.parameter, close)
    pairs, position, _ = read_pairs(text, position, opening, tags.close, ends)
    if not text.startswith(close, position):
        return fault
    value_of = re.compile(tags.value, re.DOTALL).fullmatch
    inner = [(m := value_of(value)) and m[m.lastindex or 0] for _, value, _ in pairs]
    trimmed = [
        (key, text if new is None else new, kind)
        for (key, text, kind), new in zip(pairs, inner, strict=True)
    ]
    return typed_call(head["key"].strip(), trimmed, schemas), position + len(close)


def _tagged_tool(tags: _Tags, close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads the same if it names a tool; other texts may have such tags."""
    name = text[start : start + 256].partition(">")[0].strip(" \"'")
    return _tagged(tags, close, text, start, schemas) if name in schemas else ([], start)


def _described(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads an element with the name, one with the arguments, and the closing tag; or JSON."""
    inner = skip_space(text, start)
    stop = text.find(close, start, start + _LONGEST_NAMING)
    after = max(stop + len(close), inner + 1)
    naming = _NAMED.match(text, start)
    if naming is None and not text.startswith("{", inner):
        is_meant = stop >= 0 or text.startswith("<", inner)
        body = text[start : stop if stop >= 0 else start + _LONGEST_NAMING] if is_meant else ""
        fault = f"the tool call must be <name>NAME</name><arguments>...</arguments>{close}."
        return (fault, after) if any(name in body for name in schemas) else ([], start)
    name, box = (naming["name"].strip(), naming["box"]) if naming else ("", None)
    position = naming.end() if naming else inner
    reading: list[ToolCall] | str
    if text.startswith("{", position):
        value, position, fault = decode(text, position)
        reading = fault or to_calls({"name": name, "arguments": value} if naming else value)
    else:
        pairs, end, _ = read_pairs(text, position, _CHILD if box else "(?!)", "</KEY>", ("<",))
        position = end
        reading = typed_call(name, pairs, schemas)
    position = skip_space(text, max(position, start))
    end_of_box = f"</{box}>" if box else ""
    if text.startswith(end_of_box, position):
        position = skip_space(text, position + len(end_of_box))
        if text.startswith(close, position):
            return reading, position + len(close)
    if isinstance(reading, str):
        return reading, after
    return f"the tool call has no {end_of_box}{close} behind its arguments.", after


def _minimax(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads calls of MiniMax M3: elements that nest, each tag with a mark before it."""
    calls: list[ToolCall | ToolCallError] = []
    position = skip_space(text, start)
    while (opening := _MINIMAX_TAG.match(text, position)) and opening[2].startswith("invoke name="):
        pairs, position = _elements(text, opening.end())
        if pairs is None:
            break
        call = typed_call(opening[2].partition("=")[2].strip("\"'"), pairs, schemas)
        calls += [ToolCallError(message=call)] if isinstance(call, str) else call
        position = skip_space(text, position)
    if text.startswith(close, position) and calls:
        return calls, position + len(close)
    fault = f'the tool calls must be {MINIMAX}<invoke name="NAME"> with elements in it.'
    return ([*calls, ToolCallError(message=fault)] if calls else fault), max(position, start)


def _elements(text: str, start: int) -> tuple[list[tuple[str, Any, str]] | None, int]:
    """Returns the elements up to the end of a call, None if one has no end, and where that is."""
    stack: list[tuple[str, int, list[tuple[str, Any]]]] = [("invoke", start, [])]
    for tag in _MINIMAX_TAG.finditer(text, start):
        name, begin, items = stack[-1]
        if not tag[1]:
            stack.append((tag[2], tag.end(), []))
        elif tag[2] not in (name, name.partition(" name=")[0]):
            break
        elif len(stack) == 1:
            return [(key, value, "") for key, value in items], tag.end()
        else:
            stack.pop()
            inside = text[begin : tag.start()]
            stack[-1][2].append((name, Elements(inside, items) if items else inside))
        if len(stack) > _DEEPEST_ELEMENT:
            break
    return None, start


def _gemma(quote: str, close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `NAME{KEY:VALUE,...}` and a closing mark, with texts between two quotes."""
    quote = re.escape(quote)
    tokens = rf"{quote}(?P<text>.*?)(?:{quote}|\Z)|(?P<close>{re.escape(close)}){_GEMMA}"
    parts, position = [], start
    for token in re.compile(tokens, re.DOTALL).finditer(text, start):
        parts.append(text[position : token.start()])
        position = token.end()
        if token["close"]:
            name, brace, body = "".join(parts).partition("{")
            value, end, fault = decode(brace + body)
            if not fault and (brace + body)[end:].strip():
                fault = "the tool call has text behind its arguments."
            return fault or to_calls({"name": name.strip(), "arguments": value}), position
        if token["text"] is not None:
            parts.append(json.dumps(token["text"]))
        elif token["key"]:
            parts.append(f'{token["before"]}"{token["key"]}":')
        elif token["word"]:
            parts.append(_GEMMA_WORDS[token[0]])
        else:
            parts.append(token[0] if token[0][0] == '"' else json.dumps(literal(token[0])))
    return f"the tool call has no closing {close}.", start


def _python(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `[NAME(KEY=VALUE, ...), ...]`, or JSON in its place."""
    inner = skip_space(text, start)
    if not text.startswith(("[", "{"), inner):
        return PYTHON_FORM, start
    value, stop, fault = decode(text, inner)
    stop = skip_space(text, max(stop, 0))
    if not fault and value and (stop == len(text) or text.startswith(close, stop)):
        return to_calls(value), min(stop + len(close), len(text))
    calls, end = _python_to(close, text, start)
    return calls or PYTHON_FORM, end


def _python_lines(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads lines `NAME(KEY=VALUE, ...)` and a closing mark, if the first names a tool."""
    name = _PYTHON_NAME.match(text, start)
    if name is None or name[1] not in schemas:
        return [], start
    if text.find(close, start) < 0:
        return f"the tool call has no closing {close}.", start
    calls, end = _python_to(close, text, start)
    return calls or PYTHON_LINES, end


def _python_to(close: str, text: str, start: int) -> tuple[list[ToolCall], int]:
    """Returns the calls before a closing mark or the end, and where they end.

    A text in the calls may name the mark.
    """
    marks = [*islice(re.compile(re.escape(close)).finditer(text, start), _MOST_MARKS)]
    for mark in marks:
        if calls := python_calls(text[start : mark.start()]):
            return calls, mark.end()
    return ([], marks[0].end()) if marks else (python_calls(text[start:]), len(text))


def python_calls(text: str) -> list[ToolCall]:
    """Returns the calls in lines or a list in Python; none if it is anything else."""
    lines = statements(text) or []
    return calls_of([line.value if isinstance(line, ast.Expr) else line for line in lines])


def calls_of(values: Sequence[ast.AST]) -> list[ToolCall]:
    """Returns the calls that expressions are; none if one is anything else."""
    lists = [value.elts if isinstance(value, ast.List) else [value] for value in values]
    calls = []
    for item in chain(*lists):
        if not isinstance(item, ast.Call) or not isinstance(item.func, (ast.Name, ast.Attribute)):
            return []
        arguments = {
            word.arg and original_name(word.arg): literal(word.value) for word in item.keywords
        }
        if item.args or None in arguments or len(arguments) < len(item.keywords):
            return []
        if any(isinstance(value, ast.expr) for value in arguments.values()):
            return []
        call = to_call({"name": original_name(ast.unparse(item.func)), "arguments": arguments})
        if isinstance(call, str):
            return []
        calls.append(call)
    return calls


_READERS: Mapping[str, Callable[[str, str, int, Schemas], Reading]] = {
    "hermes": _hermes,
    "ifm": partial(_glm, "ifm|"),
    "function": partial(_tagged, _FUNCTION),
    "kimi 3": partial(_tagged, _KIMI_3),
    "invoke": partial(_tagged_tool, _INVOKE),
    "minicpm": partial(_tagged_tool, _MINICPM),
    "minimax": _minimax,
    "described": _described,
    "mistral": _mistral,
    "json": partial(_json, _renamed),
    "apertus": partial(_json, _apertus),
    "python": _python,
    "python lines": _python_lines,
    "gemma": partial(_gemma, '<|"|>'),
    "function gemma": partial(_gemma, "<escape>"),
    "deepseek": partial(_headed, _DEEPSEEK, "NAME<\uff5ctool\u2581sep\uff5c>{...}"),
    "harmony": partial(_headed, _HARMONY, "NAME<|message|>{...}"),
    "kimi": partial(_headed, _KIMI, "functions.NAME:0<|tool_call_argument_begin|>{...}"),
    "solar": partial(_headed, _SOLAR, "ID<|tool_call:name|>NAME<|tool_call:args|>{...}"),
    "plamo": partial(_headed, _PLAMO, "NAME and its arguments in JSON"),
}
"""The reader of a body, by its family."""


def read_family(mark: re.Match[str], text: str, schemas: Schemas) -> Reading:
    """Reads the call or calls behind a mark."""
    if mark[0] in MARKS:
        close, family = MARKS[mark[0]]
        return _READERS[family](close, text, mark.end(), schemas)
    space = mark[0].removeprefix("<").removesuffix("invoke name=")
    tags = _Tags(f"<{space}parameter name=", f"</{space}parameter>")
    return _tagged(tags, f"</{space}invoke>", text, mark.end(), schemas)
