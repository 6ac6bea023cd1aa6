"""Reads calls that no mark begins: JSON, ReAct, Python and elements that name a tool.

Only what ends a text is a call; sentences, code and HTML that mention a tool stay text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from gspo_env.tools.arguments import properties_of, typed_call
from gspo_env.tools.formats import (
    ON_LINES,
    PYTHON_FORM,
    PYTHON_LINES,
    calls_of,
    python_calls,
    read_pairs,
    read_values,
)
from gspo_env.tools.json_calls import (
    Schemas,
    ToolCallError,
    decode,
    most_failures,
    skip_space,
    to_call,
    warn_of_unread,
)
from gspo_env.tools.marks import names_tool, without_closings
from gspo_env.tools.python import QUOTED, statements
from gspo_env.types import ToolCall

Calls = list[ToolCall | ToolCallError]

_MOST = 32
"""Blocks at the end, and lines at each end, that are tried, so that the time is linear."""
_PARALLEL = "multi_tool_use.parallel("
_JSON_LINE = re.compile(r"^[ \t]*(?=[{\[])", re.MULTILINE)
_OPENING, _CLOSING = (
    re.compile(r"<[\w:-]{1,64}>\s*\Z"),
    re.compile(r"(?<=[}\]])(?:\s{0,9}(?:</[\w:-]{1,64}>|<<<\w{1,64}>>>)){1,4}\Z"),
)
"""Tags around a call in JSON, whatever they are called."""
_WRAPPED = re.compile(r'\{[^{}\[\]]{0,999}"(?:tool_calls|tool_uses|function_call)"\s*:')
_BROKEN = re.compile(
    r'(?:\{\s*"tool_(?:call|use)s"\s*:\s*)?(?:\[\s*|(?<!\s)\s++)?\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"\w*"\s*,\s*)?'
    r"""["']?(?:tool_|recipient_)?name["']?\s*:\s*["'](?:functions\.)?([^"']*)["']"""
    r"|\[\s*([\w.-]+)\("
)
"""The start of a call in JSON or Python, with its name."""
_REACT = re.compile(
    r"(?:\bAction|\u273fFUNCTION\u273f):[ \t]*([\w.-]{1,200})[ \t]*(?:"
    r"\n+(?:Action Input|\u273fARGS\u273f):\s*(?:```\w*\n)?|(?:\n[ActionIputn ]*)?\Z|(?=[(\[{]))"
)
"""The start of a call of ReAct, with its name."""
_OBSERVED = re.compile("\nObservation|\u273fRESULT\u273f")
_LANGUAGES = {"", "py", "python", "python3", "xml", "tool_code", "tool_call", "tool_calls"}
"""What the mark of a block may say if the block is a call in Python or an element."""
_BLOCK = re.compile(r"(?P<agent>\bCode:\s*)?```(?P<language>\w*)[ \t]*\n|(?P<tag><code>)")
_AFTER_BLOCK = re.compile(r"\s*+(?P<agent></?end_code>)?\s*+")
_SPACE_NAMES = r"(?:functions\.|default_api\.)?"
_HTML = frozenset(
    """a address article audio button canvas caption code data details dialog div footer form frame
    header img image input label link main map mark menu meta meter object option output p path
    picture progress section select slot source span style summary table template text time title
    track video""".split()  # noqa: SIM905  # a list would be as long as the rest of this file
)
"""Tools with the names of HTML's elements; a tag is a call of one only if it has an argument."""
_PLAIN_ELEMENT = re.compile(r"[^<]*|\s*(?:<([\w.-]+)>[^<]*</\1>\s*)+")
_WRAPPER = r"(?:tool_?calls?|tool_?uses?|function_?calls?|tools?)"
"""Tags that models write around elements."""
_WRAPPER_ENDS = re.compile(rf"(?<!\s)(?:\s*+</{_WRAPPER}>)++")  # read once, wherever it ends
_DECORATION = re.compile(
    r"\A(?:[-*+]\s+|\d+[.)]\s+|>>>\s*|\*\*`?|(?:tool |function )?call:?\s+|(?:await|return)\s+)",
    re.IGNORECASE,
)
"""What models write before a line that is a call."""
_ONE_CALL = re.compile(
    r"(?=\s*+(?:\w*+\s*+(?:[=:]|\Z)|[\"'\[{]|-?\d))(?:[^()]|\([^()]*+\))*+"
    r"(?:\(?[^()]*+|\)[; \n`]*+)"
)
"""The arguments of a call up to its end, or that of the text."""
_BEHIND = "the tool calls must be the last lines, as NAME(KEY=VALUE, ...) and nothing else."


def read_bare(text: str, schemas: Schemas, limit: int) -> tuple[Calls, int]:
    """Returns the calls that a text without a mark ends with, and where they begin.

    Only what names tools is meant so; without tools, JSON has to be the whole text and have
    `parameters`.

    Args:
        text: The text.
        schemas: The tools.
        limit: Where the calls begin at the latest.
    """
    body = without_closings(text)
    place = body.rfind(f"{_PARALLEL}{{") if body.endswith("})") else -1
    if place >= 0:
        body = body[:place].removesuffix("functions.") + body[place + len(_PARALLEL) : -1]
    if not schemas:
        return _json_at(body, skip_space(body, 0), schemas, 0)
    named = (_elements, _lines) if names_tool(body, schemas) else ()
    for read in (_blocks, _react, _json, *named):
        calls, start = read(body, schemas, limit)
        if calls and start <= limit:
            return calls, start
    is_fault = bool(named) and limit >= len(body) and _is_spoiled_call(body, schemas)
    return [ToolCallError(message=_BEHIND)] if is_fault else [], 0


def _json(body: str, schemas: Schemas, limit: int) -> tuple[Calls, int]:
    """Returns calls in JSON or a list in Python, behind text or not."""
    bare = _CLOSING.sub("", body)
    lines = [line.end() for line in islice(_JSON_LINE.finditer(bare, 0, limit), _MOST)]
    lines = [line for line in lines if not _is_sentence(bare, line, schemas)]
    start = lines[0] if lines else skip_space(bare, 0)
    if bare.startswith(("{", "["), start):
        calls, start = _json_at(bare, start, schemas, limit)
    else:
        named = (m.start() for m in _BROKEN.finditer(bare) if (m[1] or m[2]) in schemas)
        start = next(named, limit)
        calls, start = (
            _json_at(bare, skip_space(bare, start), schemas, 0) if start < limit else ([], 0)
        )
        is_cut = any(bare.count(o, start) > bare.count(c, start) for o, c in ("{}", "()", "[]"))
        calls = calls if is_cut or all(isinstance(call, ToolCall) for call in calls) else []
    opening = _OPENING.search(bare, max(start - 99, 0), start) if len(bare) < len(body) else None
    return calls, opening.start() if opening else start


def _is_sentence(text: str, start: int, schemas: Schemas) -> bool:
    """Returns whether a line that begins with JSON goes on in words, and is not a call itself."""
    values, end = read_values(text, start)
    words = text[end:].partition("\n")[0].strip()
    return bool(values and words) and not any(_is_bare_call(value, schemas) for value in values)


def _json_at(body: str, start: int, schemas: Schemas, limit: int) -> tuple[Calls, int]:
    """Returns the calls in JSON or a list in Python between a position and the end of a text."""
    values, end = read_values(body, start)
    if not values:
        python = python_calls(body[start:]) if schemas else []
        if any(call.name in schemas for call in python):
            return [*python], start
        cut = _BROKEN.match(body, start)
        if cut is None or (cut[1] or cut[2]) not in schemas:
            return [], start
        if cut[2] and python_calls(body[start : body.rfind("]") + 1]):
            return [], start  # an example with text behind it
        return [ToolCallError(message=PYTHON_FORM if cut[2] else decode(body, start)[2])], start
    names_tool = [_is_bare_call(value, schemas) for value in values]
    results = [to_call(value) for value in values]
    is_call = [n or isinstance(c, ToolCall) for n, c in zip(names_tool, results, strict=True)]
    on_lines = "\n" in body[len(body[:end].rstrip()) : end] and not body[:start].strip()
    if end < len(body) <= limit and on_lines and all(names_tool):
        return [ToolCallError(message="the tool call has text behind it.")], start
    are_calls = any(names_tool) or (schemas and _WRAPPED.match(body, start))
    if end < len(body) or not are_calls or not all(is_call if schemas else names_tool):
        return [], 0
    return [c if isinstance(c, ToolCall) else ToolCallError(message=c) for c in results], start


def _is_bare_call(value: Any, schemas: Schemas) -> bool:
    if not isinstance(value, dict):
        return False
    if not schemas:
        return {"name", "parameters"} <= value.keys() and isinstance(to_call(value), ToolCall)
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    names = [inner.get(key) for key in ("name", "tool", "function", "action")]
    return len(value) > 1 and any(isinstance(name, str) and name in schemas for name in names)


def _react(body: str, schemas: Schemas, limit: int) -> tuple[Calls, int]:
    """Returns the calls of ReAct in a text and where they begin."""
    text = _OBSERVED.split(body, maxsplit=1)[0]
    headers = [
        header
        for header in _REACT.finditer(text, 0, limit)
        if header[1] in schemas or ("\n" in header[0] and text.startswith("{", header.end()))
    ]
    ends = [*(header.start() for header in headers[1:]), len(text)]
    calls: Calls = []
    for header, stop in zip(headers, ends, strict=False):
        value, end, fault = decode(text, header.end())
        if not fault and text[end:stop].strip("` \n"):
            fault = "the tool call has text behind its Action Input."
        call = fault or to_call({"name": header[1], "arguments": value})
        calls.append(ToolCallError(message=call) if isinstance(call, str) else call)
    return calls, headers[0].start() if headers else 0


class _Block(NamedTuple):
    """A block of code."""

    start: int
    end: int
    code: str
    language: str
    is_agent: bool
    """Whether it is as agents that act in code write it."""


def _find_blocks(text: str) -> Iterator[_Block]:
    position, is_html = 0, False
    while opening := _BLOCK.search(text, position):
        mark = "</code>" if opening["tag"] else "```"
        end = text.find(mark, opening.end())
        code = text[opening.end() : end if end >= 0 else len(text)]
        code = code if end >= 0 else code.rstrip().removesuffix("</code>")
        after = _AFTER_BLOCK.match(text, end + len(mark)) if end >= 0 else None
        before = text[position : opening.start()].rstrip(" \t")
        is_html = is_html or "</" in before
        on_line = not before or before.endswith("\n") or code.lstrip(" \t\r").startswith("\n")
        is_agent = bool(opening["agent"] or (after and after["agent"]))
        is_agent = is_agent or (bool(opening["tag"]) and on_line and not is_html)
        position = after.end() if after else len(text)
        language = "html" if opening["tag"] else opening["language"]
        yield _Block(opening.start(), position, code, language, is_agent)


def _blocks(text: str, schemas: Schemas, limit: int) -> tuple[Calls, int]:
    """Returns the calls in the blocks of code that end a text."""
    calls: Calls = []
    start = len(text)
    for block in [*_find_blocks(text)][: -_MOST - 1 : -1]:
        follows = block.end == start
        reading = _block(block, schemas) if follows or (calls and block.is_agent) else []
        if follows and reading:
            calls, start = reading + calls, block.start
        elif reading:
            calls.insert(0, ToolCallError(message="a block of code before the last is not run."))
        elif follows:
            break
    return calls, start


def _block(block: _Block, schemas: Schemas) -> Calls:
    code = block.code.strip()
    calls = _json_at(code, 0, schemas, 0)[0] if code.startswith(("{", "[")) else []
    if calls or (block.language not in _LANGUAGES and not block.is_agent):
        return calls
    calls, start = _elements(code, schemas)
    return calls if calls and start == 0 else _statements(block.code, schemas, block.is_agent)


def _statements(code: str, schemas: Schemas, is_agent: bool = False) -> Calls:
    """Returns the calls that code consists of; an error if it calls tools in another way.

    Args:
        code: The code.
        schemas: The tools.
        is_agent: Whether all of it is meant to run: results may be assigned and printed.
    """
    call = rf"\b{_SPACE_NAMES}({'|'.join(map(re.escape, schemas))})\s*\("
    first = re.search(call, code)
    if first is None:
        return []
    lines = statements(code)
    values = [line.value if isinstance(line, ast.Expr) else line for line in lines or []]
    calls = calls_of(_without_prints(lines) if is_agent and lines else values)
    named = [replace(c, name=re.sub(f"^{_SPACE_NAMES}", "", c.name)) for c in calls]
    if any(each.name in schemas for each in (named if is_agent else named[:1])):
        return [n if n.name in schemas else c for n, c in zip(named, calls, strict=True)]
    starts = re.match(call, code.lstrip())
    if not is_agent and lines is not None:
        names = {ast.unparse(each) for v in values if isinstance(v, ast.Call) for each in v.args}
        is_call = starts and all(isinstance(value, ast.Call) for value in values)
        is_call = is_call and not names & set(properties_of(schemas[first[1]]))  # a signature
    else:
        is_call = is_agent or (starts and _is_one_call(code.strip(), starts.end()))
    return [ToolCallError(message=PYTHON_LINES)] if is_call else []


def _without_prints(lines: Sequence[ast.stmt]) -> list[ast.AST]:
    """Returns what lines of code compute, without assignments and prints of what is assigned."""
    values: list[ast.AST] = []
    for line in lines:
        assigned = isinstance(line, (ast.Expr, ast.Assign, ast.AnnAssign)) and line.value
        value = assigned or line
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "print":
            values += [a for a in value.args if any(isinstance(n, ast.Call) for n in ast.walk(a))]
        else:
            values.append(value)
    return values


def _is_one_call(code: str, start: int) -> bool:
    """Returns whether code that is not valid is one call, or the start of one.

    Args:
        code: The code.
        start: The position behind its first bracket.
    """
    return _ONE_CALL.fullmatch(QUOTED.sub("''", code[start:])) is not None


def _lines(text: str, schemas: Schemas, limit: int) -> tuple[Calls, int]:
    """Returns the calls in the lines of Python that end a text; those before must be prose."""
    names = "|".join(map(re.escape, schemas))
    begin = re.compile(rf"^`{{0,3}}(?={_SPACE_NAMES}(?:{names})\()", re.MULTILINE)
    lines = [*begin.finditer(text)]
    for line in lines[:_MOST] + lines[_MOST:][-_MOST:]:
        code = text[line.end() :].removesuffix(line[0])
        calls = [] if _is_code(text[: line.start()].rstrip()) else _statements(code, schemas)
        if calls:
            return calls, line.start()
    return [], 0


def _is_spoiled_call(text: str, schemas: Schemas) -> bool:
    """Returns whether a text is a call with decoration, or begins with a line that is a call."""
    first, _, rest = text.strip().partition("\n")
    first = first.rstrip()
    line = _DECORATION.sub("", first).rstrip("*` ")
    if (line != first) == bool(rest) or (rest and statements(rest)):
        return False
    return any(isinstance(call, ToolCall) for call in _statements(line, schemas))


def _is_code(text: str) -> bool:
    """Returns whether a text, or its last line, is code."""
    lines = statements(text) or statements(text.rpartition("\n")[2]) or []
    return text.count("```") % 2 == 1 or any(
        not isinstance(line, (ast.Expr, ast.AnnAssign))
        or isinstance(line.value, (ast.Call, ast.Constant))
        for line in lines  # `Thought: look` is a sentence
    )


def _elements(text: str, schemas: Schemas, limit: int = 0) -> tuple[Calls, int]:
    """Returns the calls in the elements that end a text, each named as its tool."""
    names = "|".join(map(re.escape, schemas))
    opening = re.compile(
        rf"(^[ \t]*(?:<{_WRAPPER}>\s*)?)?<({names})(\s[^<>]*?)?(/?)>", re.MULTILINE
    )
    text = _WRAPPER_ENDS.sub(lambda match: match[0] if match.end() < len(text) else "", text)
    calls: Calls = []
    start = end = position = others = 0
    first_close, most = text.find("</"), most_failures(text)
    while others < most and (tag := opening.search(text, position)):
        follows = bool(calls) and not text[end : tag.start()].strip()
        is_alone = tag[1] is not None and not 0 <= first_close < tag.start()
        reading, stop = _element(text, tag, schemas, follows or is_alone)
        others += not isinstance(reading, list)
        if reading is None:
            position = tag.end()
            continue
        if not follows:
            calls, start = [], tag.start()
        calls += [ToolCallError(message=reading)] if isinstance(reading, str) else reading
        position = end = stop
    if others == most and opening.search(text, position):
        warn_of_unread()
    return ([], 0) if text[end:].strip() else (calls, start)


def _element(
    text: str, tag: re.Match[str], schemas: Schemas, is_apart: bool
) -> tuple[list[ToolCall] | str | None, int]:
    """Returns the call that begins with a tag, or what is wrong with it, and where it ends.

    Args:
        text: The text.
        tag: The opening tag.
        schemas: The tools.
        is_apart: Whether the tag begins a line of a text without others.

    Returns:
        None in place of the call if it is none.
    """
    name, close = tag[2], f"</{tag[2]}>"
    fault = f"the tool call must be <{name}><KEY>VALUE</KEY></{name}>."
    keys = properties_of(schemas[name])
    is_apart = is_apart and name not in _HTML
    if tag[4] or (tag[3] or "").strip():
        attributes = re.findall(r"(?<![\w.-])([\w.-]++)\s*+=", tag[3] or "")
        if not is_apart or not (set(attributes) & set(keys) or (tag[4] and not attributes)):
            return None, 0
        if not attributes:
            return typed_call(name, [], schemas), tag.end()
        end = -1 if tag[4] else text.find(close, tag.end())
        return fault, max(end + len(close), tag.end())
    if re.match(r"\s*<parameter[= ]", text[tag.end() : tag.end() + 64]):
        return (fault if is_apart else None), len(text)
    ends = (*(f"<{key}>" for key in keys), close)
    opening = rf"(?P<open><(?P<key>{'|'.join(map(re.escape, keys))})>)"
    pairs, position, is_open = read_pairs(text, tag.end(), opening, "</KEY>", ends)
    if text.startswith(close, position) and (pairs or is_apart):
        lines = re.compile(ON_LINES, re.DOTALL).fullmatch
        trimmed = [(key, m[1] if (m := lines(text)) else text, "") for key, text, _ in pairs]
        return typed_call(name, trimmed, schemas), position + len(close)
    rest, end = text[position:], text.find(close, tag.end())
    if end < 0:
        is_cut = is_open or ((pairs or rest) and any(each.startswith(rest) for each in ends))
        return fault if is_cut else None, len(text)
    inside = text[tag.end() : end]
    is_meant = is_apart and inside.strip() and _PLAIN_ELEMENT.fullmatch(inside)
    return fault if pairs or is_open or is_meant else None, end + len(close)
