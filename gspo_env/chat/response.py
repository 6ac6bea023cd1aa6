"""Parses actions of tokenizers that have a response template, with `transformers`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from gspo_env.chat.action import REASONING_KEYS, calls_for_template, name_and_arguments
from gspo_env.chat.encode import TextEncoder, drop_marks, map_texts
from gspo_env.tools.calls import parse_message
from gspo_env.tools.json_calls import to_calls
from gspo_env.types import Message, ToolCall

logger = logging.getLogger(__name__)

_BREAK = "\udffd"
"""Breaks the text of a control token for the response template; in no rendering."""


def parse_response(
    tokenizer: Any,
    encoder: TextEncoder,
    rendering: str,
    prompt_ids: Sequence[int],
    tools: Sequence[Any],
    in_reasoning: bool,
) -> dict[str, Any]:
    """Returns fields of `ParsedAction`; empty if it fails, as with a malformed call."""

    def to_text(rendering: str) -> str:
        return encoder.to_text(encoder.break_controls(rendering, _BREAK))

    def to_rendering(text: str) -> str:
        return drop_marks(encoder.to_rendering(text))

    prefix = to_text(encoder.decode_rendering(prompt_ids))
    try:
        schemas = [tool.schema for tool in tools]
        parts = tokenizer.parse_response(to_text(rendering), prefix=prefix, tools=schemas)
        content = to_rendering(parts.get("content") or "")
        reasoning = next((parts[key] for key in REASONING_KEYS if parts.get(key)), None)
        reasoning = None if reasoning is None else to_rendering(reasoning)
        text = encoder.to_text(rendering)
        text_calls = parse_message(text, tools, in_reasoning=in_reasoning)[0].tool_calls
        parsed_calls = map_texts(parts.get("tool_calls") or (), drop_marks)
        text_calls = text_calls or _read_calls(list(parsed_calls))
        calls = calls_for_template(Message(role="assistant", content="", tool_calls=text_calls))
        calls = map_texts(calls, to_rendering)
    except Exception as error:  # a library parses what a model wrote: anything may be raised
        logger.info("An action does not fit the response template: %s", error)
        return {}
    message = Message(
        role="assistant",
        content=encoder.to_text(content),
        reasoning=None if reasoning is None else encoder.to_text(reasoning),
        tool_calls=tuple(
            ToolCall(name=name, arguments=arguments)
            for name, arguments in map(name_and_arguments, map_texts(calls, encoder.to_text))
        ),
    )
    return {"content": content, "reasoning": reasoning, "calls": tuple(calls), "message": message}


def _read_calls(values: Sequence[Any]) -> tuple[ToolCall, ...]:
    """Returns calls in the form of JSON, as `transformers` parses them.

    Raises:
        ValueError: One is malformed.
    """
    calls = to_calls(list(values)) if values else []
    if isinstance(calls, str):
        raise ValueError(calls)
    return tuple(calls)
