"""Reads arguments that are text: their types are those of the tool's schema.

No function raises, whatever the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

from gspo_env.tools.json_calls import Schemas, decode, to_calls, whole_numbers
from gspo_env.tools.python import literal
from gspo_env.types import ToolCall

_KINDS: Mapping[type, str] = {
    **{str: "string", bool: "boolean", int: "integer", float: "number"},
    **{list: "array", dict: "object", type(None): "null"},
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


class Elements(NamedTuple):
    """The content of an element that has others in it."""

    text: str
    items: list[tuple[str, Any]]


def typed_call(
    name: str, pairs: Iterable[tuple[str, Any, str]], schemas: Schemas
) -> list[ToolCall] | str:
    """Returns a call whose arguments are texts or elements.

    Args:
        name: The tool.
        pairs: The key and the text of each argument, and the type that the call itself gives it,
            or an empty text; then the type is that of the schema.
        schemas: The schemas of the tools.
    """
    arguments: dict[str, Any] = {}
    schema = schemas.get(name, {})
    for key, text, kind in pairs:
        if key in arguments:
            return f"the tool call has the argument {key[:40]!r} twice."
        part: Any = _child(schema, key, schema)
        if kind:
            others = [other for other in _KINDS.values() if other != "string"]
            part = {"type": {"true": "string", "false": others}.get(kind, kind)}
        value, fault = _value(text, part, schema)
        if fault:
            return f"the argument {key[:40]!r} is {fault}."
        arguments[key] = value
    return to_calls({"name": name, "arguments": arguments})


def properties_of(schema: Any) -> list[str]:
    """Returns the names of the arguments that a tool's schema lists."""
    return [*chain(*_tables("properties", _parts(schema, schema)))]


def _tables(key: str, parts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [table for part in parts if isinstance(table := part.get(key), Mapping)]


def _child(schema: Any, key: str, root: Mapping[str, Any]) -> Any:
    """Returns the schema of a property, or None."""
    parts = [*_parts(schema, root)]
    named = [table[key] for table in _tables("properties", parts) if key in table]
    others = chain(*(table.values() for table in _tables("patternProperties", parts)))
    options = named or [*others, *_tables("additionalProperties", parts)]
    return {"anyOf": options} if options else None


def _item(schema: Any, index: int, root: Mapping[str, Any]) -> Any:
    """Returns the schema of an item of a list, or None."""
    for part in _parts(schema, root):
        first, rest = part.get("prefixItems"), part.get("items")
        if isinstance(rest, list):
            first, rest = rest, part.get("additionalItems")
        if isinstance(first, list) and index < len(first):
            return first[index]
        if rest is not None:
            return rest
    return None


def _value(node: str | Elements, schema: Any, root: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the value of a text, or of elements with names, and what is wrong with it."""
    kinds, values = _kinds(schema, root)
    text = node if isinstance(node, str) else node.text
    if isinstance(node, str) or ("string" in kinds and not kinds & {"array", "object"}):
        value, faults = _typed(text, kinds, values), []
    else:
        names = [name for name, _ in node.items]
        is_list = set(names) == {_ITEM} and "object" not in kinds
        inner = [
            _value(part, _item(schema, n, root) if is_list else _child(schema, name, root), root)
            for n, (name, part) in enumerate(node.items)
        ]
        faults = [fault for _, fault in inner if fault]
        items = [item for item, _ in inner]
        value = items if is_list else dict(zip(names, items, strict=True))
    kind = _KINDS[type(value)]
    if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
        faults.append(f"{text[:40]!r}; expected {' or '.join(sorted(kinds))}")
    return value, faults[0] if faults else ""


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
    value, _, fault = decode(text, whole=True)
    if fault:
        is_literal = kinds & {"array", "object"} or (not kinds and _PYTHON_VALUE.fullmatch(word))
        value = literal(word) if is_literal else text
    value = whole_numbers(value) if "integer" in kinds else value
    return text if isinstance(value, str) else value


def _kinds(schema: Any, root: Mapping[str, Any]) -> tuple[set[str], list[Any]]:
    """Returns the JSON types that a schema allows, all if there are none, and its constants."""
    parts = [*_parts(schema, root)]
    kinds = [_own_kinds(part) for part in parts]
    constants = [*chain(*(values for _, values in kinds))]
    is_any = any(not part for part in parts)
    return set() if is_any else set().union(*(names for names, _ in kinds)), constants


def _own_kinds(schema: Mapping[str, Any]) -> tuple[set[str], list[Any]]:
    """Returns what `type`, `enum`, `const` and `nullable` of a schema say."""
    kind = schema.get("type")
    names = {_SPELLINGS.get(str(each).lower(), "") for each in (_list(kind) or [kind])}
    constants = [*_list(schema.get("enum", [schema["const"]] if "const" in schema else []))]
    if kind is None or "" in names:
        names = {_KINDS.get(type(value), "object") for value in constants}
    return names | ({"null"} if schema.get("nullable") is True else set()), constants


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and those that it is made of, each once."""
    parts, seen = [schema], set[int]()
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            parts.append(_resolve(part.get("$ref"), root))
            options = [_list(part[key]) for key in ("anyOf", "oneOf", "allOf") if key in part]
            parts += [*chain(*options), part.get("then"), part.get("else")]


def _resolve(reference: Any, root: Any) -> Any:
    """Returns the part of a schema that `#/...` refers to; None if there is none."""
    first, *names = unquote(reference).split("/") if isinstance(reference, str) else [""]
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, Mapping) else None
    return root if first == "#" else None
