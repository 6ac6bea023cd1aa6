"""The formats of tool calls other than the JSON of Hermes and Qwen; loaded when a text has one."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from gspo_env.registry import load_function
from gspo_env.tool_arguments import LONGEST_LITERAL, Elements, literal, typed_call
from gspo_env.tool_calls import (
    END_OF_HERMES,
    HERMES,
    MARK,
    SPACE,
    XML,
    Reading,
    Schemas,
    ToolCallError,
    decode,
    skip_space,
    to_call,
    to_calls,
)
from gspo_env.types import ToolCall

_WRAPPERS = ({"tool_calls"}, {"tool_uses"}, {"function_call"})
"""The keys of JSON objects that hold calls."""
_OF_MESSAGES = {"role", "content", "refusal"}
"""Other keys of messages, which models write around their calls."""
_WRAPPED = re.compile(r'\{[^{}\[\]]{0,999}"(?:tool_calls|tool_uses|function_call)"\s*:')
_BEFORE = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_section_begin|>",
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<dots_function_call>",
    "<function_calls>",
    "<ifm|tool_calls>",
    "<|plamo:begin_tool_request:plamo|>",
    "<|plamo:begin_tool_requests:plamo|>",
    "<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>",
    "<\uff5ctool_calls_begin\uff5c>",
    "<|open|>tools<|sep|>",
    "<|tool_calls|>",
    "<|channel|>commentary",
    "<|channel|>analysis",
    "<|start|>assistant",
)
"""Marks before the first call that belong to none."""
ENDS = (
    "</tool_call>",
    "<|/tool_call|>",
    "</minimax:tool_call>",
    "</seed:tool_call>",
    "</dots_function_call>",
    "</function_calls>",
    "</tool_calls>",
    "</ifm|tool_calls>",
    "<|plamo:end_tool_request:plamo|>",
    "<|plamo:end_tool_requests:plamo|>",
    "<\uff5ctool_call_end\uff5c>",
    "<\uff5ctool_calls_end\uff5c>",
    "<|close|>tools<|sep|>",
    "<|close|>message<|sep|>",
    "<|calls|>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_end|>",
    "<|tool_response>",
    "<tool_call|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|eom|>",
)
"""Marks behind a call that belong to none."""
_SPACED_CALLS = rf"{SPACE} ?\w{{0,16}}(?:calls|_use)[|\uff5c]?"
_BEFORE_SPACED = re.compile(rf"<{_SPACED_CALLS}>?\s*\Z")
_AFTER = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, ENDS))}|</{_SPACED_CALLS}>?))*")
_ARGUMENTS, _CALL_ID, _MISTRAL = "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]"
_CDATA = "<![CDATA["
ON_LINES = re.compile(r"\n.*\n|\r\n.*\r\n", re.DOTALL)
_MOST_MARKS = 4
"""Closing marks that are tried as the end of calls in Python."""
_PARALLEL = "multi_tool_use.parallel("
_BARE = re.compile(r"^[ \t]*(?=[{\[])", re.MULTILINE)
_FENCE = re.compile(r"```\w*[ \t]*\n(?=\s*[{\[][^`]*```\Z)")
"""The start of a block of code with JSON or Python that ends a text."""
_LONGEST_TAG, _MOST_BLOCKS = 64, 32
_LAST_TAG = re.compile(r"</([\w:-]+)>\Z")
_CLOSING = re.compile(r"(?<=[}\]])(?:\s{0,9}(?:</[\w:-]{1,64}>|<<<\w{1,64}>>>)){1,4}\Z")
"""Closing tags without an opening one behind a call."""
_BROKEN = re.compile(
    r'(?:\{\s*"tool_(?:call|use)s"\s*:\s*)?(?:\[\s*|(?<!\s)\s++)?\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"\w*"\s*,\s*)?'
    r"""["']?(?:tool_|recipient_)?name["']?\s*:\s*["'](?:functions\.)?([^"']*)["']"""
    r"|\[\s*([\w.-]+)\("
)
"""The start of a call in JSON or Python, with its name."""
_GLM_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_AFTER_GLM_VALUE = ("<arg_key>", END_OF_HERMES)
_END_OF_IFM, _IFM = (
    "</ifm|tool_call>",
    re.compile(r"<ifm\|arg_type>\w*</ifm\|arg_type>|(?<=<)ifm\||(?<=</)ifm\|"),
)
_REACT = re.compile(
    r"(?:\bAction|\u273fFUNCTION\u273f):[ \t]*([\w.-]{1,200})[ \t]*(?:"
    r"\n+(?:Action Input|\u273fARGS\u273f):\s*(?:```\w*\n)?|(?:\n[ActionIputn ]*)?\Z|(?=[(\[{]))"
)
"""The start of a call of ReAct, with its name."""
_OBSERVED = re.compile("\nObservation|\u273fRESULT\u273f")
_END_OF_APERTUS = "<|tools_suffix|>"
_NAMESPACE = "]<]minimax[>["
_MINIMAX_TAG = re.compile(rf"{re.escape(_NAMESPACE)}<(/?)([^<>]+)>")
_NAMED = re.compile(r"\s*[\w.-]+\s*\{")
_MORE = re.compile(r"\s*(?P<name>[\w.-]{1,200})(?:\[CALL_ID\](?P<id>\w{1,200}))?\[ARGS\]\s*")
_PYTHON_NAME = re.compile(r"\s*(?:print\()?(?:default_api\.)?([A-Za-z_][\w.]*)\(")
_NAME_START = re.compile(r"\s*(?:<server_name>[^<]*</server_name>\s*)?<((?:tool_)?name)>")
_NAME_TAG = re.compile(rf"{_NAME_START.pattern}\s*([^<]*?)\s*</\1>\s*")
_LONGEST_NAMING = 1024
"""Characters in which the tag of a call names a tool."""
_ARGUMENTS_TAG = re.compile(r"<(arguments|parameters|input)>\s*")
_CHILD = re.compile(r"<([\w.-]{1,64})>")
_DEEPEST_ELEMENT = 90
_TYPE = re.compile(r'" (?:string|type|index)="(\w+)\Z')
"""The end of a quoted name with a type behind it."""
_KEYWORD, _SIGNS = "_keyword_", {"-": "_x2d_sign_", ".": "_x2e_sign_"}
_TEXT = r""""(?:[^"\\]|\\.?)*(?:"|\Z)|'(?:[^'\\]|\\.?)*(?:'|\Z)"""
_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtvxuUN0-7\n]|(.))")
"""A backslash and what it escapes, in a group if that is nothing in Python."""
_PYTHON_TOKEN = re.compile(
    rf"{_TEXT}|\b({'|'.join(keyword.kwlist)})(?=\s*=[^=])"
    r"|(?<![\w.-])([^\W\d]\w*+(?:\.*-\w++|\.++\w++)++)(?=\s*(=[^=]|\())",
    re.DOTALL,
)
TEXT = re.compile(_TEXT, re.DOTALL)
"""A text in quotes, which may have no end."""
_GEMMA_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"](?:[^{}\[\],:"]*[^\s{}\[\],:"])?)\s*:')
_GEMMA_WORD = re.compile(r'\b(?:None|True|False)\b(?!")')
_WORDS = {"None": "null", "True": "true", "False": "false"}
_JSON_FORM = 'the tool call must be a JSON object of "name" and "arguments", or a list of them.'
_PYTHON_FORM = "the tool call must be [NAME(KEY=VALUE, ...)] with literal values."
_PYTHON_LINES = "the tool calls must be lines NAME(KEY=VALUE, ...) with literal values."


class _Tags(NamedTuple):
    """The tags of a family whose calls are XML."""

    parameter: str
    close_parameter: str
    close: str
    form: str
    end: str = ">"
    """The end of an opening tag."""


def without_end(text: str, marks: Sequence[str]) -> str:
    """Returns a text without marks at its end, each removed once."""
    for mark in marks:
        trimmed = text.rstrip()
        text = trimmed.removesuffix(mark) if trimmed.endswith(mark) else text
    return text


def without_start_marks(text: str) -> str:
    """Returns the text before a call without the marks at its end that open a list of calls."""
    return without_end(_BEFORE_SPACED.sub("", text), _BEFORE) if text else text


def skip_end_marks(text: str, start: int) -> int:
    """Returns the position behind the marks that follow a call and belong to none."""
    return _AFTER.match(text, start).end()  # type: ignore[union-attr]  # it may be empty


def _tagged_hermes(text: str, start: int, schemas: Schemas) -> Reading:
    """Reads pairs between the tags of Hermes; the calls of other families follow as their own."""
    inner = skip_space(text, start)
    if text.startswith(("<name>", "<tool_name>"), inner):
        return _described(END_OF_HERMES, text, start, schemas)
    return ([], start) if MARK.match(text, inner) else _glm(text, inner, start, schemas)


def _glm(text: str, inner: int, start: int, schemas: Schemas) -> Reading:
    """Reads `NAME`, pairs of `<arg_key>` and `<arg_value>`, and `</tool_call>`."""
    first = text.find("<arg_key>", inner)
    name = text[inner : max(first, inner)].strip().removesuffix("<tool_sep>")
    pairs, position, cut = [], first, start
    if name and "<" not in name:
        while key := _GLM_KEY.match(text, position):
            cut = key.end()
            end = value_end(text, key.end(), "<arg_value>", "</arg_value>", _AFTER_GLM_VALUE)
            if end < 0:
                break
            pairs.append((key[1], text[key.end() : end]))
            position = skip_space(text, end + len("</arg_value>"))
        if text.startswith(END_OF_HERMES, position):
            return typed_call(name, pairs, schemas), position + len(END_OF_HERMES)
    close = text.find(END_OF_HERMES, start)
    if close >= 0 and text.find(HERMES, inner, close) >= 0:
        close = -1  # the closing mark is that of a later call
    body = text[inner : close if close >= 0 else inner]
    name, *parts = body.split("<arg_key>")
    if close >= 0 and parts:
        return "the tool call must be NAME with <arg_key>KEY</arg_key><arg_value>VALUE...", close
    if close < 0 or name.strip() not in schemas:
        is_call = close >= 0 and (any(map(body.__contains__, schemas)) if schemas else body.strip())
        what = "JSON object in it" if close >= 0 else f"closing {END_OF_HERMES}"
        return f"the tool call has no {what}.", close if is_call else cut
    return to_calls({"name": name.strip()}), close + len(END_OF_HERMES)


def _ifm(text: str, start: int, schemas: Schemas) -> Reading:
    """Reads the tags of GLM with a prefix, and the types of values between them."""
    close = text.find(_END_OF_IFM, start)
    if close < 0:
        return f"the tool call has no closing {_END_OF_IFM}.", start
    body = _IFM.sub("", text[start:close]) + END_OF_HERMES
    return _glm(body, 0, 0, schemas)[0], close + len(_END_OF_IFM)


def _tagged(tags: _Tags, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads the rest of the opening tag, parameters in tags, and the closing tag."""
    close = text.find(tags.close, start)
    if close < 0:
        return f"the tool call has no closing {tags.close}.", start
    fault = f"the tool call must be {tags.form} in it.", close + len(tags.close)
    name, _, begin = _attribute(text, start, tags.end)
    pairs, position = [], skip_space(text, begin)
    types: dict[str, str] = {}
    if name and text.startswith("{", position):
        value, end, problem = decode(text, position)
        end = skip_space(text, max(end, 0))
        if problem or not text.startswith(tags.close, end):
            return problem or fault[0], fault[1]
        return to_calls({"name": name, "arguments": value}), end + len(tags.close)
    while name and text.startswith(tags.parameter, position):
        key, kind, begin = _attribute(text, position + len(tags.parameter), tags.end)
        following = (tags.parameter, tags.close)
        end = value_end(text, begin, tags.parameter, tags.close_parameter, following)
        if not key or end < 0:
            return fault
        value = text[begin:end]
        line = "\r\n" if value.startswith("\r\n") else "\n"
        if tags is _FUNCTIONS or (tags is _INVOKE and ON_LINES.fullmatch(value)):
            value = value.removeprefix(line).removesuffix(line)
        if tags is _MINICPM and value.startswith(_CDATA) and value.endswith("]]>"):
            value = value.removeprefix(_CDATA).removesuffix("]]>")
        pairs.append((key, value))
        types |= {key: kind} if kind else {}
        position = skip_space(text, end + len(tags.close_parameter))
    if not name or not text.startswith(tags.close, position):
        return fault
    return typed_call(name, pairs, schemas, types), position + len(tags.close)


def _attribute(text: str, start: int, end: str) -> tuple[str, str, int]:
    """Returns the name in an opening tag, empty if it is none, its type, and the content's start.

    The type is what `string="..."` or `type="..."` says behind the name, or empty.
    """
    quote = next((q for q in text[max(start - 1, 0) : start + 1][::-1] if q in "\"'"), "")
    bracket = text.find(f"{quote}{end}", start) + len(quote)
    name = text[start : max(bracket, start)].strip(" \"'")
    typed = _TYPE.search(name) if quote else None
    if typed:
        name = name[: typed.start()]
    return ("" if "<" in name else name), typed[1] if typed else "", bracket + len(end)


def value_end(text: str, start: int, opening: str, closing: str, following: tuple[str, ...]) -> int:
    """Returns where a value ends, which may itself name the tags or hold a call; -1 if unclear."""
    depth = 0
    for tag in re.compile(f"{re.escape(opening)}|{re.escape(closing)}").finditer(text, start):
        if tag[0] == opening:
            if depth < 0:
                break
            depth += 1
        elif depth <= 0 and text.startswith(following, skip_space(text, tag.end())):
            return tag.start()
        else:
            depth -= 1
    return -1


def _tagged_tool(tags: _Tags, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads the same if it names a tool; other texts may have such tags."""
    name = text[start : start + 256].partition(">")[0].strip(" \"'")
    return _tagged(tags, text, start, schemas) if name in schemas else ([], start)


def _described(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads an element with the name, one with the arguments, and the closing tag; or JSON."""
    inner = skip_space(text, start)
    stop = text.find(close, start, start + _LONGEST_NAMING)
    after = max(stop + len(close), inner + 1)
    name = _NAME_TAG.match(text, start)
    if name is None and not text.startswith("{", inner):
        fault = f"the tool call must be <name>NAME</name><arguments>...</arguments>{close}."
        is_meant = stop >= 0 or _NAME_START.match(text, start)
        body = text[start : stop if stop >= 0 else start + _LONGEST_NAMING] if is_meant else ""
        is_call = any(each in body for each in schemas)
        return (fault, after) if is_call else ([], start)
    position = name.end() if name else inner
    reading: list[ToolCall] | str
    box = _ARGUMENTS_TAG.match(text, position) if name else None
    end = f"</{box[1]}>" if box else ""
    position = box.end() if box else position
    if text.startswith("{", position):
        value, position, fault = decode(text, position)
        reading = fault or to_calls({"name": name[2], "arguments": value} if name else value)
    else:
        pairs: list[tuple[str, str]] = []
        while box and (child := _CHILD.match(text, position)):
            last = value_end(text, child.end(), child[0], f"</{child[1]}>", ("<",))
            if last < 0:
                break
            pairs.append((child[1], text[child.end() : last]))
            position = skip_space(text, last + len(child[1]) + 3)
        reading = typed_call(name[2] if name else "", pairs, schemas)
    position = skip_space(text, max(position, start))
    if text.startswith(end, position):
        position = skip_space(text, position + len(end))
        if text.startswith(close, position):
            return reading, position + len(close)
    if isinstance(reading, str):
        return reading, after
    return f"the tool call has no {end}{close} behind its arguments.", after


def _to_python(token: re.Match[str]) -> str:
    """Escapes line breaks in a text, and lets a keyword or signs be in a name."""
    if token[1]:
        return f"{_KEYWORD}{token[1]}"
    if token[2]:
        return re.sub("[-.]", lambda sign: _SIGNS[sign[0]], token[2])
    escaped = _ESCAPE.sub(lambda match: f"\\{match[0]}" if match[1] else match[0], token[0])
    return escaped.replace("\r", "\\r").replace("\n", "\\n")


def _name(name: str) -> str:
    """Returns a name in Python as it was before `_to_python`."""
    for sign, word in _SIGNS.items():
        name = name.replace(word, sign)
    return name.removeprefix(_KEYWORD)


class _JSONWords(ast.NodeTransformer):
    """Turns the words of JSON into constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Returns the constant that a name means, or the name."""
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _python(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `[NAME(KEY=VALUE, ...), ...]`, or JSON in its place."""
    if not text.startswith(("[", "{"), skip_space(text, start)):
        return _PYTHON_FORM, start
    value, stop, fault = decode(text, skip_space(text, start))
    stop = skip_space(text, max(stop, 0))
    if not fault and value and (stop == len(text) or text.startswith(close, stop)):
        return to_calls(value), min(stop + len(close), len(text))
    calls, end = _python_to(close, text, start)
    return calls or _PYTHON_FORM, len(text) if end < 0 else end


def _python_to(close: str, text: str, start: int) -> tuple[list[ToolCall], int]:
    """Returns the calls before a closing mark, which a text in them may name, and where it ends.

    Without a mark, the calls end the text and the position is -1.
    """
    end = first = text.find(close, start)
    if first < 0:
        return python_calls(text[start:]), -1
    for _ in range(_MOST_MARKS):
        calls = python_calls(text[start:end])
        end += len(close)
        if calls or text.find(close, end) < 0:
            break
        end = text.find(close, end)
    return calls, end if calls else first + len(close)


def _python_lines(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads lines `NAME(KEY=VALUE, ...)` and a closing mark, if the first names a tool."""
    name = _PYTHON_NAME.match(text, start)
    if name is None or name[1] not in schemas:
        return [], start
    calls, end = _python_to(close, text, start)
    if end < 0:
        return f"the tool call has no closing {close}.", start
    return calls or _PYTHON_LINES, end


def _minimax(text: str, start: int, schemas: Schemas) -> Reading:
    """Reads calls of MiniMax M3: elements that nest, each tag with a mark before it."""
    calls: list[ToolCall | ToolCallError] = []
    position = skip_space(text, start)
    while (opening := _MINIMAX_TAG.match(text, position)) and opening[2].startswith("invoke name="):
        pairs, position = _elements(text, opening.end())
        if pairs is None:
            break
        name = opening[2].partition("=")[2].strip("\"'")
        call = typed_call(name, pairs, schemas)
        calls += [ToolCallError(message=call)] if isinstance(call, str) else call
        position = skip_space(text, position)
    end = _MINIMAX_TAG.match(text, position)
    if end and end[0].endswith("</tool_call>") and calls:
        return calls, end.end()
    fault = f'the tool calls must be {_NAMESPACE}<invoke name="NAME"> with elements in it.'
    return ([*calls, ToolCallError(message=fault)] if calls else fault), max(position, start)


def _elements(text: str, start: int) -> tuple[list[tuple[str, Any]] | None, int]:
    """Returns the elements up to the end of a call, None if one has no end, and where that is."""
    starts, levels_ = [("invoke", start)], [list[tuple[str, Any]]()]
    for tag in _MINIMAX_TAG.finditer(text, start):
        name, begin = starts[-1]
        if not tag[1]:
            starts.append((tag[2], tag.end()))
            levels_.append([])
        elif tag[2] not in (name, name.partition(" name=")[0]):
            break
        elif len(starts) == 1:
            return levels_[0], tag.end()
        else:
            starts.pop()
            children = Elements(text[begin : tag.start()], levels_.pop())
            levels_[-1].append((name, children if children.items else children.text))
        if len(starts) > _DEEPEST_ELEMENT:
            break
    return None, start


def python_lines(text: str) -> list[ast.stmt] | None:
    """Returns the statements of a text in Python; None if it is anything else."""
    if len(text) > LONGEST_LITERAL:
        return None
    try:
        return ast.parse(_PYTHON_TOKEN.sub(_to_python, text.strip())).body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def python_calls(text: str) -> list[ToolCall]:
    """Returns the calls in lines or a list in Python; none if it is anything else."""
    lines = python_lines(text) or []
    return calls_of([line.value if isinstance(line, ast.Expr) else line for line in lines])


def calls_of(values: Sequence[ast.AST]) -> list[ToolCall]:
    """Returns the calls that expressions are; none if one is anything else."""
    lists = [value.elts if isinstance(value, ast.List) else [value] for value in values]
    calls = []
    for item in chain(*lists):
        if not isinstance(item, ast.Call) or not isinstance(item.func, (ast.Name, ast.Attribute)):
            return []
        arguments = {
            word.arg and _name(word.arg): literal(_JSONWords().visit(word.value))
            for word in item.keywords
        }
        if item.args or None in arguments or len(arguments) < len(item.keywords):
            return []
        if any(isinstance(value, ast.expr) for value in arguments.values()):
            return []
        call = to_call({"name": _name(ast.unparse(item.func)), "arguments": arguments})
        if isinstance(call, str):
            return []
        calls.append(call)
    return calls


def _gemma(quote: str, close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `NAME{KEY:VALUE,...}` and a closing mark, with texts between two quotes."""
    pieces: list[str] = []
    is_text, position = False, start
    for mark in re.compile(f"{re.escape(quote)}|{re.escape(close)}").finditer(text, start):
        piece, is_end = text[position : mark.start()], mark[0] == close
        if is_text and is_end:
            continue
        pieces.append(json.dumps(piece) if is_text else _gemma_to_json(piece))
        is_text, position = not is_text, mark.end()
        if is_end:
            name, brace, body = "".join(pieces).partition("{")
            value, end, fault = decode(brace + body, 0)
            if not fault and (brace + body)[end:].strip():
                fault = "the tool call has text behind its arguments."
            return fault or to_calls({"name": name.strip(), "arguments": value}), position
    return f"the tool call has no closing {close}.", start


def _gemma_to_json(piece: str) -> str:
    """Returns what is not between `<|"|>` as JSON; texts may be in the quotes of JSON or Python."""
    parts, position = [], 0
    for quoted in [*TEXT.finditer(piece), None]:
        plain = _GEMMA_KEY.sub(r'\1"\2":', piece[position : quoted.start() if quoted else None])
        parts.append(_GEMMA_WORD.sub(lambda word: _WORDS[word[0]], plain))
        if quoted:
            value = quoted[0] if quoted[0][0] == '"' else json.dumps(literal(quoted[0]))
            parts.append(value)
            position = quoted.end()
    return "".join(parts)


def _headed(
    header: re.Pattern[str], body: str, close: str, text: str, start: int, schemas: Schemas
) -> Reading:
    """Reads a header that has the name, a JSON object, and the closing mark if there is one."""
    match = header.match(text, start)
    if match is None:
        following = MARK.search(text, start)
        place = text.find(body, start, following.start() if following else len(text))
        fault = "the tool call has no name and JSON object behind its mark."
        return fault, max(place, start)
    value, end, fault = decode(text, match.end())
    if fault and text.startswith(close, match.end()):
        value, end, fault = {}, match.end(), ""
    if fault:
        return fault, match.end()
    for mark in ("```", close):
        tail = skip_space(text, end)
        end = tail + len(mark) if text.startswith(mark, tail) else end
    return to_calls({"name": match["name"], "arguments": value}), end


def _json(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads JSON objects or lists of them, and the closing mark if there is one."""
    inner = skip_space(text, start)
    if not text.startswith(("{", "["), inner):
        return [] if text.startswith("<", inner) else _JSON_FORM, start
    values, end = _values(text, inner)
    if not values:
        return decode(text, inner)[2] or to_calls(values), inner + 1
    reading = to_calls(values, with_ids=close == "")
    if text.startswith(("{", "[{"), end) and not isinstance(reading, str):
        return [*reading, ToolCallError(message=decode(text, end)[2])], end + 1
    return reading, end + len(close) if text.startswith(close, end) else end


def read_bare(
    text: str, schemas: Schemas, limit: int
) -> tuple[list[ToolCall | ToolCallError], int]:
    """Returns the calls that a text without a mark ends with, and where they begin.

    Only what names tools is meant so; without tools, JSON has to be the whole text and have
    `parameters`.

    Args:
        text: The text.
        schemas: The tools.
        limit: Where the calls begin at the latest; 0 if nothing may precede them.
    """
    body = without_end(text, ENDS).rstrip()
    place = body.rfind(f"{_PARALLEL}{{") if body.endswith("})") else -1
    if place >= 0:
        body = body[:place].removesuffix("functions.") + body[place + len(_PARALLEL) : -1]
    calls, start = _read_json(body, schemas, limit)
    if calls or not any(f"{name}(" in body or f"<{name}" in body for name in schemas):
        return calls, start
    read: Any = load_function("gspo_env.tool_names:read_named", "reader")
    named_calls: tuple[list[ToolCall | ToolCallError], int] = read(body, schemas, limit)
    return named_calls


def bare_beside(
    calls: Sequence[ToolCall | ToolCallError], texts: Iterable[str], schemas: Schemas
) -> list[ToolCallError]:
    """Returns an error for each call without a mark in the texts beside calls with one.

    One that is also among these, by which a model announces it, is none.
    """
    bare = chain(*(read_bare(text, schemas, len(text))[0] for text in texts))
    marked = [(call.name, call.arguments) for call in calls if isinstance(call, ToolCall)]
    return [
        ToolCallError(
            message=f"the call of {call.name[:64]!r} needs the mark that the others have."
        )
        for call in bare
        if isinstance(call, ToolCall) and (call.name, call.arguments) not in marked
    ]


def _read_json(
    body: str, schemas: Schemas, limit: int
) -> tuple[list[ToolCall | ToolCallError], int]:
    """Returns calls in JSON, in a list in Python or of ReAct; see `read_bare`."""
    fenced: list[ToolCall | ToolCallError] = []
    for _ in range(_MOST_BLOCKS if schemas else 0):
        block = _last_block(body)
        if block is None or block[0] > limit:
            break
        calls, _ = _read_json(without_end(block[1], ENDS).rstrip(), schemas, 0)
        if not calls:
            break
        fenced = [*calls, *fenced]
        body = body[: block[0]].rstrip()
    if fenced:
        return fenced, len(body)
    body = _CLOSING.sub("", body)
    if schemas and (react := _react(_OBSERVED.split(body, 1)[0], schemas, limit)):
        return react
    match = _BARE.search(body, 0, limit) if schemas and limit else None
    start = match.end() if match else skip_space(body, 0)
    if limit and not body.startswith(("{", "["), start):
        named = (m for m in _BROKEN.finditer(body) if m[m.lastindex or 0] in schemas)
        start = next((m.start() for m in named), start)
        whole = _read_json(body[start:], schemas, 0) if 0 < start < limit else ([], 0)
        is_whole = all(isinstance(call, ToolCall) for call in whole[0])
        is_cut = any(body.count(o, start) > body.count(c, start) for o, c in ("{}", "()", "[]"))
        return (whole[0], start) if is_whole or is_cut else ([], 0)
    if not body.startswith(("{", "["), start):
        return [], 0
    values, end = _values(body, start)
    if not values and schemas:
        python = python_calls(body[start:])
        if any(call.name in schemas for call in python):
            return list(python), start
        cut = _BROKEN.match(body, start)
        if cut is None or cut[cut.lastindex or 0] not in schemas:
            return [], start
        if cut[2] and python_calls(body[start : body.rfind("]") + 1]):
            return [], start  # an example with text behind it
        fault = _PYTHON_FORM if cut[2] else decode(body, start)[2]
        return [ToolCallError(message=fault)], start
    names_tool = [_is_bare_call(value, schemas) for value in values]
    are_calls = any(names_tool) or (schemas and _WRAPPED.match(body, start))
    results = [to_call(value) for value in values]
    is_call = [n or isinstance(c, ToolCall) for n, c in zip(names_tool, results, strict=True)]
    on_lines = "\n" in body[len(body[:end].rstrip()) : end] and not body[:start].strip()
    if schemas and end < len(body) <= limit and on_lines and all(names_tool):
        return [ToolCallError(message="the tool call has text behind it.")], start
    if end < len(body) or not are_calls or not all(is_call if schemas else names_tool):
        return [], 0
    return [c if isinstance(c, ToolCall) else ToolCallError(message=c) for c in results], start


def _react(
    text: str, schemas: Schemas, limit: int
) -> tuple[list[ToolCall | ToolCallError], int] | None:
    """Returns the calls of ReAct in a text and where they begin, if there are any."""
    headers = [
        header
        for header in islice(_REACT.finditer(text, 0, limit), _MOST_BLOCKS)
        if header[1] in schemas or ("\n" in header[0] and text.startswith("{", header.end()))
    ]
    ends = [header.start() for header in headers[1:]]
    calls: list[ToolCall | ToolCallError] = []
    for header, stop in zip(headers, [*ends, len(text)], strict=False):
        value, end, fault = decode(text, header.end())
        if not fault and text[end:stop].strip("` \n"):
            fault = "the tool call has text behind its Action Input."
        reading = fault or to_call({"name": header[1], "arguments": value})
        calls.append(ToolCallError(message=reading) if isinstance(reading, str) else reading)
    return (calls, headers[0].start()) if headers else None


def _last_block(text: str) -> tuple[int, str] | None:
    """Returns where a block of code or a pair of tags that ends a text begins, and its content."""
    if fence := _FENCE.search(text):
        return fence.start(), text[fence.end() : -3]
    tag = _LAST_TAG.search(text, max(len(text) - _LONGEST_TAG, 0))
    start = text.rfind(f"<{tag[1]}>") if tag else -1
    return (start, text[start + len(tag[1]) + 2 : tag.start()]) if tag and start >= 0 else None


def _is_bare_call(value: Any, schemas: Schemas) -> bool:
    if not isinstance(value, dict):
        return False
    if not schemas:
        return {"name", "parameters"} <= value.keys() and isinstance(to_call(value), ToolCall)
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    names = [inner.get(key) for key in ("name", "tool", "function", "action")]
    return len(value) > 1 and any(isinstance(name, str) and name in schemas for name in names)


def _values(text: str, start: int) -> tuple[list[Any], int]:
    """Reads JSON objects, or lists of them, that `;`, `,` or white space divides."""
    position = skip_space(text, start)
    values: list[Any] = []
    while text.startswith(("{", "["), position):
        value, end, fault = decode(text, position)
        if fault:
            break
        if isinstance(value, dict) and value.keys() - _OF_MESSAGES in _WRAPPERS:
            (value,) = (value[key] for key in value.keys() - _OF_MESSAGES)
        values += map(_renamed, value if isinstance(value, list) else [value])
        position = skip_space(text, end)
        divided = text.startswith((";", ","), position)
        position = skip_space(text, position + 1) if divided else position
    return values, position


def _renamed(value: Any) -> Any:
    """Returns a call of Command, or of OpenAI's wrapper, with the keys that others have."""
    if not isinstance(value, dict) or not {"tool_name", "recipient_name"} & value.keys():
        return value
    if isinstance(name := value.get("recipient_name"), str):
        value = {**value, "recipient_name": name.removeprefix("functions.")}
    keys = {"tool_name": "name", "recipient_name": "name", "tool_call_id": "id"}
    return {key if keys.get(key) in value else keys.get(key, key): v for key, v in value.items()}


def _mistral(text: str, start: int, schemas: Schemas) -> Reading:
    position = skip_space(text, start)
    if text.startswith("[", position):
        return _json("", text, start, schemas)
    return _newer_mistral(text, position)


def _apertus(text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `[{NAME: {...}}, ...]` and `<|tools_suffix|>`."""
    values, end, fault = decode(text, skip_space(text, start))
    if fault:
        return fault, start + 1 if text[start : start + 1] == "[" else start
    end = skip_space(text, end)
    end += len(_END_OF_APERTUS) if text.startswith(_END_OF_APERTUS, end) else 0
    if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
        return "the tool calls must be a list of JSON objects {NAME: {KEY: VALUE}}.", end
    calls = [{"name": name, "arguments": v} for each in values for name, v in each.items()]
    return to_calls(calls), end


def _newer_mistral(text: str, start: int) -> Reading:
    """Reads `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`, and those that follow it."""
    following = text.find(_MISTRAL, start)
    mark = text.find(_ARGUMENTS, start, following if following >= 0 else len(text))
    if mark < 0:
        named = _NAMED.match(text, start)
        end = named.end() if named else start
        return f"the tool call has neither a JSON list nor {_ARGUMENTS}.", end
    name, _, call_id = text[start:mark].partition(_CALL_ID)
    value, end, fault = decode(text, skip_space(text, mark + len(_ARGUMENTS)))
    call = {"name": name.strip(), "arguments": value, "id": call_id.strip()}
    reading = fault or to_calls(call, with_ids=True)
    if isinstance(reading, str):
        return reading, mark
    calls: list[ToolCall | ToolCallError] = [*reading]
    while header := _MORE.match(text, end):
        value, after, fault = decode(text, header.end())
        call = {"name": header["name"], "arguments": value, "id": header["id"] or ""}
        reading = fault or to_calls(call, with_ids=True)
        if isinstance(reading, str):
            return [*calls, ToolCallError(message=reading)], end
        calls += reading
        end = after
    return calls, end


_FUNCTIONS = _Tags(
    "<parameter=",
    "</parameter>",
    "</function>",
    "<function=NAME> with <parameter=KEY>VALUE</parameter>",
)
_KIMI_3 = _Tags(
    '<|open|>argument key="',
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
    '<|open|>call tool="NAME"<|sep|> with <|open|>argument key="KEY"<|sep|>VALUE'
    "<|close|>argument<|sep|>",
    end="<|sep|>",
)
_INVOKE = _Tags(
    "<parameter name=",
    "</parameter>",
    "</invoke>",
    '<invoke name="NAME"> with <parameter name="KEY">VALUE</parameter>',
)
_MINICPM = _Tags(
    "<param name=",
    "</param>",
    "</function>",
    '<function name="NAME"> with <param name="KEY">VALUE</param>',
)
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK = re.compile(
    r"(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<name>[\w./-]+)"
    r"(?:<\uff5ctool\u2581sep\uff5c>|\s*```json)\s*"
)
_HARMONY = re.compile(
    r"(?:functions\.)?(?P<name>[\w./-]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:\w+)?<\|message\|>\s*"
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
_harmony = partial(_headed, _HARMONY, "<|message|>", "<|call|>")
READERS: Mapping[str, Callable[[str, int, Schemas], Reading]] = {
    HERMES: _tagged_hermes,
    XML: partial(_tagged, _FUNCTIONS),
    "<|python_tag|>": partial(_json, ""),
    _MISTRAL: _mistral,
    "<|tool_call|>": _mistral,
    "<|tool_call_start|>": partial(_python, "<|tool_call_end|>"),
    "<|python_start|>": partial(_python, "<|python_end|>"),
    "<|tool_call>call:": partial(_gemma, '<|"|>', "<tool_call|>"),
    "<start_function_call>call:": partial(_gemma, "<escape>", "<end_function_call>"),
    "<function_calls>": partial(_python_lines, "</function_calls>"),
    "```tool_code": partial(_python_lines, "```"),
    "<tool_calls>": partial(_json, "</tool_calls>"),
    "<TOOLCALL>": partial(_json, "</TOOLCALL>"),
    "[TOOL_REQUEST]": partial(_json, "[END_TOOL_REQUEST]"),
    "[TOOL_CALL]": partial(_json, "[/TOOL_CALL]"),
    "<|START_ACTION|>": partial(_json, "<|END_ACTION|>"),
    "<longcat_tool_call>": partial(_json, "</longcat_tool_call>"),
    "<|action_start|><|plugin|>": partial(_json, "<|action_end|>"),
    "<|function_call|>": partial(_json, ""),
    "<function_call>": partial(_json, "</function_call>"),
    "functools[": partial(_json, "]"),
    '<|open|>call tool="': partial(_tagged, _KIMI_3),
    f"{_NAMESPACE}<tool_call>": _minimax,
    "<ifm|tool_call>": _ifm,
    "<|plamo:begin_tool_name:plamo|>": partial(
        _headed,
        _PLAMO,
        "<|plamo:begin_tool_arguments:plamo|>",
        "<|plamo:end_tool_arguments:plamo|>",
    ),
    "<|tool_call:begin|>": partial(_headed, _SOLAR, "<|tool_call:args|>", "<|tool_call:end|>"),
    "<invoke name=": partial(_tagged_tool, _INVOKE),
    "<function name=": partial(_tagged_tool, _MINICPM),
    "<tool_use>": partial(_described, "</tool_use>"),
    "<use_mcp_tool>": partial(_described, "</use_mcp_tool>"),
    "<invoke>": partial(_described, "</invoke>"),
    "<|tools_prefix|>": _apertus,
    "<\uff5ctool\u2581call\u2581begin\uff5c>": partial(
        _headed, _DEEPSEEK, _SEPARATOR, "<\uff5ctool\u2581call\u2581end\uff5c>"
    ),
    "to=functions.": _harmony,
    "<|channel|>commentary to=": _harmony,
    "<|tool_call_begin|>": partial(
        _headed, _KIMI, "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ),
}
"""The reader of what follows each mark but `<... invoke name="`."""


def reader_of(mark: str) -> Callable[[str, int, Schemas], Reading]:
    """Returns the reader of what follows a mark."""
    if mark in READERS:
        return READERS[mark]
    name = mark.removeprefix("<").removesuffix('invoke name="')
    opening, close = f'<{name}parameter name="', f"</{name}parameter>"
    form = f'{mark}NAME"> with {opening}KEY">VALUE{close}'
    return partial(_tagged, _Tags(opening, close, f"</{name}invoke>", form))
