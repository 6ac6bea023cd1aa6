"""Reads Python that is data: literals, and the statements of a text. Nothing is evaluated."""

from __future__ import annotations

import ast
import json
import keyword
import re
from typing import Any

_LONGEST = 1 << 16
"""Characters of a text that is read."""
_UNREADABLE = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
"""What Python's parser raises for a text that it does not take."""
_TEXT = r""""(?:[^"\\]|\\.?)*(?:"|\Z)|'(?:[^'\\]|\\.?)*(?:'|\Z)"""
QUOTED = re.compile(_TEXT, re.DOTALL)
"""A text in quotes, which may have no end."""
_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtvxuUN0-7\n]|(.))")
"""A backslash and what it escapes, in a group if that is nothing in Python."""
_TOKEN = re.compile(
    rf"{_TEXT}|\b(?P<keyword>{'|'.join(keyword.kwlist)})(?=\s*=[^=])"
    r"|(?<![\w.-])(?P<name>[^\W\d]\w*+(?:\.*-\w++|\.++\w++)++)(?=\s*(?:=[^=]|\())"
    r"|\b(?P<json>true|false|null)\b(?!\s*[=(])",
    re.DOTALL,
)
"""What is written otherwise than in Python: texts, names with signs, the words of JSON."""
_WORDS = {"true": "True", "false": "False", "null": "None"}
_KEYWORD, _SIGNS = "_keyword_", {"-": "_x2d_sign_", ".": "_x2e_sign_"}


def statements(text: str) -> list[ast.stmt] | None:
    """Returns the statements of a text; None if it is anything else."""
    try:
        return (
            ast.parse(_TOKEN.sub(_to_python, text.strip())).body if len(text) <= _LONGEST else None
        )
    except _UNREADABLE:
        return None


def literal(source: str | ast.expr) -> Any:
    """Returns the JSON value of a Python literal, or the source itself if it is none."""
    if isinstance(source, str) and len(source) > _LONGEST:
        return source
    try:
        tree = ast.parse(source.strip(), mode="eval") if isinstance(source, str) else source
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                keys = {ast.dump(key) if key else "" for key in node.keys}
                if len(keys) < len(node.keys):
                    return source  # it has a key twice
        return json.loads(json.dumps(ast.literal_eval(tree), allow_nan=False))
    except _UNREADABLE:
        return source


def original_name(name: str) -> str:
    """Returns a name of `statements` as the text has it."""
    for sign, word in _SIGNS.items():
        name = name.replace(word, sign)
    return name.removeprefix(_KEYWORD)


def _to_python(token: re.Match[str]) -> str:
    """Escapes line breaks in a text, and lets a keyword or signs be in a name."""
    if token["json"]:
        return _WORDS[token["json"]]
    if token["keyword"] or token["name"]:
        prefix = _KEYWORD if token["keyword"] else ""
        return prefix + re.sub("[-.]", lambda sign: _SIGNS[sign[0]], token[0])
    escaped = _ESCAPE.sub(lambda match: f"\\{match[0]}" if match[1] else match[0], token[0])
    return escaped.replace("\r", "\\r").replace("\n", "\\n")
