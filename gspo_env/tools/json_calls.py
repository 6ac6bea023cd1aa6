"""Reads tool calls in JSON. No function raises, whatever the text."""

from __future__ import annotations

import json.decoder
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from gspo_env.types import ToolCall

logger = logging.getLogger(__name__)

_SPACE: Any = json.decoder.WHITESPACE  # type: ignore[attr-defined]
_NESTS, _DEEPEST = (dict, list), 90
"""Most levels of the arguments of a call, which a request of 100 levels holds."""
_KEYS = {"name", "arguments", "parameters", "id", "type"}
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallError:
    """A malformed call."""

    message: str
    """The error in one sentence."""


Reading = tuple[Sequence[ToolCall | ToolCallError] | str, int]
"""The calls at a mark, or what is wrong with them, and where the text goes on. An error at the mark
itself is text that only names the mark, if the text has calls."""


def most_failures(text: str) -> int:
    """Returns the failed readings after which a text is not searched further.

    Each may pass over the whole text, so the time is that of 8 MB, or of 32 times the text.
    """
    return 32 * max(1, (1 << 18) // max(1, len(text)))


@cache
def warn_of_unread() -> None:
    """Logs, once in a process, that the end of a text was not searched for calls."""
    logger.warning(
        "an action has so many marks of tool calls without a call that its end was not read; "
        "further ones are not shown"
    )


def levels(tree: Any) -> Iterator[list[Any]]:
    """Yields what a JSON value has at each depth: itself, then its items, keys and values, ...

    Example:
        >>> list(levels({"a": [1]}))
        [[{'a': [1]}], ['a', [1]], [1]]
    """
    level = [tree]
    while level:
        yield level
        tables = [node for node in level if isinstance(node, dict)]
        lists = [node for node in level if isinstance(node, list)]
        level = [*chain(*tables, *(table.values() for table in tables), *lists)]


def to_calls(value: Any) -> list[ToolCall] | str:
    """Returns a call or a list of calls, or what is wrong with one of them."""
    calls = [to_call(each) for each in (value if isinstance(value, list) else [value])]
    fault = next((call for call in calls if isinstance(call, str)), "")
    if fault or not calls:
        return fault or "the list of tool calls is empty."
    return [call for call in calls if isinstance(call, ToolCall)]


def to_call(value: Any) -> ToolCall | str:
    """Returns the call, or what is wrong with it in one sentence."""
    if not isinstance(value, dict):
        return f"the tool call must be a JSON object, got {type(value).__name__}."
    call_id = value.get("id")
    if isinstance(value.get("function"), dict) and value.keys() <= {"type", "id", "function"}:
        value = value["function"]
    if unknown := value.keys() - _KEYS:
        expected = 'expected "name" and "arguments"'
        return f"the tool call has the unknown key {min(unknown)[:40]!r}; {expected}."
    if {"arguments", "parameters"} <= value.keys():
        return 'the tool call has both "arguments" and "parameters".'
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name:
        return 'the tool call needs a "name" that is a string.'
    arguments = {} if arguments in (None, "", "null") else arguments
    if isinstance(arguments, str):
        arguments, _, fault = decode(arguments, whole=True)
        if fault:
            return fault.replace("the tool call is", 'the "arguments" are', 1)
    if not isinstance(arguments, dict):
        return f'the "arguments" must be a JSON object, got {type(arguments).__name__}.'
    texts = (name, *arguments, *arguments.values())
    if not all(x.isascii() if isinstance(x, str) else not isinstance(x, _NESTS) for x in texts):
        if any(depth == _DEEPEST for depth, _ in enumerate(levels(arguments))):
            return f"the tool call is nested more than {_DEEPEST} levels deep."
        text = json.dumps([name, arguments], ensure_ascii=False)
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            return "the tool call has a lone surrogate, which is not a character."
    return ToolCall(name=name, arguments=arguments, id=call_id if isinstance(call_id, str) else "")


def decode(text: str, start: int = 0, *, whole: bool = False) -> tuple[Any, int, str]:
    """Decodes the JSON at a position; returns the value, its end, and what is wrong with it."""
    try:
        if whole:
            return DECODER.decode(text), len(text), ""
        return *DECODER.raw_decode(text, start), ""
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return None, -1, f"the tool call is not valid JSON: {reason}."


def skip_space(text: str, start: int) -> int:
    """Returns the position of the next character that is not white space."""
    end: int = _SPACE.match(text, start).end()
    return end


def reject_constant(name: str) -> float:
    """Refuses `NaN` and `Infinity`, which Python reads in JSON."""
    raise ValueError(f"{name} is not JSON")


def finite_number(text: str) -> float:
    """Reads a number of JSON, unless it is too large for one."""
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


def whole_numbers(tree: Any) -> Any:
    """Returns JSON whose numbers without a fraction are integers, as in JSON Schema.

    Example:
        >>> whole_numbers({"count": 3.0, "share": 0.5})
        {'count': 3, 'share': 0.5}
    """
    if isinstance(tree, dict):
        return {key: whole_numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole_numbers(item) for item in tree]
    return int(tree) if isinstance(tree, float) and tree.is_integer() else tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(keys := dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice")
    return keys


DECODER = json.JSONDecoder(
    parse_constant=reject_constant, parse_float=finite_number, object_pairs_hook=_unique
)
"""Decodes JSON without NaN, infinite numbers and keys that an object has twice."""


def read_enclosed(close: str, text: str, start: int) -> Reading:
    """Reads JSON between marks.

    Args:
        close: The mark behind it.
        text: The text.
        start: Where the JSON begins.
    """
    value, end, fault = decode(text, start)
    stop = text.find(close, max(start, end))
    if stop < 0:
        return f"the tool call has no closing {close}.", start + 1
    if not fault and text[end:stop].strip():
        fault = f"the tool call has text between its JSON and {close}."
    return fault or to_calls(value), stop + len(close)
