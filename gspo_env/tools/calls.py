"""Reads the tool calls and the reasoning in what a model writes.

A call is read wherever it stands; a mark that prose only names is text if a call follows. No
function raises, whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from gspo_env.tools.json_calls import (
    Reading,
    Schemas,
    ToolCallError,
    most_failures,
    read_enclosed,
    skip_space,
    warn_of_unread,
)
from gspo_env.tools.marks import MARK, MARKS, may_have_calls, skip_closings, without_openings
from gspo_env.tools.tool import Tool
from gspo_env.types import Message, ToolCall

MOST_THOUGHTS = 32
"""Reasoning at the start of an action that is split off, so that the time is linear."""
REASONING = {
    "<think>": "</think>",
    "<mm:think>": "</mm:think>",
    "<seed:think>": "</seed:think>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|>",
    "to=self<|message|>": "<|eom|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
}
"""The marks around reasoning."""
_IN_REASONING = ToolCallError(
    message="the tool call is in the reasoning, write it behind </think> or the mark that ends it."
)
_UNREAD = ToolCallError(
    message="the text has too many marks of tool calls without a call, its end is not read."
)
Calls = list[ToolCall | ToolCallError]


def parse_tool_calls(
    text: str,
    tools: Sequence[Tool] = (),
    message: Message | None = None,
    *,
    in_reasoning: bool = False,
) -> Calls:
    """Returns the tool calls of an action in order, malformed ones included.

    Calls inside the reasoning are ignored. If nothing follows it, a call in it is an error.

    Args:
        text: What the policy wrote, without the token that ended it.
        tools: The tools that it may call. Their schemas give the types of XML arguments, and a bare
            JSON object is a call only if it names one of them. Without tools, any name is accepted.
        message: The action as the tokenizer's response template has parsed it, if it has one. Its
            calls count if the text itself has none that can be read.
        in_reasoning: Whether the prompt has opened the reasoning, with `<think>` at its end.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
        [ToolCall(name='now', arguments={}, id='')]
    """
    calls = _read(text, tools, in_reasoning)[1]
    if message is not None and message.tool_calls and not _valid(calls):
        return list(message.tool_calls)
    return calls


def parse_message(
    text: str, tools: Sequence[Tool] = (), *, in_reasoning: bool = False
) -> tuple[Message, int]:
    """Parses an action into a message.

    Args:
        text: See `parse_tool_calls`.
        tools: See `parse_tool_calls`.
        in_reasoning: See `parse_tool_calls`.

    Returns:
        The assistant's message, and the number of malformed calls, which stay in its content. Calls
        in reasoning that nothing follows count as one, and stay in the reasoning.

    Example:
        >>> message, malformed = parse_message('<tool_call>{"name": "now"}</tool_call>')
        >>> message.tool_calls, malformed
        ((ToolCall(name='now', arguments={}, id=''),), 0)
    """
    message, calls = _read(text, tools, in_reasoning)
    return message, len(calls) - len(message.tool_calls)


def split_reasoning(text: str, in_reasoning: bool = False) -> tuple[str | None, str | None]:
    """Returns the reasoning at the start of an action and what follows it.

    Args:
        text: The action.
        in_reasoning: See `parse_tool_calls`.

    Returns:
        The reasoning, None if there is none, and the rest, None if the reasoning never ends.

    Example:
        >>> split_reasoning("<think>two links</think>stone")
        ('two links', 'stone')
    """
    thoughts: list[str] = []
    while len(thoughts) < MOST_THOUGHTS:
        start = text.lstrip()
        mark = next(filter(start.startswith, REASONING), "")
        if not mark and not in_reasoning:
            break
        ends = [REASONING[mark]] if mark else REASONING.values()
        thought = start.removeprefix(mark)
        place, end = min(((thought.find(e), e) for e in ends if e in thought), default=(None, ""))
        thoughts.append(thought[:place].strip("\n"))
        if place is None:
            return "\n".join(filter(None, thoughts)), None
        text, in_reasoning = thought[place + len(end) :].lstrip("\n"), False
    return "\n".join(filter(None, thoughts)) if thoughts else None, text


def _valid(calls: Calls) -> tuple[ToolCall, ...]:
    return tuple(call for call in calls if isinstance(call, ToolCall))


def _read(text: str, tools: Sequence[Tool], in_reasoning: bool) -> tuple[Message, Calls]:
    """Returns an action as a message, with the malformed calls in its content, and its calls."""
    schemas = {tool.name: tool.parameters for tool in tools}
    reasoning, content = split_reasoning(text, in_reasoning)
    content = content or ""
    if reasoning is not None and not content.strip():
        calls: Calls = [_IN_REASONING] if _find_calls(reasoning, schemas)[0] else []
        return Message(role="assistant", content=content, reasoning=reasoning), calls
    calls, rest = _find_calls(content, schemas)
    valid = _valid(calls)
    content = rest.strip() if valid else content
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=valid)
    return message, calls


def _find_calls(text: str, schemas: Schemas) -> tuple[Calls, str]:
    """Returns the calls, and the text around them with the malformed ones."""
    mark = MARK.search(text)
    limit = mark.start() if mark else len(text)
    if may_have_calls(text[:limit], schemas):
        bare, start = _read_bare(text, schemas, limit)
        if bare:
            return bare, text[:start]
    calls: Calls = []
    mentions: Calls = []
    pieces: list[str] = []
    position, malformed, most = 0, 0, most_failures(text)
    while mark and malformed < most:
        start = mark.end()
        reading, end = _read_at(mark, text, schemas)
        if isinstance(reading, str):
            malformed += 1
            (mentions if end == start else calls).append(ToolCallError(message=reading))
            following = text.find(mark[0], start)
            end = min(end, following) if following >= 0 else end
            pieces.append(text[position:end])
        else:
            calls += reading
            pieces.append(without_openings(text[position : mark.start()]))
            end = skip_closings(text, end)
        position = end
        mark = MARK.search(text, position)
    pieces.append(text[position:])
    if mark:
        calls.append(_UNREAD)
        warn_of_unread()
    if calls and not malformed:
        outer = [piece for piece in (pieces[0], pieces[-1]) if may_have_calls(piece, schemas)]
        unmarked = chain(*(_valid(_read_bare(piece, schemas, len(piece))[0]) for piece in outer))
        marked = [(call.name, call.arguments) for call in _valid(calls)]
        calls += [_without_mark(c) for c in unmarked if (c.name, c.arguments) not in marked]
    return calls or mentions, "".join(pieces)


def _read_bare(text: str, schemas: Schemas, limit: int) -> tuple[Calls, int]:
    from gspo_env.tools.bare import read_bare

    return read_bare(text, schemas, limit)


def _read_at(mark: re.Match[str], text: str, schemas: Schemas) -> Reading:
    """Reads the call or calls behind a mark."""
    close, family = MARKS.get(mark[0], ("", ""))
    start = skip_space(text, mark.end())
    if family == "hermes" and text.startswith(("{", "["), start):
        return read_enclosed(close, text, start)
    from gspo_env.tools.formats import read_family

    return read_family(mark, text, schemas)


def _without_mark(call: ToolCall) -> ToolCallError:
    """Returns the error of a call without a mark, which no marked call repeats."""
    message = f"the call of {call.name[:64]!r} needs the mark that the others have."
    return ToolCallError(message=message)
