"""What a sampled action says as a message, and whether a message of a conversation is that action.

`transformers` parses actions of tokenizers that have a response template. Of others, the reasoning
is what stands before `</think>`, and calls stay text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_env.chat.cache import BoundedCache
from gspo_env.chat.encode import Literal
from gspo_env.types import Message, ToolCall

logger = logging.getLogger(__name__)

_CACHE = 1 << 24
"""Bytes of the actions that are kept with their texts."""
_END_OF_REASONING = "</think>"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_MARKUP = re.compile(r"\s*[^\w\s.,;:!?'()\"]")
"""What begins a call behind the content of a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """A sampled action in the form in which a template takes messages.

    All texts but `shown` are literal: see `gspo_env.chat.encode`.
    """

    literal: str
    """The whole action, its end included."""
    text: str
    """The action without its end."""
    shown: str
    """The same as text that is not literal."""
    content: str
    reasoning: str | None = None
    calls: tuple[dict[str, Any], ...] = ()
    """The calls in the form of templates."""
    message: Message | None = None
    """The action as the environment gets it; None if no response template has parsed it."""
    texts: Literal = field(repr=False)

    def spoken(self) -> dict[str, Any]:
        """Returns the action as a message for the template."""
        return _spoken(self.content, self.reasoning, self.calls)

    def recognise(self, message: Message) -> dict[str, Any] | None:
        """Returns a message for the template if `message` is this action, else None.

        It is if content and calls are equal; the reasoning may be absent.
        """
        given = message.content
        if not message.tool_calls and message.reasoning is None and given == self.shown:
            return self.spoken()
        reasoning = None if self.reasoning is None else self.texts.show(self.reasoning)
        if message.reasoning is not None and message.reasoning.strip() != (reasoning or "").strip():
            return None
        content = self.texts.show(self.content)
        if not message.tool_calls:
            place = content.find(given) if given.strip() == content.strip() else -1
            if place < 0 or self.calls:
                return None
            return _spoken(self.content[place : place + len(given)], self.reasoning, ())
        if self.calls:
            same = [_call(c) for c in self.texts.show_tree(self.calls)]
            if given.strip() != content.strip() or same != [_key(c) for c in message.tool_calls]:
                return None
            return _spoken(
                self.texts.hide(given), self.reasoning, self.texts.hide_tree(calls_of(message))
            )
        if not _contains(content, given, message.tool_calls):
            return None
        return _spoken(
            self.texts.hide(given), self.reasoning, self.texts.hide_tree(calls_of(message))
        )


def _spoken(content: str, reasoning: str | None, calls: Sequence[Any]) -> dict[str, Any]:
    spoken: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        spoken |= dict.fromkeys(_REASONING_KEYS, reasoning)
    return spoken | ({"tool_calls": list(calls)} if calls else {})


def message_for_template(message: Message, texts: Literal) -> dict[str, Any]:
    """Returns a message that nobody sampled in the form in which templates take messages."""
    content, hide = texts.hide(message.content), texts.hide
    if message.role == "assistant":
        reasoning = None if message.reasoning is None else hide(message.reasoning)
        return _spoken(content, reasoning, texts.hide_tree(calls_of(message)))
    names = {"tool_call_id": message.tool_call_id, "name": message.name}
    given = {key: hide(value) for key, value in names.items() if value is not None}
    return {"role": message.role, "content": content, **given}


