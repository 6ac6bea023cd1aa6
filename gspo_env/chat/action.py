"""Parses sampled actions into messages, and recognizes them in later conversations.

`transformers` parses the actions of tokenizers that have a response template. For all others, the
reasoning is what stands before `</think>`, and tool calls stay text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_env.chat.encode import BoundedCache, TextEncoder, map_texts
from gspo_env.redaction import clean
from gspo_env.tools.calls import MOST_THOUGHTS, REASONING
from gspo_env.types import Message

_CACHE_BYTES = 1 << 24
_TAIL = 12
"""Ids at the end of a prompt that hold the mark of reasoning, also where it is plain text."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The keys under which templates take the reasoning of a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """A sampled action as the parts that a chat template takes.

    All texts but `text` are renderings; see `gspo_env.chat.encode`.
    """

    rendering: str
    """The whole action, its end included."""
    body: str
    """The action without its end and without stop texts."""
    text: str
    """The same as text."""
    content: str
    reasoning: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    """The calls in the form of templates."""
    message: Message | None = None
    """The action as the environment gets it; None if no response template has parsed it."""
    in_reasoning: bool = False
    """Whether the prompt has opened the reasoning."""
    stop_text: str | None = None
    """The stop text that ended it."""
    encoder: TextEncoder = field(repr=False)

    def for_template(self) -> dict[str, Any]:
        """Returns the action as a message for the template."""
        return _assistant(self.content, self.reasoning, self.calls)

    def recognize(self, message: Message, parsed: Message) -> dict[str, Any] | None:
        """Returns a message for the template if `message` is this action, else None.

        It is if content and calls are equal; the reasoning may be absent.

        Args:
            message: The message.
            parsed: The action as the reader of tool calls parses its text.
        """
        text = message.content
        if not message.tool_calls and not message.reasoning and text == self.text:
            return self.for_template()
        reasoning = self.encoder.to_text(self.reasoning or "") or parsed.reasoning or ""
        if message.reasoning and message.reasoning.strip() != reasoning.strip():
            return None
        content = self.encoder.to_text(self.content)
        if not message.tool_calls:
            start = content.find(text) if text.strip() == content.strip() else -1
            if start < 0 or self.calls:
                return None
            end = len(self.content) - (len(content) - start - len(text))
            return _assistant(self.content[start:end], self.reasoning, ())
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        if self.calls:
            sampled = map_texts(self.calls, self.encoder.to_text)
            same_calls = calls == [name_and_arguments(call) for call in sampled]
            is_same = same_calls and text.strip() == content.strip()
        else:
            same_calls = calls == [(call.name, call.arguments) for call in parsed.tool_calls]
            is_same = same_calls and text.strip() == parsed.content.strip()
        if not is_same:
            return None
        return _assistant(clean(text), self.reasoning, calls_for_template(message))


def message_for_template(message: Message) -> dict[str, Any]:
    """Returns a message that nobody sampled in the form in which templates take messages."""
    content = clean(message.content)
    if message.role == "assistant":
        reasoning = None if message.reasoning is None else clean(message.reasoning)
        return _assistant(content, reasoning, calls_for_template(message))
    names = {"tool_call_id": message.tool_call_id, "name": message.name}
    present = {key: clean(value) for key, value in names.items() if value is not None}
    return {"role": message.role, "content": content, **present}


def calls_for_template(message: Message) -> list[dict[str, Any]]:
    """Returns the calls of a message in the form of templates."""
    calls = [
        {
            "type": "function",
            **({"id": call.id} if call.id else {}),
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    return list(map_texts(calls, clean))


def name_and_arguments(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns what a call in the form of templates says."""
    return call["function"]["name"], call["function"]["arguments"]


def _assistant(content: str, reasoning: str | None, calls: Sequence[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message |= dict.fromkeys(REASONING_KEYS, reasoning)
    return message | ({"tool_calls": list(calls)} if calls else {})


class ActionParser:
    """Parses sampled actions.

    Args:
        tokenizer: The tokenizer, whose response template is used if it has one.
        encoder: Its text encoder.
        splits_reasoning: Whether the chat template separates the reasoning from the content.
    """

    def __init__(self, tokenizer: Any, encoder: TextEncoder, *, splits_reasoning: bool) -> None:
        self._tokenizer, self._encoder = tokenizer, encoder
        self.splits_reasoning = splits_reasoning
        self._cached = BoundedCache(self._parse_text, _CACHE_BYTES)
        self._opens_reasoning = BoundedCache(self._opens, _CACHE_BYTES)
        self._has_schema = getattr(tokenizer, "response_template", None) is not None

    def parse(
        self,
        action_ids: Sequence[int],
        stop_ids: Sequence[int],
        prompt_ids: Sequence[int],
        tools: Sequence[Any],
        stop: tuple[str, ...] = (),
    ) -> ParsedAction:
        """Parses an action.

        Args:
            action_ids: The sampled ids.
            stop_ids: Ids that end an action.
            prompt_ids: The last ids before it, the start of the assistant's message included.
            tools: The tools, whose types the arguments of calls get.
            stop: Texts that end it and are not part of its content.
        """
        has_end = bool(action_ids) and action_ids[-1] in stop_ids
        is_open = self._opens_reasoning(tuple(prompt_ids[-_TAIL:]))
        action = self._cached(tuple(action_ids), has_end, stop, is_open)
        if not self._has_schema:
            return action
        text = action.rendering if has_end else action.body
        from gspo_env.chat.response import parse_response

        parts = parse_response(self._tokenizer, self._encoder, text, prompt_ids, tools, is_open)
        return replace(action, **parts)

    def _opens(self, prompt_ids: tuple[int, ...]) -> bool:
        """Returns whether a prompt ends with the start of the reasoning."""
        return self._encoder.decode(prompt_ids).rstrip().endswith(tuple(REASONING))

    def _parse_text(
        self, ids: Sequence[int], has_end: bool, stop: tuple[str, ...], is_open: bool
    ) -> ParsedAction:
        """Parses an action without a response template."""
        encoder = self._encoder
        body = rendering = encoder.decode_rendering(ids[:-1] if has_end else ids)
        if has_end and ids[-1] in encoder.controls:
            # a control token is decoded apart from what is before it
            rendering = body + encoder.decode_rendering(ids[-1:])
        elif has_end:
            rendering = encoder.decode_rendering(ids)
        places = [(body.find(text), text) for text in stop if text in body]
        place, stop_text = min(places, default=(len(body), None))
        body = body[:place]
        content, opened = body, is_open
        reasoning: str | None = None
        start, end = map(encoder.to_rendering, ("<think>", "</think>"))
        for _ in range(MOST_THOUGHTS if self.splits_reasoning else 0):
            if end not in content or not (opened or content.lstrip().startswith(start)):
                break
            thought, _, rest = content.partition(end)
            thoughts = [reasoning, thought.rpartition(start)[2].strip("\n")]
            content, reasoning = rest.lstrip("\n"), "\n".join(filter(None, thoughts))
            opened = False
        return ParsedAction(
            rendering=rendering,
            body=body,
            text=encoder.to_text(body),
            content=content,
            reasoning=reasoning,
            in_reasoning=is_open,
            stop_text=stop_text,
            encoder=encoder,
        )
