"""The formats of tool calls other than the JSON of Hermes and Qwen; loaded when a text has one."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from gspo_env.tool_calls import (
    DECODER,
    END_OF_HERMES,
    HERMES,
    MARK,
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

_BEFORE = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_section_begin|>",
    "<atem:function_calls>",
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<function_calls>",
    "<|channel|>commentary",
    "<|channel|>analysis",
    "<|start|>assistant",
)
"""Marks before the first call that belong to none."""
_ENDS = (
    "</tool_call>",
    "<|/tool_call|>",
    "</atem:function_calls>",
    "</minimax:tool_call>",
    "</seed:tool_call>",
    "</function_calls>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_end|>",
    "<|tool_response>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|eom|>",
)
"""Marks behind a call that belong to none."""
_AFTER = re.compile(rf"(?:\s*(?:{'|'.join(map(re.escape, _ENDS))}))*")
_ARGUMENTS, _CALL_ID, _MISTRAL = "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]"
_CDATA = "<![CDATA["
_LONGEST_LITERAL = 1 << 16
"""Characters of a call that is written in Python."""
_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_BARE = re.compile(r"^[ \t]*(?=[{\[])", re.MULTILINE)
_FENCE = re.compile(r"```\w*[ \t]*\n(?=\s*[{\[][^`]*```\Z)")
"""The start of a block of code with JSON or Python that ends a text."""
_BROKEN = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)"|\[\s*([\w.]+)\('
)
"""The start of a call in JSON or Python, with its name."""
_GLM_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_AFTER_GLM_VALUE = ("<arg_key>", END_OF_HERMES)
_END_OF_APERTUS = "<|tools_suffix|>"
_END_OF_GEMMA = "<tool_call|>"
_NAMED = re.compile(r"\s*[\w.-]+\s*\{")
_MORE = re.compile(r"\s*(?P<name>[\w.-]{1,200})(?:\[CALL_ID\](?P<id>\w{1,200}))?\[ARGS\]\s*")
_GEMMA_MARK = re.compile(r'<\|"\|>|<tool_call\|>')
_KEYWORD = "_keyword_"
_TEXT = r""""(?:[^"\\]|\\.?)*(?:"|\Z)|'(?:[^'\\]|\\.?)*(?:'|\Z)"""
_PYTHON_TOKEN = re.compile(rf"{_TEXT}|\b({'|'.join(keyword.kwlist)})(?=\s*=[^=])", re.DOTALL)
_GEMMA_TEXT = re.compile(_TEXT, re.DOTALL)
_GEMMA_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')
_GEMMA_WORD = re.compile(r'\b(?:None|True|False)\b(?!")')
_WORDS = {"None": "null", "True": "true", "False": "false"}
_LLAMA_FORM = 'the tool call must be a JSON object of "name" and "parameters".'
_PYTHON_FORM = "the tool call must be [NAME(KEY=VALUE, ...)] with literal values."


class _Tags(NamedTuple):
    """The tags of a family whose calls are XML."""

    parameter: str
    close_parameter: str
    close: str
    form: str


def _without_end(text: str, marks: Sequence[str]) -> str:
    """Returns a text without marks at its end, each removed once."""
    for mark in marks:
        trimmed = text.rstrip()
        text = trimmed.removesuffix(mark) if trimmed.endswith(mark) else text
    return text


def without_start_marks(text: str) -> str:
    """Returns the text before a call without the marks at its end that open a list of calls."""
    return _without_end(text, _BEFORE)


def skip_end_marks(text: str, start: int) -> int:
    """Returns the position behind the marks that follow a call and belong to none."""
    return _AFTER.match(text, start).end()  # type: ignore[union-attr]  # it may be empty


def _tagged_hermes(text: str, start: int, schemas: Schemas) -> Reading:
    """Reads XML or pairs between the tags of Hermes."""
    inner = skip_space(text, start)
    if not text.startswith(XML, inner):
        return _glm(text, inner, start, schemas)
    calls, end = _xml(text, inner + len(XML), schemas)
    tag = skip_space(text, end)
    return calls, tag + len(END_OF_HERMES) if text.startswith(END_OF_HERMES, tag) else end


def _glm(text: str, inner: int, start: int, schemas: Schemas) -> Reading:
    """Reads `NAME`, pairs of `<arg_key>` and `<arg_value>`, and `</tool_call>`."""
    first = text.find("<arg_key>", inner)
    name = text[inner : max(first, inner)].strip()
    if name and "<" not in name:
        pairs, position = [], first
        while key := _GLM_KEY.match(text, position):
            end = _value_end(text, key.end(), "<arg_value>", "</arg_value>", _AFTER_GLM_VALUE)
            if end < 0:
                break
            pairs.append((key[1], text[key.end() : end]))
            position = skip_space(text, end + len("</arg_value>"))
        if text.startswith(END_OF_HERMES, position):
            return _typed_call(name, pairs, schemas), position + len(END_OF_HERMES)
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
        return f"the tool call has no {what}.", close if is_call else start
    return to_calls({"name": name.strip()}), close + len(END_OF_HERMES)


def _tagged(tags: _Tags, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads the rest of the opening tag, parameters in tags, and the closing tag."""
    close = text.find(tags.close, start)
    if close < 0:
        return f"the tool call has no closing {tags.close}.", start
    fault = f"the tool call must be {tags.form} in it.", close + len(tags.close)
    name, begin = _attribute(text, start)
    pairs, position = [], skip_space(text, begin)
    if name and text.startswith("{", position):
        value, end, problem = decode(text, position)
        end = skip_space(text, max(end, 0))
        if problem or not text.startswith(tags.close, end):
            return problem or fault[0], fault[1]
        return to_calls({"name": name, "arguments": value}), end + len(tags.close)
    while name and text.startswith(tags.parameter, position):
        key, begin = _attribute(text, position + len(tags.parameter))
        following = (tags.parameter, tags.close)
        end = _value_end(text, begin, tags.parameter, tags.close_parameter, following)
        if not key or end < 0:
            return fault
        line = "\r\n" if text.startswith("\r\n", begin) else "\n"
        value = text[begin:end].removeprefix(line).removesuffix(line)
        if value.startswith(_CDATA) and value.endswith("]]>"):
            value = value.removeprefix(_CDATA).removesuffix("]]>")
        pairs.append((key, value))
        position = skip_space(text, end + len(tags.close_parameter))
    if not name or not text.startswith(tags.close, position):
        return fault
    return _typed_call(name, pairs, schemas), position + len(tags.close)


def _attribute(text: str, start: int) -> tuple[str, int]:
    """Returns the rest of an opening tag, empty if it is none, and where its content begins."""
    quote = next((q for q in text[max(start - 1, 0) : start + 1][::-1] if q in "\"'"), "")
    bracket = text.find(f"{quote}>", start) + len(quote)
    name = text[start : max(bracket, start)].strip(" \"'")
    return ("" if "<" in name else name), bracket + 1


def _value_end(
    text: str, start: int, opening: str, closing: str, following: tuple[str, ...]
) -> int:
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
        kinds, values = _kinds(part, schema)
        value = _typed(text, kinds, values)
        kind = _KINDS[type(value)]
        if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
            expected = " or ".join(sorted(kinds))
            return f"the argument {key[:40]!r} is {text[:40]!r}; expected {expected}."
        arguments[key] = value
    return to_calls({"name": name, "arguments": arguments})


def _typed(text: str, kinds: set[str], values: Sequence[Any]) -> Any:
    """Returns the value that a text means.

    Args:
        text: The text.
        kinds: The types that are allowed; all if there are none.
        values: The values that an enumeration allows.
    """
    word = text.strip()
    for value in values:
        if text not in values and word in (json.dumps(value), str(value)):
            return value
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
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return value if "number" in kinds else int(value)  # 2.0 is an integer in JSON schema
    return text if isinstance(value, str) else value


def _kinds(schema: Any, root: Mapping[str, Any]) -> tuple[set[str], list[Any]]:
    """Returns the JSON types that a schema allows, none if it does not say, and its constants."""
    kinds: set[str] = set()
    constants: list[Any] = []
    parts, seen = [schema], set[int]()
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, Mapping):
            return set(), []
        kind, values = part.get("type"), part.get("enum", [part["const"]] if "const" in part else 0)
        options = [part.get(key) for key in ("anyOf", "oneOf", "allOf")]
        constants += values if isinstance(values, list) else []
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
            return set(), []
    return kinds, constants


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


def _to_python(token: re.Match[str]) -> str:
    """Escapes line breaks in a text, and lets a keyword name an argument."""
    if token[1]:
        return f"{_KEYWORD}{token[1]}"
    return token[0].replace("\r", "\\r").replace("\n", "\\n")


class _JSONWords(ast.NodeTransformer):
    """Turns the words of JSON into constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Returns the constant that a name means, or the name."""
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _python(close: str, text: str, start: int, schemas: Schemas) -> Reading:
    """Reads `[NAME(KEY=VALUE, ...), ...]`, or JSON in its place."""
    end = text.find(close, start)
    body = text[start : end if end >= 0 else len(text)]
    end = end + len(close) if end >= 0 else len(text)
    if not body.strip().startswith(("[", "{")):
        return _PYTHON_FORM, start
    value, stop, fault = decode(body, skip_space(body, 0))
    if not fault and value and not body[stop:].strip():
        return to_calls(value), end
    calls = _python_calls(body)
    return calls or _PYTHON_FORM, end


def _python_calls(text: str) -> list[ToolCall]:
    """Returns the calls of a list in Python; none if it is anything else."""
    if len(text) > _LONGEST_LITERAL:
        return []
    try:
        tree = ast.parse(_PYTHON_TOKEN.sub(_to_python, text.strip()), mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    calls = []
    for item in tree.elts if isinstance(tree, ast.List) else []:
        if not isinstance(item, ast.Call) or not isinstance(item.func, (ast.Name, ast.Attribute)):
            return []
        arguments = {
            word.arg and word.arg.removeprefix(_KEYWORD): _literal(_JSONWords().visit(word.value))
            for word in item.keywords
        }
        if item.args or None in arguments or len(arguments) < len(item.keywords):
            return []
        if any(isinstance(value, ast.expr) for value in arguments.values()):
            return []
        call = to_call({"name": ast.unparse(item.func), "arguments": arguments})
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
        pieces.append(json.dumps(piece) if is_text else _gemma_to_json(piece))
        is_text, position = not is_text, mark.end()
        if is_end:
            name, brace, body = "".join(pieces).partition("{")
            value, end, fault = decode(brace + body, 0)
            if not fault and (brace + body)[end:].strip():
                fault = "the tool call has text behind its arguments."
            return fault or to_calls({"name": name.strip(), "arguments": value}), position
    return f"the tool call has no closing {_END_OF_GEMMA}.", start


def _gemma_to_json(piece: str) -> str:
    """Returns what is not between `<|"|>` as JSON; texts may be in the quotes of JSON or Python."""
    parts, position = [], 0
    for quoted in [*_GEMMA_TEXT.finditer(piece), None]:
        plain = _GEMMA_KEY.sub(r'\1"\2":', piece[position : quoted.start() if quoted else None])
        parts.append(_GEMMA_WORD.sub(lambda word: _WORDS[word[0]], plain))
        if quoted:
            value = quoted[0] if quoted[0][0] == '"' else json.dumps(_literal(quoted[0]))
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


def _llama(text: str, start: int, schemas: Schemas) -> Reading:
    values, end = _values(text, start)
    if values:
        return to_calls(values), end
    inner = skip_space(text, start)
    return _LLAMA_FORM, inner + 1 if text.startswith("{", inner) else start


def read_bare(
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
    if schemas and (fence := _FENCE.search(body)):
        fenced, _ = read_bare(body[fence.end() : -3], schemas, anywhere=False)
        return fenced, fence.start()
    match = _BARE.search(body) if schemas and anywhere else None
    start = match.end() if match else skip_space(body, 0)
    if anywhere and not body.startswith(("{", "["), start):
        named = (m for m in _BROKEN.finditer(body) if m[m.lastindex or 0] in schemas)
        start = next((m.start() for m in named), start)
        whole = read_bare(body[start:], schemas, anywhere=False) if start else ([], 0)
        is_whole = all(isinstance(call, ToolCall) for call in whole[0])
        return (whole[0], start) if is_whole else ([], 0)
    if not body.startswith(("{", "["), start):
        return [], 0
    values, end = _values(body, start)
    if not values and schemas:
        python = _python_calls(body[start:])
        if any(call.name in schemas for call in python):
            return list(python), start
        cut = _BROKEN.match(body, start)
        if cut is None or cut[cut.lastindex or 0] not in schemas:
            return [], start
        fault = _PYTHON_FORM if cut[2] else decode(body, start)[2]
        return [ToolCallError(message=fault)], start
    if end < len(body) or not all(_is_bare_call(value, schemas) for value in values):
        return [], 0
    calls = map(to_call, values)
    return [c if isinstance(c, ToolCall) else ToolCallError(message=c) for c in calls], start


def _is_bare_call(value: Any, schemas: Schemas) -> bool:
    if not isinstance(value, dict):
        return False
    if not schemas:
        return {"name", "parameters"} <= value.keys() and isinstance(to_call(value), ToolCall)
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    return len(value) > 1 and str(inner.get("name")) in schemas


def _values(text: str, start: int) -> tuple[list[Any], int]:
    """Reads JSON objects that `;` or white space divides, or a list of them, up to a fault."""
    position = skip_space(text, start)
    if text.startswith("[", position):
        value, end, fault = decode(text, position)
        return ([], start) if fault else (value, skip_space(text, end))
    values: list[Any] = []
    while text.startswith("{", position):
        value, end, fault = decode(text, position)
        if fault:
            break
        values.append(value)
        position = skip_space(text, end)
        position = skip_space(text, position + 1) if text.startswith(";", position) else position
    return values, position


def _mistral(text: str, start: int, schemas: Schemas) -> Reading:
    position = skip_space(text, start)
    if not text.startswith("[", position):
        return _newer_mistral(text, position)
    values, end, fault = decode(text, position)
    if fault:
        return fault, position + 1
    return to_calls(values, with_ids=True), end


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
_ATEM = _Tags(
    '<atem:parameter name="',
    "</atem:parameter>",
    "</atem:invoke>",
    '<atem:invoke name="NAME"> with <atem:parameter name="KEY">VALUE</atem:parameter>',
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
    r"(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<name>[\w.-]+)"
    r"(?:<\uff5ctool\u2581sep\uff5c>|\s*```json)\s*"
)
_HARMONY = re.compile(
    r"(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:\w+)?<\|message\|>\s*"
)
_KIMI = re.compile(
    r"(?P<prefix>functions[._]?)?(?P<name>[\w.-]{1,200}?)(?(prefix)[:_]?|:)\d{1,9}\s*"
    r"<\|tool_call_argument_begin\|>\s*"
)
_xml = partial(_tagged, _FUNCTIONS)
READERS: Mapping[str, Callable[[str, int, Schemas], Reading]] = {
    HERMES: _tagged_hermes,
    XML: _xml,
    "<|python_tag|>": _llama,
    _MISTRAL: _mistral,
    "<|tool_call|>": _mistral,
    "<|tool_call_start|>": partial(_python, "<|tool_call_end|>"),
    "<|python_start|>": partial(_python, "<|python_end|>"),
    "<|tool_call>call:": _gemma,
    '<atem:invoke name="': partial(_tagged, _ATEM),
    "<invoke name=": partial(_tagged_tool, _INVOKE),
    "<function name=": partial(_tagged_tool, _MINICPM),
    "<|tools_prefix|>": _apertus,
    "<\uff5ctool\u2581call\u2581begin\uff5c>": partial(
        _headed, _DEEPSEEK, _SEPARATOR, "<\uff5ctool\u2581call\u2581end\uff5c>"
    ),
    "to=functions.": partial(_headed, _HARMONY, "<|message|>", "<|call|>"),
    "<|tool_call_begin|>": partial(
        _headed, _KIMI, "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ),
}
"""The reader of what follows each mark."""