def calls_of(message: Message) -> list[dict[str, Any]]:
    """Returns the calls of a message in the form of templates."""
    return [
        {
            "type": "function",
            **({"id": call.id} if call.id else {}),
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]


class Parser:
    """Parses sampled actions.

    Args:
        tokenizer: The tokenizer, whose response template is used if it has one.
        texts: Its literal texts.
        splits: Whether the chat template takes reasoning apart from the content.
    """

    def __init__(self, tokenizer: Any, texts: Literal, *, splits: bool) -> None:
        self._tokenizer, self._texts, self._splits = tokenizer, texts, splits
        self._read = BoundedCache(self._read_text, _CACHE)
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
        ids = tuple(action_ids)
        ended = bool(ids) and ids[-1] in stop_ids
        saying = self._read(ids, ended, stop)
        if not self._has_schema:
            return saying
        whole = saying.literal if ended else saying.text
        return replace(saying, **self._by_schema(whole, prompt_ids, tools))

    def _read_text(self, ids: tuple[int, ...], ended: bool, stop: tuple[str, ...]) -> ParsedAction:
        """Reads an action without a response template."""
        text, literal = self._decode(ids, ended)
        places = [p for p in (text.find(self._texts.hide(word)) for word in stop) if p >= 0]
        text = text[: min(places)] if places else text
        shown = self._texts.show(text)
        return ParsedAction(
            literal=literal, text=text, shown=shown, texts=self._texts, **self._by_tag(text)
        )

    def _decode(self, ids: tuple[int, ...], ended: bool) -> tuple[str, str]:
        """Returns the literal text of an action without its end, and with it."""
        text = self._texts.decode(ids[:-1] if ended else ids)
        if not ended:
            return text, text
        # a control token is decoded apart from what is before it
        control = self._texts.text.controls.get(ids[-1])
        return text, self._texts.decode(ids) if control is None else text + control.content

    def _by_tag(self, text: str) -> dict[str, Any]:
        before, tag, behind = text.partition(_END_OF_REASONING)
        if not tag or not self._splits:
            return {"content": text}
        before = before.rpartition("<think>")[2]
        return {"content": behind.lstrip("\n"), "reasoning": before.strip("\n")}

    def _by_schema(
        self, literal: str, prompt_ids: Sequence[int], tools: Sequence[Any]
    ) -> dict[str, Any]:
        """Parses with the response template; empty if it fails, as with a malformed call."""
        prefix = self._texts.decode(prompt_ids)
        try:
            schemas = [tool.schema for tool in tools]
            found = self._tokenizer.parse_response(literal, prefix=prefix, tools=schemas)
            content = found.get("content") or ""
            reasoning = next((found[k] for k in _REASONING_KEYS if found.get(k)), None)
            calls = tuple(_normal(call) for call in found.get("tool_calls") or ())
            shown = self._texts.show_tree(list(calls))
            message = Message(
                role="assistant",
                content=self._texts.show(content),
                reasoning=None if reasoning is None else self._texts.show(reasoning),
                tool_calls=tuple(
                    ToolCall(name=c["function"]["name"], arguments=c["function"]["arguments"])
                    for c in shown
                ),
            )
        except Exception as error:  # a library parses what a model wrote: anything may be raised
            logger.info("An action does not fit the response template: %s", error)
            return {}
        return {"content": content, "reasoning": reasoning, "calls": calls, "message": message}


def _normal(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call in the form of templates.

    Raises:
        TypeError: It has no name, or its arguments are not an object.
    """
    inner = call.get("function", call)
    name, arguments = inner.get("name"), inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError(f"a call is {str(call)[:100]!r}; expected a name and arguments")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _call(call: Mapping[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], call["function"]["arguments"]


def _key(call: ToolCall) -> tuple[str, Any]:
    return call.name, call.arguments


def _contains(text: str, content: str, calls: Sequence[ToolCall]) -> bool:
    """Returns whether an action's text has this content and, behind it, these calls."""
    text, content = text.strip(), content.strip()
    if not text.startswith(content):
        return False
    rest = text[len(content) :]
    if not _MARKUP.match(rest):
        return False
    for call in calls:
        for piece in [call.name, *_leaves(call.arguments)]:
            if piece not in rest and json.dumps(piece, ensure_ascii=False)[1:-1] not in rest:
                return False
    return True


def _leaves(tree: Any) -> list[str]:
    if isinstance(tree, dict):
        return [leaf for key, one in tree.items() for leaf in [str(key), *_leaves(one)]]
    if isinstance(tree, (list, tuple)):
        return [leaf for one in tree for leaf in _leaves(one)]
    return [tree if isinstance(tree, str) else json.dumps(tree)]
