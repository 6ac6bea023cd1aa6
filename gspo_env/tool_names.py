"""Calls that nothing marks but the name of a tool: in Python, in blocks of code and in tags.

Loaded when a text has such a name before a bracket or in a tag. Only what ends a text is a call;
sentences, code and HTML that mention a tool stay text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from gspo_env.tool_arguments import properties_of, typed_call
from gspo_env.tool_calls import Schemas, ToolCallError, skip_space
from gspo_env.tool_formats import ON_LINES, TEXT, calls_of, python_lines, value_end
from gspo_env.types import ToolCall

Calls = list[ToolCall | ToolCallError]

_MOST = 32
"""Blocks, lines and elements without a call that are tried, so that the time is linear."""
_LANGUAGES = {"", "py", "python", "python3", "xml", "tool_code", "tool_call", "tool_calls"}
"""What the mark of a block may say if the block is a call."""
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
_DECORATION = re.compile(
    r"\A(?:[-*+]\s+|\d+[.)]\s+|>>>\s*|\*\*`?|(?:tool |function )?call:?\s+|(?:await|return)\s+)",
    re.IGNORECASE,
)
"""What models write before a line that is a call."""
_FORM = "the tool calls must be lines NAME(KEY=VALUE, ...) with literal values."
_BEHIND = "the tool calls must be the last lines, as NAME(KEY=VALUE, ...) and nothing else."
_ELEMENT_FORM = "the tool call must be <{0}><KEY>VALUE</KEY></{0}>."


def read_named(text: str, schemas: Schemas, limit: int) -> tuple[Calls, int]:
    """Returns the calls that a text ends with, and where they begin.

    Args:
        text: The text.
        schemas: The tools.
        limit: Where the calls begin at the latest.
    """
    for read in (_blocks, _elements, _lines):
        calls, start = read(text, schemas)
        if calls and start <= limit:
            return calls, start
    is_fault = limit >= len(text) and _is_spoiled_call(text, schemas)
    return [ToolCallError(message=_BEHIND)] if is_fault else [], 0


class _Block(NamedTuple):
    """A block of code."""

    start: int
    end: int
    code: str
    language: str
    is_agent: bool
    """Whether it is as agents that act in code write it."""


def _blocks(text: str, schemas: Schemas) -> tuple[Calls, int]:
    """Returns the calls in the blocks of code that end a text."""
    blocks: list[_Block] = []
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
        language = opening["language"] if opening["language"] is not None else "html"
        blocks.append(_Block(opening.start(), position, code, language, is_agent))
    calls: Calls = []
    start = len(text)
    for block in blocks[: -_MOST - 1 : -1]:
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
    if block.language not in _LANGUAGES and not block.is_agent:
        return []
    calls, start = _elements(block.code.strip(), schemas)
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
    lines = python_lines(code)
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
    return [ToolCallError(message=_FORM)] if is_call else []


def _without_prints(lines: Sequence[ast.stmt]) -> list[ast.AST]:
    """Returns what lines of code compute, without assignments and prints of what is assigned."""
    values: list[ast.AST] = []
    for line in lines:
        assigned = isinstance(line, (ast.Expr, ast.Assign, ast.AnnAssign)) and line.value
        value = assigned or line
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "print":
            inner = value.args
            values += [a for a in inner if any(isinstance(n, ast.Call) for n in ast.walk(a))]
        else:
            values.append(value)
    return values


def _is_one_call(code: str, start: int) -> bool:
    """Returns whether code that is not valid is one call, or the start of one.

    Args:
        code: The code.
        start: The position behind its first bracket.
    """
    inside = TEXT.sub("''", code[start:])
    if not re.match(r"\s*+(?:\w*+\s*+(?:[=:]|\Z)|[\"'\[{]|-?\d)", inside):
        return False
    depth = 1
    for bracket in re.finditer(r"[()]", inside):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.end() == len(inside.rstrip("; \n`"))
    return True


def _lines(text: str, schemas: Schemas) -> tuple[Calls, int]:
    """Returns the calls in the lines of Python that end a text; those before must be prose."""
    names = "|".join(map(re.escape, schemas))
    begin = re.compile(rf"^`{{0,3}}(?={_SPACE_NAMES}(?:{names})\()", re.MULTILINE)
    for line in islice(begin.finditer(text), _MOST):
        code = text[line.end() :]
        code = code.removesuffix(line[0]) if line[0] else code
        calls = [] if _is_code(text[: line.start()].rstrip()) else _statements(code, schemas)
        if calls:
            return calls, line.start()
    return [], 0


def _is_spoiled_call(text: str, schemas: Schemas) -> bool:
    """Returns whether a text is a call with decoration, or begins with a line that is a call."""
    first, _, rest = text.strip().partition("\n")
    first = first.rstrip()
    line = _DECORATION.sub("", first).rstrip("*` ")
    if (line != first) == bool(rest) or (rest and python_lines(rest)):
        return False
    return any(isinstance(call, ToolCall) for call in _statements(line, schemas))


def _is_code(text: str) -> bool:
    """Returns whether the last line of a text is code."""
    line = text.rpartition("\n")[2].strip()
    if not line:
        return False
    statements = [
        each
        for each in python_lines(line) or []
        if not isinstance(each, ast.AnnAssign) or each.value  # `Thought: look` is a sentence
    ]
    return (
        text.count("```") % 2 == 1
        or line.endswith((",", "(", "[", "{", "\\"))
        or line.startswith((")", "]", "}", "@", '"""'))
        or any(
            not isinstance(each, (ast.Expr, ast.AnnAssign)) or isinstance(each.value, ast.Call)
            for each in statements
        )
    )


