"""Renders conversations with a tokenizer's chat template, as token ids.

A conversation of given roles is rendered once with markers in place of its texts. What the template
wrote around the markers is glue: its control tokens become ids directly. Glue text and message
texts together are encoded by `PlainText`, so a message cannot produce a control token.

    <|im_start|> system / SYSTEM <|im_end|> / <|im_start|> user / OBSERVATION <|im_end|> /
    └── id ────┘ └── one text ──┘└── id ──┘   └── id ────┘ └─── one text ───┘└── id ──┘

A template may change the ends of a message: many strip white space, some write JSON strings. A
second rendering with known texts shows what it does to each message.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from gspo_env.chat.bounds import BoundedTemplate, check_template
from gspo_env.chat.cache import BoundedCache
from gspo_env.chat.plain_text import PlainText
from gspo_env.chat.schemas import Chat, Schemas, hide_controls, list_tools
from gspo_env.chat.slots import HEAD, TAIL, Part, Parts, Shape, Slot, Text, read_slots
from gspo_env.env.base import clean
from gspo_env.errors import ChatTemplateError

logger = logging.getLogger(__name__)

_CACHE = 1 << 25
"""Bytes of the layouts that are kept."""


class ChatTemplate:
    """Renders conversations as ids in which no text is a control token.

    Raises:
        ChatTemplateError: The tokenizer has no chat template or is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "the tokenizer has no chat template, which multi-turn prompts need: set "
                "`tokenizer.chat_template` or use an instruction-tuned model"
            )
        check_template(tokenizer.chat_template)
        self.tokenizer = tokenizer
        self.text = PlainText(tokenizer)
        # nobody can guess the markers, so no tool description contains one
        self._nonce = f"{secrets.randbits(64):020d}"
        self.layout = BoundedCache(self._layout, _CACHE)
        self._filled = BoundedCache(self._fill_first, _CACHE)
        self._said: set[str] = set()

    def ids(self, messages: Chat, schemas: Schemas = (), *, generation: bool = True) -> list[int]:
        """Returns the ids of a conversation.

        A system message that the template refuses goes before the first user message, tools that it
        does not show are listed in the system message, and the role `tool`, if refused, is `user`.

        Args:
            messages: The conversation.
            schemas: The tools.
            generation: Whether the start of the assistant's next message follows.

        Raises:
            ChatTemplateError: The template refuses the messages, or drops or repeats one.
        """
        try:
            fitted, shown = self._fit(messages, schemas)
            return self._ids(fitted, shown, generation)
        except ChatTemplateError as error:
            if not schemas or not self.shows_tools:
                raise
            self._say(f"cannot show these tools ({error}); the system message lists them")
            return self._ids(self._fit(list_tools(messages, schemas), ())[0], (), generation)

    def literal(self, messages: Chat, schemas: Schemas = (), *, generation: bool = True) -> str:
        """Returns a conversation as the template renders it; see `gspo_env.chat.encode`.

        What the template does not accept is changed as in `ids`; calls that it does not show are
        written behind the content, as Hermes does.

        Args:
            messages: Literal messages, which may have calls and reasoning.
            schemas: The tools, as literal texts.
            generation: Whether the start of the assistant's next message follows.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        if any(m.get("tool_calls") for m in messages) and not self.shows_calls:
            self._say("does not show calls; the content of their messages ends with them")
            messages = [_with_calls(m) if m.get("tool_calls") else m for m in messages]
        try:
            fitted, shown = self._fit(messages, schemas)
            return self.render(fitted, shown, generation=generation)
        except ChatTemplateError as error:
            if not schemas or not self.shows_tools:
                raise
            self._say(f"cannot show these tools ({error}); the system message lists them")
            fitted, _ = self._fit(list_tools(messages, schemas), ())
            return self.render(fitted, generation=generation)

    def fill(self, parts: Parts, texts: Sequence[str], *, first: bool = False) -> list[int]:
        """Returns the ids of a layout with these texts in its slots.

        Args:
            parts: The layout.
            texts: The text of each slot, by `Slot.index`.
            first: Whether the sequence starts with the first part.
        """
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self.text.encode(part.show(texts), first=first)
            first = False
        return ids

    def split(self, text: str, slots: Sequence[Slot], foreign: Mapping[int, str]) -> Parts:
        """Splits a rendering at its control tokens and markers, as the tokenizer does.

        Args:
            text: The rendering.
            slots: The slots of the markers.
            foreign: Characters of tools that were replaced, by their replacement.
        """
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        cuts = [
            (i, *span)
            for i, span in zip(found["input_ids"], found["offset_mapping"], strict=True)
            if i in self.text.controls
        ]
        by_marker = {self.marker(slot.index): slot for slot in slots}
        pattern = f"({'|'.join(by_marker)})" if by_marker else r"(?!)"
        parts: list[Part] = []
        end, before = 0, None
        for control, start, stop in [*cuts, (None, len(text), len(text))]:
            behind = self.text.controls.get(control)
            pieces = [p for p in re.split(pattern, text[end:start]) if p]
            if pieces:
                part = Text(
                    pieces=tuple(by_marker.get(p) or p.translate(foreign) for p in pieces),
                    left=before is not None and before.rstrip,
                    right=behind is not None and behind.lstrip,
                )
                parts.append(part)
            if control is not None:
                parts.append(control)
            end, before = stop, behind
        return tuple(parts)

    def marker(self, index: int) -> str:
        """Returns the text that stands for a message."""
        return f"GSPOENV{self._nonce}MARK{index:06d}"

    def render(self, messages: Chat, schemas: Schemas = (), *, generation: bool = True) -> str:
        """Returns the text of a conversation.

        Raises:
            ChatTemplateError: The template raises, or runs too many lines.
        """
        names = {**self.tokenizer.special_tokens_map, "documents": None}
        chat = [dict(message) for message in messages]
        tools = list(schemas) or None
        try:
            template = _compiled(self.tokenizer.get_chat_template(tools=tools))
            return template.render(
                messages=chat, tools=tools, add_generation_prompt=generation, **names
            )
        except Exception as error:
            roles = "messages of " + ", ".join(message["role"] for message in messages)
            raise ChatTemplateError(f"the chat template refuses {roles}: {error}") from error

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template lists tools."""
        name = self.marker(0)
        parameters = {"type": "object", "properties": {}, "required": []}
        function = {"name": name, "description": "x", "parameters": parameters}
        schema = {"type": "function", "function": function}
        try:
            return name in self.render(_chat(self._fitting_roles("system", "user")), [schema])
        except ChatTemplateError:
            return False

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows the calls of an assistant's message."""
        name = self.marker(0)
        call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": {}}}
        chat: list[dict[str, Any]] = [dict(m) for m in _chat(("user", "assistant", "user"))]
        chat[1] |= {"tool_calls": [call]}
        for content in ("x", ""):
            chat[1]["content"] = content
            for follow in ({"role": "tool", "tool_call_id": "call00000", "name": name}, {}):
                chat[2] = {"role": "user", "content": "x", **follow}
                try:
                    if name in self.render(chat):
                        return True
                except ChatTemplateError:
                    continue
        return False

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template accepts a system message."""
        return self.accepts("system", "user")

    @cached_property
    def takes_tool_role(self) -> bool:
        """Whether the template accepts a message of the role `tool` after an action."""
        return self.accepts("user", "assistant", "tool")

    def accepts(self, *roles: str) -> bool:
        """Returns whether the template shows messages of these roles."""
        try:
            self.layout(Shape(roles=roles))
        except ChatTemplateError as error:
            logger.info("%s", error)
            return False
        return True

    def slots(self, shape: Shape, schemas: Any) -> tuple[str, list[Slot]]:
        """Returns a rendering with markers, and its slots in order.

        Raises:
            ChatTemplateError: A message is dropped or repeated.
        """
        places = [n for n in range(len(shape.roles)) if n not in shape.empty]
        marked = [self.marker(n) if n in places else "" for n in range(len(shape.roles))]
        text = self._render_shape(shape, marked, schemas)
        if any(text.count(self.marker(n)) != 1 for n in places):
            raise ChatTemplateError(
                f"the chat template drops or repeats a message of {', '.join(shape.roles)}; it has "
                "to show each message once"
            )
        places.sort(key=lambda n: text.index(self.marker(n)))
        probe = [f"{HEAD}{marker}{TAIL}" if marker else "" for marker in marked]
        pattern = "|".join(map(self.marker, places)) or r"(?!)"
        glue = re.split(pattern, text)
        changed = re.split(pattern, self._render_shape(shape, probe, schemas))
        slots = read_slots(places, glue, changed) if len(glue) == len(changed) else None
        if slots is None:
            self._say(
                "changes the text of messages otherwise than at its ends; they stay unchanged"
            )
            slots = [Slot(index=n) for n in places]
        return text, slots

    def _ids(self, messages: Chat, schemas: Schemas, generation: bool) -> list[int]:
        texts = [message["content"] for message in messages]
        shape = Shape(
            roles=tuple(message["role"] for message in messages),
            schemas=clean(json.dumps(list(schemas), ensure_ascii=False)),
            generation=generation,
        )
        return list(self._filled(shape, tuple(texts)))

    def _fill_first(self, shape: Shape, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the ids of a conversation, with which a sequence begins."""
        return tuple(self.fill(self.with_empty(shape, texts, self.layout), texts, first=True))

    def with_empty(
        self, shape: Shape, texts: Sequence[str], layout: Callable[[Shape], Parts]
    ) -> Parts:
        """Returns the layout in which the messages that show nothing are empty.

        Stripping an empty message may also strip the glue beside it.
        """
        parts = layout(shape)
        empty = {
            slot.index
            for part in parts
            if isinstance(part, Text)
            for slot in part.pieces
            if isinstance(slot, Slot) and not slot.show(texts[slot.index])
        }
        if not empty:
            return parts
        try:
            return layout(replace(shape, empty=frozenset(empty)))
        except ChatTemplateError:  # a template may refuse empty messages
            return parts

    def _layout(self, shape: Shape) -> Parts:
        contents = [token.content for token in self.text.controls.values()]
        schemas, foreign = hide_controls(shape.schemas, contents, self.text.normalize)
        text, slots = self.slots(shape, schemas)
        return self.split(text, slots, foreign)

    def _render_shape(self, shape: Shape, texts: Sequence[str], schemas: Schemas) -> str:
        chat = [
            {"role": role, "content": text} for role, text in zip(shape.roles, texts, strict=True)
        ]
        return self.render(chat, schemas, generation=shape.generation)

    def _fit(self, messages: Chat, schemas: Schemas) -> tuple[Chat, Schemas]:
        """Returns messages and tools that the template accepts."""
        if schemas and not self.shows_tools:
            messages, schemas = list_tools(messages, schemas), ()
        if messages[0]["role"] == "system" and not self.takes_system:
            self._say("refuses system messages; the first user message begins with the system text")
            messages = _folded(messages)
        if any(m["role"] == "tool" for m in messages) and not self.takes_tool_role:
            messages = [{**m, "role": "user"} if m["role"] == "tool" else m for m in messages]
        return messages, schemas

    def _fitting_roles(self, *roles: str) -> tuple[str, ...]:
        return roles if self.takes_system else roles[1:]

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("The chat template %s.", what)


_compiled = lru_cache(16)(BoundedTemplate)


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the calls of a message behind its content."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    lines = [message["content"], *(f"<tool_call>{call}</tool_call>" for call in calls)]
    left_out = {"tool_calls", "content"}
    others = {key: value for key, value in message.items() if key not in left_out}
    return {**others, "content": "\n".join(filter(None, lines))}


def _folded(messages: Chat) -> Chat:
    """Moves the system text to the start of the first user message."""
    system, *others = messages
    if not others or others[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *others]
    text = "\n\n".join(filter(None, (system["content"], others[0]["content"])))
    return [{**others[0], "content": text}, *others[1:]]


def _chat(roles: Sequence[str]) -> Chat:
    return [{"role": role, "content": "x"} for role in roles]
