"""The tools of a prompt: what somebody else wrote in them cannot become a control token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

Chat = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`; some with `tool_calls` and other fields."""
Schemas = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's function format."""

_SCHEMA_WORDS = """type function name description parameters object properties required string
number integer boolean array null items enum default title format anyOf oneOf allOf const $ref"""
"""Words of JSON schemas, which templates compare with."""


def hide_controls(
    schemas: str, controls: Sequence[str], normalize: Callable[[str], str]
) -> tuple[Any, dict[int, str]]:
    """Changes the strings of tools so that no part of them can be read as a control token.

    Private characters replace the first symbol of each control token, in whatever form the
    tokenizer's normaliser accepts it. A further one at both ends of a string keeps it from forming
    a control token with the text beside it.

    Args:
        schemas: The tools as JSON.
        controls: The text of each control token.
        normalize: The tokenizer's normaliser.

    Returns:
        The tools, and the text that each private character stands for.
    """
    symbols = {next(filter(_is_symbol, name), "") for name in controls}
    words = [name for name in controls if not any(map(_is_symbol, name))]
    hidden = [c for c in sorted(set(schemas)) if symbols & {c, *normalize(c)}]
    border, *free = (c for c in map(chr, range(0xE000, 0xF900)) if c not in schemas)
    private = dict(zip([*hidden, *words], free, strict=False))
    foreign = {ord(new): old for old, new in private.items()} | {ord(border): ""}
    keep = set(_SCHEMA_WORDS.split()) - {re.sub(r"\W", "", name) for name in controls}
    return _hidden(json.loads(schemas), private, border, keep), foreign


def list_tools(messages: Chat, schemas: Schemas) -> Chat:
    """Adds a list of the tools to the system message."""
    listing = "Tools:\n" + "\n".join(json.dumps(schema) for schema in schemas)
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": listing}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{listing}".strip()}, *others]


def _is_symbol(char: str) -> bool:
    return not (char.isalnum() or char.isspace() or char in "_\u2581")


def _hidden(tree: Any, private: Mapping[str, str], border: str, keep: AbstractSet[str]) -> Any:
    if isinstance(tree, str) and tree not in keep:
        for old, new in private.items():
            tree = tree.replace(old, new)
        inner = tree.strip()
        return tree.replace(inner, border + inner + border, 1) if inner else tree
    if isinstance(tree, list):
        return [_hidden(one, private, border, keep) for one in tree]
    if isinstance(tree, dict):
        pairs = ((_hidden(k, private, border, keep), v) for k, v in tree.items())
        return {k: _hidden(v, private, border, keep) for k, v in pairs}
    return tree
