"""An action as the program that requested it receives it."""

from __future__ import annotations

from collections.abc import Sequence

from gspo_env.errors import ConfigError
from gspo_env.tools.calls import parse_message, split_reasoning
from gspo_env.tools.tool import Tool
from gspo_env.types import Message, ToolCall


def read_action(
    text: str,
    tools: Sequence[Tool] = (),
    message: Message | None = None,
    *,
    in_reasoning: bool = False,
) -> tuple[Message, int]:
    """Returns an action as the program that requested it receives it.

    A program that offers no tools gets text. So does a program whose strict tools a call does not
    fit: the policy is not constrained, and the program is promised that calls fit.

    Args:
        text: See `gspo_env.tools.calls.parse_tool_calls`.
        tools: The tools that the request offers.
        message: See `parse_tool_calls`.
        in_reasoning: See `parse_tool_calls`.

    Returns:
        The assistant's message, and the number of malformed calls.
    """
    if not tools:
        has_none = message is not None and not message.tool_calls
        return (message if has_none and message else _as_text(text, in_reasoning)), 0
    parsed, malformed = parse_message(text, tools, in_reasoning=in_reasoning)
    if message is None or (parsed.tool_calls and not message.tool_calls):
        message = parsed
    elif message.tool_calls and not parsed.tool_calls:
        malformed = 0
    strict = {tool.name: tool for tool in tools if tool.strict}
    invalid = sum(
        not _is_valid(strict[call.name], call) for call in message.tool_calls if call.name in strict
    )
    return (_as_text(text, in_reasoning) if invalid else message), malformed + invalid


def _as_text(text: str, in_reasoning: bool) -> Message:
    reasoning, content = split_reasoning(text, in_reasoning)
    return Message(role="assistant", content=content or "", reasoning=reasoning)


def _is_valid(tool: Tool, call: ToolCall) -> bool:
    try:
        tool.validate(call.arguments)
    except ConfigError:
        return False
    return True
