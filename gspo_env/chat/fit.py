"""Changes conversations into such as a template accepts; loaded for templates that need it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

Chat = Sequence[Mapping[str, Any]]

_HOW_TO_CALL = (
    'To call a tool, write <tool_call>{"name": "NAME", "arguments": {"KEY": "VALUE"}}</tool_call>.'
)
_NINE = re.compile(r"[A-Za-z0-9]{9}")


def folded(messages: Chat) -> Chat:
    """Moves the system text to the start of the first user message."""
    system, *others = messages
    if not others or others[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *others]
    return [*without_repeats([{**system, "role": "user"}, others[0]]), *others[1:]]


def with_one_system(messages: Chat) -> Chat:
    """Joins the system messages that come first; later ones are the user's."""
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    others = [
        {**m, "role": "user"} if m["role"] == "system" else m for m in messages[len(leading) :]
    ]
    return [*without_repeats(leading, "system"), *others]


def without_repeats(messages: Chat, role: str = "user") -> Chat:
    """Joins messages of a role that follow each other."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == role:
            text = "\n\n".join(filter(None, (joined[-1]["content"], message["content"])))
            joined[-1] = {**joined[-1], "content": text}
        else:
            joined.append(message)
    return joined


def without_empty(messages: Chat) -> Chat:
    """Gives answers that say nothing a space."""
    return [
        {**m, "content": " "}
        if m["role"] == "assistant" and not m["content"] and not m.get("tool_calls")
        else m
        for m in messages
    ]


def without_results(messages: Chat, *, keeps: bool) -> Chat:
    """Makes results the user's.

    Args:
        messages: The conversation.
        keeps: Whether results of calls that the template shows stay results.
    """
    changed: list[Mapping[str, Any]] = []
    is_called = False
    for message in messages:
        role = message["role"]
        is_called = bool(message.get("tool_calls")) or (is_called and role == "tool")
        is_kept = role != "tool" or (keeps and is_called)
        changed.append(message if is_kept else {**message, "role": "user"})
    return changed


def with_ids(messages: Chat, *, names: bool) -> Chat:
    """Gives calls, and the answers to them, ids that the template accepts.

    A call is numbered among all of the conversation. An answer without a known id is that of the
    first call that has none.

    Args:
        messages: The conversation.
        names: Whether an id is `functions.NAME:NUMBER`, as Kimi's templates write it in place of
            the name, or nine letters, as Mistral's ask for.
    """
    waiting: dict[str, str] = {}
    """The new ids of calls without an answer, by their old ones."""
    result, number = [], 0
    for message in map(dict, messages):
        calls = []
        for call in message.get("tool_calls", ()):
            old = str(call.get("id") or number)
            name = f"functions.{call['function']['name']}:{number}"
            new = name if names else old if _NINE.fullmatch(old) else f"call{number:05d}"
            waiting[old] = new
            calls.append({**call, "id": new})
            number += 1
        if calls:
            message["tool_calls"] = calls
        if message["role"] == "tool" and waiting:
            call_id = message.get("tool_call_id")
            call_id = call_id if call_id in waiting else next(iter(waiting))
            message["tool_call_id"] = waiting.pop(call_id)
        result.append(message)
    return result


def with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Appends the calls of a message to its content."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    lines = [message["content"], *(f"<tool_call>{call}</tool_call>" for call in calls)]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, lines))}


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the arguments of the calls of a message as JSON."""
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def list_tools(messages: Chat, schemas: Chat) -> Chat:
    """Adds a list of the tools, and the form of a call, to the system message."""
    lines = [json.dumps(schema, ensure_ascii=False) for schema in schemas]
    listing = "\n".join(["Tools:", *lines, _HOW_TO_CALL])
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": listing}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{listing}".strip()}, *others]