def _elements(text: str, schemas: Schemas) -> tuple[Calls, int]:
    """Returns the calls in the elements that end a text, each named as its tool."""
    names = "|".join(map(re.escape, schemas))
    opening = re.compile(
        rf"(^[ \t]*(?:<{_WRAPPER}>\s*)?)?<({names})(\s[^<>]*?)?(/?)>", re.MULTILINE
    )
    closing = rf"(?<!\s)(?:\s*+</{_WRAPPER}>)++"  # read once, wherever it ends
    text = re.sub(closing, lambda match: match[0] if match.end() < len(text) else "", text)
    calls: Calls = []
    start = end = position = others = 0
    first_close = text.find("</")
    while others < _MOST and (tag := opening.search(text, position)):
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
    keys = properties_of(schemas[name])
    if tag[4] or (tag[3] or "").strip():
        attributes = re.findall(r"(?<![\w.-])([\w.-]++)\s*+=", tag[3] or "")
        is_apart = is_apart and name not in _HTML
        if not is_apart or not (set(attributes) & set(keys) or (tag[4] and not attributes)):
            return None, 0
        if not attributes:
            return typed_call(name, [], schemas), tag.end()
        end = text.find(close, tag.end())
        return _ELEMENT_FORM.format(name), tag.end() if tag[4] else max(end + len(close), tag.end())
    if re.match(r"\s*<parameter[= ]", text[tag.end() : tag.end() + 64]):
        return (_ELEMENT_FORM.format(name) if is_apart else None), len(text)
    following = (*(f"<{key}>" for key in keys), close)
    pairs: list[tuple[str, str]] = []
    position = skip_space(text, tag.end())
    is_open = False
    while key := next((key for key in keys if text.startswith(f"<{key}>", position)), None):
        begin = position + len(key) + 2
        stop = value_end(text, begin, f"<{key}>", f"</{key}>", following)
        is_open = stop < 0
        if is_open:
            break
        value = text[begin:stop]
        pairs.append((key, value.strip("\r\n") if ON_LINES.fullmatch(value) else value))
        position = skip_space(text, stop + len(key) + 3)
    if text.startswith(close, position) and (pairs or (is_apart and name not in _HTML)):
        return typed_call(name, pairs, schemas), position + len(close)
    end, rest = text.find(close, tag.end()), text[position:]
    if end < 0:
        is_cut = is_open or ((pairs or rest) and any(each.startswith(rest) for each in following))
        return _ELEMENT_FORM.format(name) if is_cut else None, len(text)
    inside = text[tag.end() : end]
    is_meant = (
        is_apart and name not in _HTML and inside.strip() and _PLAIN_ELEMENT.fullmatch(inside)
    )
    is_call = pairs or is_open or is_meant
    return _ELEMENT_FORM.format(name) if is_call else None, end + len(close)
