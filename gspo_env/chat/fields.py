"""Fields of JSON that anyone may have written: each is read, ignored or refused in one sentence."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gspo_env.errors import RefusedError
from gspo_env.redaction import clean
from gspo_env.tools.json_calls import DECODER, finite_number, reject_constant
from gspo_env.types import ToolCall

Json = dict[str, Any]
_DEEPEST = 100
"""Most levels of JSON: templates and validators walk through schemas and arguments."""
_MOST_VALUES = 100_000
"""Most values of JSON: one of two bytes takes fifty times as many in memory."""
LONGEST_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(data: bytes) -> Json:
    """Parses a body.

    Raises:
        RefusedError: It is not a JSON object, or has too many levels or values, or NaN.
    """
    try:
        _check_structure(data)
        tree = json.loads(data.decode(), parse_constant=reject_constant, parse_float=finite_number)
        if _SURROGATE.search(data):  # no tokenizer can encode lone surrogates
            tree = json.loads(clean(json.dumps(tree, ensure_ascii=False)))
    except RefusedError:
        raise
    except ValueError as error:
        raise RefusedError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(tree, dict):
        raise RefusedError(f"the body is a JSON {type(tree).__name__}; expected an object")
    return tree


def _check_structure(data: bytes) -> None:
    """Counts values and levels before JSON is parsed, which may take seconds and gigabytes.

    Raises:
        RefusedError: There are too many.
    """
    too_many = data.count(b'"') - data.count(b'\\"') > 2 * _MOST_VALUES
    marks = b"" if too_many else _STRING.sub(b"", data).translate(None, _NO_STRUCTURE)
    if too_many or len(marks) > 2 * _MOST_VALUES:
        raise RefusedError(f"the JSON has more than {_MOST_VALUES:,} values")
    steps = (1 if mark in b"[{" else -1 for mark in marks.translate(None, b","))
    if max(itertools.accumulate(steps), default=0) > _DEEPEST:
        raise RefusedError(f"the JSON is nested more than {_DEEPEST} levels deep")


class Fields:
    """The fields of an object, each of which has to be taken; an absent one and null are equal."""

    def __init__(self, values: Any, where: str = "") -> None:
        """Checks that it is an object.

        Raises:
            RefusedError: It is none.
        """
        if not isinstance(values, Mapping):
            raise RefusedError(f"{where or 'the body'} is {short(values)}; expected an object")
        self.values = {name: value for name, value in values.items() if value is not None}
        self.where = where

    def name(self, field: str) -> str:
        """Returns the name of a field for errors."""
        return f"{self.where}.{field}" if self.where else field

    def refuse(self, field: str, value: Any, expected: str) -> NoReturn:
        """Raises the error of a field with a wrong value."""
        name = self.name(field)
        raise RefusedError(f"{name} is {short(value)}; expected {expected}", param=name)

    def take(self, field: str, kind: type | tuple[type, ...], expected: str) -> Any:
        """Returns a field and notes that it was read; None if it is absent."""
        value = self.values.pop(field, None)
        if value is None:
            return None
        wrong = isinstance(value, bool) and kind is not bool
        if wrong or not isinstance(value, kind):
            self.refuse(field, value, expected)
        return value

    def text(self, field: str) -> str:
        """Returns a string; empty if it is absent."""
        return self.take(field, str, "a string") or ""

    def need(self, field: str, kind: type | tuple[type, ...], expected: str) -> Any:
        """Returns a field that has to be there."""
        if (value := self.take(field, kind, expected)) is None:
            name = self.name(field)
            raise RefusedError(f"{name} is missing; expected {expected}", param=name)
        return value

    def count(self, field: str) -> int | None:
        """Returns a positive integer, or None."""
        value = self.take(field, int, "a positive integer")
        if value is not None and value < 1:
            self.refuse(field, value, "a positive integer")
        return value if value is None else int(value)

    def number(self, field: str, low: float, high: float) -> float | None:
        """Returns a number within limits, or None."""
        expected = f"a number from {low:g} to {high:g}"
        value = self.take(field, (int, float), expected)
        if value is not None and not low <= value <= high:
            self.refuse(field, value, expected)
        return None if value is None else float(value)

    def inner(self, field: str) -> Fields:
        """Returns the fields of an object; none if it is absent."""
        return Fields(self.take(field, dict, "an object") or {}, self.name(field))

    def items(self, field: str) -> list[Any]:
        """Returns a list; empty if it is absent."""
        return list(self.take(field, (list, tuple), "a list") or ())

    def content(self, field: str, kinds: Sequence[str]) -> str:
        """Returns the text of a message; see `content`."""
        return content(self.values.pop(field, None), self.name(field), kinds)

    def tool(self) -> str:
        """Returns the name of a tool."""
        value = self.values.pop("name", None)
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            self.refuse("name", value, f"up to {LONGEST_NAME} letters, digits, '_', '-' or '.'")
        return value

    def call(self, field: str, id: str) -> ToolCall:
        """Returns the call of a tool; a field has its arguments, an object or the JSON of one."""
        # the policy may have written any name, and the program sends its answers back
        name = self.need("name", str, "the name of a tool")
        value = self.values.pop(field, None)
        value = None if value == "null" else value
        if isinstance(value, str) and value:
            _check_structure(value.encode())
        try:
            tree = DECODER.decode(value) if isinstance(value, str) and value else value or {}
        except ValueError:
            tree = None
        if not isinstance(tree, dict):
            self.refuse(field, value, "a JSON object")
        return ToolCall(name=name, arguments=tree, id=id)

    def ignore(self, fields: Sequence[str]) -> None:
        """Drops fields that change no answer."""
        for name in fields:
            self.values.pop(name, None)

    def only(self, allowed: Mapping[str, Sequence[Any]], why: str) -> None:
        """Refuses fields with other values than those that change nothing.

        Args:
            allowed: The values by field.
            why: Why others are refused.

        Raises:
            RefusedError: A field has another value.
        """
        for name, neutral in allowed.items():
            value = self.values.pop(name, None)
            flag = isinstance(value, bool)  # True equals 1
            if value is None or any(value == n and isinstance(n, bool) == flag for n in neutral):
                continue
            shown = " or ".join(short(n) for n in neutral) or "none"
            full = self.name(name)
            raise RefusedError(
                f"{full} is {short(value)}, but {why}; expected {shown}",
                code="unsupported_parameter",
                param=full,
            )

    def done(self) -> None:
        """Refuses the fields that nobody has read."""
        if self.values:
            name = self.name(min(self.values))
            raise RefusedError(
                f"{short(name)} is not a known field of a request; leave it out",
                code="unknown_parameter",
                param=name[:LONGEST_NAME],
            )


def short(value: Any, most: int = 80) -> str:
    """Returns a value for an error."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= most else f"{text[:most]}..."


def content(value: Any, where: str, kinds: Sequence[str]) -> str:
    """Returns the text of a message: a string, or a list of strings and parts with text.

    Args:
        value: The content; None is empty.
        where: Its name for errors.
        kinds: The types of parts that hold text.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise RefusedError(f"{where} is {short(value)}; expected a string or a list", param=where)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        key = "refusal" if kind == "refusal" else "text"
        text = part.get(key) if isinstance(part, dict) and kind in kinds else part
        if not isinstance(text, str):
            expected = " or ".join(map(short, kinds))
            raise RefusedError(
                f"{where} has a part {short(part)}; expected parts of type {expected}: the policy "
                "reads text only",
                param=where,
            )
        texts.append(text)
    return "\n".join(texts)
