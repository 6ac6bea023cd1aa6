"""Ids of calls for templates that write them in place of names, as those of Kimi do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a conversation whose calls, and answers to them, have ids `functions.NAME:NUMBER`.

    A call is numbered among all of the conversation. An answer without a known id is that of the
    first call that has none.
    """
    waiting: dict[str, str] = {}
    """The new ids of calls without an answer, by their old ones."""
    result, number = [], 0
    for message in map(dict, messages):
        calls = []
        for call in message.get("tool_calls", ()):
            name = f"functions.{call['function']['name']}:{number}"
            waiting[str(call.get("id") or number)] = name
            calls.append({**call, "id": name})
            number += 1
        if calls:
            message["tool_calls"] = calls
        if message["role"] == "tool" and waiting:
            old = message.get("tool_call_id")
            message["tool_call_id"] = waiting.pop(old if old in waiting else next(iter(waiting)))
        result.append(message)
    return result
