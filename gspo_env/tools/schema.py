"""Checks arguments against a JSON schema that an untrusted server or program wrote."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

from gspo_env.errors import first_line, raised_as
from gspo_env.tools.json_calls import levels

_LONGEST_SCHEMA = 1 << 16
_MOST_PARTS = 3000
"""Objects and lists of a schema."""
_MOST_WORK = 50_000
"""Keywords that are applied to one call, and the items of lists that they have; a list for which
all items are compared counts squared."""
_ITEMS = 16
"""Parts of an argument that a keyword passes over in the time of one keyword."""
_DEEPEST = 100
_LEFT_TO_THE_SERVER = ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties")
"""Keywords that match a regular expression, which can take for ever and cannot be interrupted."""
_TURNED = ("contains", "if", "not", "oneOf")
"""Keywords that may refuse because a part is valid: left to the server beside those above."""

Check = Callable[[dict[str, Any]], dict[str, Any]]


def arguments_validator(
    schema: dict[str, Any], *, complete: bool = False
) -> TypeAdapter[dict[str, Any]]:
    """Returns what validates the arguments of a tool; equal schemas share it.

    Every fault of the schema or of the arguments is a `ValueError` of at most 500 characters.

    Args:
        schema: The schema.
        complete: Whether to refuse a schema with keywords that are left to the server.

    Raises:
        ValueError: The schema is too large or deep, invalid, or refers to another document.
    """
    return _validator_of(json.dumps(schema), complete)


@lru_cache(maxsize=1024)
def _validator_of(schema: str, complete: bool) -> TypeAdapter[dict[str, Any]]:
    check = _checker(json.loads(schema), complete)
    return TypeAdapter(Annotated[dict[str, Any], AfterValidator(check)])


def _checker(schema: dict[str, Any], complete: bool) -> Check:
    from jsonschema import FormatChecker
    from referencing import Registry

    _check_size(schema)
    incomplete = any(_left_out(part) for part in _parts(schema))
    if incomplete and complete:
        raise ValueError(f"it has one of {', '.join(_LEFT_TO_THE_SERVER)}, which are not checked")
    kind = _validator(incomplete)
    # jsonschema raises many kinds
    with raised_as(ValueError, "its schema is wrong", Exception, reason=first_line):
        kind.check_schema(schema, format_checker=FormatChecker(formats=()))
        _check_references(schema)
        # an empty registry, so that a schema cannot make this process fetch URLs
        validator = kind(schema, registry=Registry())

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        _work.remaining = _MOST_WORK
        problem = "the tool's schema cannot be applied"  # it may make any part of the check fail
        with raised_as(ValueError, problem, Exception, reason=first_line):
            fault = next(validator.iter_errors(arguments), None)
        if fault is not None:
            where = ".".join(str(part) for part in fault.absolute_path)
            raise ValueError(f"{where}: {fault.message}"[:500] if where else fault.message[:500])
        return arguments

    return check


def _check_size(schema: Any) -> None:
    """Refuses a schema that would take long to check, or too much of the prompt."""
    parts = 0
    for depth, level in enumerate(levels(schema)):
        parts += sum(isinstance(part, (dict, list)) for part in level)
        if parts > _MOST_PARTS:
            raise ValueError(f"its schema has more than {_MOST_PARTS} parts")
        if depth == _DEEPEST:
            raise ValueError(f"its schema is deeper than {_DEEPEST} levels")
    if len(json.dumps(schema)) > _LONGEST_SCHEMA:
        raise ValueError(f"its schema has more than {_LONGEST_SCHEMA} characters")


def _check_references(schema: dict[str, Any]) -> None:
    """Looks up every reference.

    Raises:
        ValueError: One refers to another document.
        referencing.exceptions.Unresolvable: One refers to nothing.
    """
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    root = DRAFT202012.create_resource(schema)
    resolver = Registry().with_resource("", root).resolver()
    names = [part.get("$ref") for part in _parts(schema)]
    for name in (name for name in names if isinstance(name, str)):
        if not name.startswith("#"):
            raise ValueError(f"it refers to {name!r}, expected a part of itself")
        resolver.lookup(name)


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """Yields every object of a schema."""
    if isinstance(part, dict):
        yield part
    for child in part.values() if isinstance(part, dict) else part:
        if isinstance(child, (dict, list)):
            yield from _parts(child)


def _left_out(part: dict[str, Any]) -> bool:
    """Returns whether an object has a keyword that is left to the server."""
    return isinstance(part.get("pattern"), str) or any(n in part for n in _LEFT_TO_THE_SERVER[1:])


_work = threading.local()
"""`remaining`: the work that the check in this thread may still do."""


@cache
def _validator(incomplete: bool) -> Any:
    """Returns a validator class that counts its work and runs no regular expression.

    Args:
        incomplete: Whether the schema has a keyword that is left to the server.
    """
    from jsonschema import Draft202012Validator, validators

    def counted(name: str, apply: Any) -> Any:
        def run(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            size = len(instance) if isinstance(instance, (dict, list)) else 0
            items = len(value) if isinstance(value, list) else 0
            compares = name == "uniqueItems" and isinstance(instance, list)
            _work.remaining -= size**2 if compares else 1 + items + size // _ITEMS
            if _work.remaining < 0:
                raise ValueError("it takes too much work")
            if name == "additionalProperties" and "patternProperties" in schema:
                return ()  # which are additional, the server's patterns say
            return apply(validator, value, instance, schema)

        return run

    remaining = _LEFT_TO_THE_SERVER + (_TURNED if incomplete else ())
    checks = {
        name: _pass if name in remaining else counted(name, apply)
        for name, apply in Draft202012Validator.VALIDATORS.items()
    }
    return validators.extend(Draft202012Validator, checks)


def _pass(*_: Any) -> tuple[()]:
    """Finds no error."""
    return ()
