"""Reads arguments that are text: their types are those of the tool's JSON schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

from gspo_env.tool_calls import DECODER, Schemas, to_calls
from gspo_env.types import ToolCall

LONGEST_LITERAL = 1 << 16
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
_SPELLINGS = {
    **{kind: kind for kind in _KINDS.values()},
    **{"str": "string", "int": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "list": "array", "tuple": "array", "dict": "object", "none": "null"},
}
"""The JSON type that each name of a type means, in lower case; others say nothing."""
_PYTHON_VALUE = re.compile(r"None|True|False|\[.*\]|\{.*\}", re.DOTALL)
_ITEM = "item"
"""The name of an element of a list."""
_PATTERN = re.compile(
    r"""\^?(?:(?:[\w \-:@/,#&%!=<>~;'"]|\\[dwsDWS.\-_/$]|\.|"""
    r"\[\^?(?:[\w .,:;/@+*-]|\\[dwsDWS.-])+\])"
    r"(?:[*+?]|\{\d{1,2}(?:,\d{0,2})?\})?)*\$?"
)
"""Regular expressions without groups or alternatives, whose time is bounded by their repeats."""
_REPEATS = re.compile(r"[*+?{]")
_MOST_REPEATS, _LONGEST_KEY = 2, 64


def typed_call(
    name: str, pairs: Iterable[tuple[str, Any]], schemas: Schemas, types: Mapping[str, str] = {}
) -> list[ToolCall] | str:
    """Returns a call whose arguments are texts or elements.

    Args:
        name: The tool.
        pairs: The keys and texts.
        schemas: The schemas of the tools.
        types: The types that the call itself gives, by key; others are those of the schema.
    """
    arguments: dict[str, Any] = {}
    schema = schemas.get(name, {})
    for key, text in pairs:
        if key in arguments:
            return f"the tool call has the argument {key[:40]!r} twice."
        part: Any = _child(schema, key, schema)
        if key in types:
            others = [kind for kind in _KINDS.values() if kind != "string"]
            part = {"type": {"true": "string", "false": others}.get(types[key], types[key])}
        try:
            arguments[key] = _value(text, part, schema)
        except _TypeMismatchError as error:
            return f"the argument {key[:40]!r} is {error}."
    return to_calls({"name": name, "arguments": arguments})


class _TypeMismatchError(Exception):
    """A text has none of the types that its schema allows."""


class Elements(NamedTuple):
    """The content of an element that has others in it."""

    text: str
    items: list[tuple[str, Any]]


def properties_of(schema: Any) -> list[str]:
    """Returns the names of the arguments that a tool's schema lists."""
    parts = (part.get("properties") for part in _parts(schema, schema))
    return [key for part in parts if isinstance(part, Mapping) for key in part]


def _child(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """Returns the schema of a property, or None."""
    parts = [*_parts(schema, root)]
    tables = [part.get("properties") for part in parts]
    named = [table[key] for table in tables if isinstance(table, Mapping) and key in table]
    if named:
        return {"anyOf": named}
    tables = [part.get("patternProperties") for part in parts]
    patterns = [pair for table in tables if isinstance(table, Mapping) for pair in table.items()]
    matches = [(_matches(pattern, key), part) for pattern, part in patterns]
    sure = [part for match, part in matches if match]
    if sure:
        return {"anyOf": sure}
    possible = [part for match, part in matches if match is None]
    others = [part.get("additionalProperties") for part in parts]
    possible += [other for other in others if isinstance(other, Mapping)]
    return {"anyOf": possible} if possible else None


def _item(schema: Any, index: int, root: Mapping[str, Any]) -> Any:
    """Returns the schema of an item of a list, or None."""
    for part in _parts(schema, root):
        items = part.get("items")
        first = part.get("prefixItems", items if isinstance(items, list) else ())
        if isinstance(first, list) and index < len(first):
            return first[index]
        if first is items or items is not None:
            return part.get("additionalItems") if isinstance(items, list) else items
    return None


def _matches(pattern: str, key: str) -> bool | None:
    """Returns whether a name matches a pattern; None if it is one that may take long."""
    if len(key) > _LONGEST_KEY or not _PATTERN.fullmatch(pattern):
        return None
    if len(_REPEATS.findall(pattern)) > _MOST_REPEATS:
        return None
    if pattern.endswith("$") and not pattern.endswith(r"\$"):
        pattern = rf"{pattern[:-1]}\Z"
    try:
        return re.search(pattern, key, re.ASCII) is not None
    except re.error:
        return None


def _value(node: str | Elements, schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns the value of a text, or of elements with names."""
    kinds, values = _kinds(schema, root, {})
    kinds = kinds or set()
    if isinstance(node, Elements) and "string" in kinds and not kinds & {"array", "object"}:
        node = node.text
    value: Any
    if isinstance(node, str):
        value = _typed(node, kinds, values)
    elif {name for name, _ in node.items} == {_ITEM} and "object" not in kinds:
        value = [
            _value(child, _item(schema, index, root), root)
            for index, (_, child) in enumerate(node.items)
        ]
    else:
        value = {n: _value(child, _child(schema, n, root), root) for n, child in node.items}
    kind = _KINDS[type(value)]
    if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
        text = node if isinstance(node, str) else node.text
        raise _TypeMismatchError(f"{text[:40]!r}; expected {' or '.join(sorted(kinds))}")
    return value


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
    if not word and len(kinds) == 1 and kinds < {"array", "object"}:
        return [] if "array" in kinds else {}
    if "string" in kinds:
        return text
    if "boolean" in kinds and word in ("True", "False"):
        return word == "True"
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        isliteral = kinds & {"array", "object"} or (not kinds and _PYTHON_VALUE.fullmatch(word))
        value = literal(word) if isliteral else text
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return value if "number" in kinds else int(value)  # 2.0 is an integer in JSON schema
    return text if isinstance(value, str) else value


def _kinds(
    schema: Any, root: Mapping[str, Any], cache: dict[int, tuple[set[str] | None, list[Any]]]
) -> tuple[set[str] | None, list[Any]]:
    """Returns the JSON types that a schema allows, None if it does not say, and its constants.

    Args:
        schema: The schema.
        root: The schema in which it stands.
        cache: The results by the identity of schemas; a schema that refers to itself adds nothing.
    """
    if not isinstance(schema, Mapping):
        return None, []
    if id(schema) in cache:
        return cache[id(schema)]
    cache[id(schema)] = set(), []
    kinds, constants = _own_kinds(schema)
    reference = schema.get("$ref")
    limits = [[_resolve(reference, root)]] if isinstance(reference, str) else []
    limits += [[part] for part in _list(schema.get("allOf"))]
    limits += [options for key in ("anyOf", "oneOf") if (options := _list(schema.get(key)))]
    for options in limits:
        parts = [_kinds(option, root, cache) for option in options]
        constants += chain(*(values for _, values in parts))
        sets = [part for part, _ in parts]
        limited = [part for part in sets if part is not None]
        if len(limited) == len(sets):
            kinds = _intersection(kinds, set().union(*limited))
    if kinds is not None and schema.get("nullable") is True:
        kinds = kinds | {"null"}
    cache[id(schema)] = kinds, constants
    return kinds, constants


def _own_kinds(schema: Mapping[str, Any]) -> tuple[set[str] | None, list[Any]]:
    """Returns what `type`, `enum` and `const` of a schema say."""
    kind = schema.get("type")
    names = {_SPELLINGS.get(str(k).lower()) for k in (kind if isinstance(kind, list) else [kind])}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    constants = list(values) if isinstance(values, list) else []
    if kind is not None and None not in names:
        return {name for name in names if name}, constants
    if constants:
        return {_KINDS.get(type(value), "object") for value in constants}, constants
    return None, []


def _intersection(kinds: set[str] | None, others: set[str]) -> set[str]:
    """Returns the types that two sets share; an integer is a number."""
    if not kinds:
        return others
    first, second = ((k | {"integer"}) if "number" in k else k for k in (kinds, others))
    return first & second or kinds


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and those that it is made of, each once."""
    parts, seen = [schema], set[int]()
    while parts:
        part = parts.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(reference := part.get("$ref"), str):
            parts.append(_resolve(reference, root))
        parts += chain(*(_list(part.get(key)) for key in ("anyOf", "oneOf", "allOf")))
        parts += (part.get(key) for key in ("then", "else"))


def _resolve(reference: str, root: Any) -> Any:
    """Returns the part of a schema that `#/...` refers to; None if there is none."""
    first, *names = unquote(reference).split("/")
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root if first == "#" else None


def literal(source: str | ast.expr) -> Any:
    """Returns the JSON value of a Python literal, or the source itself if it is none."""
    if isinstance(source, str) and len(source) > LONGEST_LITERAL:
        return source
    try:
        tree = ast.parse(source.strip(), mode="eval") if isinstance(source, str) else source
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict) and len(set(map(_dump, node.keys))) < len(node.keys):
                return source  # it has a key twice
        return json.loads(json.dumps(ast.literal_eval(tree), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return source


def _dump(key: ast.expr | None) -> str:
    return "" if key is None else ast.dump(key)
