"""Converts messages to token ids, and sampled ids to text and messages.

Sampled ids are never decoded and tokenised again to be trained on. `gspo_env.chat.template`
encodes text, so that it cannot become a control token; `gspo_env.chat.conversation` decides
which turn a prompt continues.
"""

from __future__ import annotations

import logging
import re
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import nodes

from gspo_env.chat.action import Parser
from gspo_env.chat.bounds import parser
from gspo_env.chat.cache import BoundedCache
from gspo_env.chat.encode import Literal
from gspo_env.chat.slots import Parts, Shape, Slot, Text
from gspo_env.chat.template import ChatTemplate
from gspo_env.errors import ChatTemplateError
from gspo_env.types import Prompt

logger = logging.getLogger(__name__)

History = typing.Literal["template", "keep", "refuse"]

_CACHE = 1 << 24
"""Bytes of the observations that are kept with their ids."""
_FIRST, _ACTION, _NEXT = range(3)
"""Places of the messages in the conversation that shows how a turn is added."""


class ChatTokenizer:
    """Turns observations into token ids that extend a transcript, and sampled ids into text.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        history: The prompt of a later turn: what the template renders for the conversation
            ("template"); or always the earlier turns as they were sampled ("keep"), where a
            template that changes them can be an error ("refuse").

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or its template cannot be
            extended turn by turn, or does not begin the assistant's message.
    """

    def __init__(self, tokenizer: Any, *, history: History = "template") -> None:
        self.tokenizer, self.history = tokenizer, history
        self.template = ChatTemplate(tokenizer)
        self.literal = Literal(self.template.text)
        source = str(tokenizer.chat_template)
        splits = "reasoning" in source or "thinking" in source
        self.parser = Parser(tokenizer, self.literal, splits=splits)
        self._following = BoundedCache(self._follow, _CACHE)
        self._after = lru_cache(8)(self._after_action)
        self._turn = {"user": Shape(roles=("user", "assistant", "user"))}
        tool = Shape(roles=("user", "assistant", "tool"))
        self._after(self._turn["user"])
        with suppress(ChatTemplateError):  # then a tool's result is a user message
            self._after(tool)
            self._turn["tool"] = tool
        self.end_of_turn = _split_end(self._after(self._turn["user"]))[0]
        self._check_start()
        self._rewriting = self._rewrites()
        self._check_history()
        self._check_markers()

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an action: the template's ends of turn, the end of sequence."""
        ends = {_split_end(self._after(shape))[0] for shape in self._turn.values()}
        ids = ends | {self.tokenizer.eos_token_id}
        return tuple(sorted(i for i in ids if i is not None))

    def start(self, observation: str, prompt: Prompt | None = None) -> tuple[int, ...]:
        """Returns the ids of the first prompt.

        Args:
            observation: The observation of `reset`.
            prompt: What precedes the observation; the system prompt lists the tools if the template
                does not.
        """
        prompt = prompt or Prompt()
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        if prompt.system is not None:
            messages.insert(0, {"role": "system", "content": prompt.system})
        messages.append({"role": "user", "content": observation})
        return tuple(self.template.ids(messages, [tool.schema for tool in prompt.tools]))

    def follow(self, observation: str, last_id: int, role: str = "user") -> tuple[int, ...]:
        """Returns the ids that follow an action whose last sampled id is `last_id`."""
        return self._following(observation, last_id, role)

    def _follow(self, observation: str, last_id: int, role: str) -> tuple[int, ...]:
        shape, texts = self._turn.get(role, self._turn["user"]), ("", "", observation)
        parts = self.template.with_empty(shape, texts, self._after)
        end, rest = _split_end(parts)
        return tuple(self.template.fill(rest if end == last_id else parts, texts))

    def follow_messages(self, messages: Sequence[dict[str, Any]], last_id: int) -> list[int]:
        """Returns the ids of literal messages that follow an action whose last id is `last_id`."""
        talk = [self._message("user", _FIRST), self._message("assistant", _ACTION), *messages]
        rest = self.template.literal(talk).partition(self.template.marker(_ACTION))[2]
        ids = self.literal.encode(rest)
        same = self.end_of_turn == last_id and last_id in ids[:2]
        return ids[ids.index(last_id) + 1 :] if same else ids

    @cached_property
    def appends(self) -> bool:
        """Whether the template only appends what `follow` gives, whatever was said before.

        It is tried with conversations of a few turns. Texts that the template itself looks for, and
        ends of texts that it strips, are the business of `is_plain`.
        """
        if self._rewriting is not None:
            return False
        try:
            return all(self._appends(role, system) for role in self._turn for system in ("", "s"))
        except ChatTemplateError:
            return False

    def _appends(self, role: str, system: str) -> bool:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "stone"}]
        if system:
            talk.insert(0, {"role": "system", "content": system})
        end = self.end_of_turn
        if end is None:
            return False
        ids = self.literal.encode(self.template.literal(talk), first=True)
        for n in range(3):
            said = self.encode(f"birch {n}")
            talk += [{"role": "assistant", "content": self.decode_all(said)}]
            ids += [*said, end, *self.follow(f"river {n}", end, role)]
            talk += [{"role": role, "content": f"river {n}"}]
            rendered = self.template.literal(talk)
            if self.literal.decode(ids) != rendered and (
                self.literal.encode(rendered, first=True) != ids
            ):
                return False
        return True

    @cached_property
    def _looked_for(self) -> re.Pattern[str]:
        """Finds texts with which the template compares the texts of messages."""
        found = constants(self.tokenizer.chat_template)
        return re.compile("|".join(map(re.escape, sorted(found))) or r"(?!)")

    @cached_property
    def _slots(self) -> dict[int, Slot]:
        _, slots = self.template.slots(self._turn["user"], ())
        return {slot.index: slot for slot in slots}

    def is_plain(self, action: str, observation: str) -> bool:
        """Returns whether the template shows an earlier action unchanged, next to any text."""
        if self._looked_for.search(action) or self._looked_for.search(observation):
            return False
        return bool(action) and self._slots[_ACTION].show(action) == action

    def ends(self, stop: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        """Returns whether sampled ids have one of these texts at their end; None without texts."""
        if not stop:
            return None
        # every id but a few has at least one byte of the text
        window = max(len(text.encode()) for text in stop) + 8

        def ended(ids: Sequence[int]) -> bool:
            tail = self.decode_all(ids[-window:])
            return any(text in tail for text in stop)

        return ended

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of plain text; no control token is among them."""
        return self.template.text.encode(text)

    def decode(self, action_ids: Sequence[int]) -> str:
        """Returns the text of an action, without the id that ended it."""
        ids = tuple(action_ids)
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        return self.decode_all(ids)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of any ids, including control tokens."""
        return self.template.text.decode(ids)

    def _after_action(self, shape: Shape) -> Parts:
        """Returns what follows an action: its end, the next message, the next action's start."""
        first, action, following = map(self.template.marker, range(3))
        text, slots = self.template.slots(shape, ())
        before, _, tail = text.partition(action)
        if first not in before or following in before:
            raise ChatTemplateError(
                "the chat template moves messages when a turn is added, so a transcript cannot be "
                "extended token by token; use a template that only appends"
            )
        return self.template.split(tail, [s for s in slots if s.index == _NEXT], {})

    def _check_start(self) -> None:
        """Detects templates that leave the header of an action to the model.

        Raises:
            ChatTemplateError: The template ignores `add_generation_prompt` and needs it.
        """
        user, action = self._message("user", _FIRST), self._message("assistant", _ACTION)
        prompt = self.template.render([user])
        if prompt != self.template.render([user], generation=False):
            return
        header = self.template.render([user, action]).partition(action["content"])[0]
        header = header.removeprefix(prompt) if header.startswith(prompt) else ""
        if header.strip():
            raise ChatTemplateError(
                "the chat template has no generation prompt: it writes the same with and without "
                f"`add_generation_prompt`; expected {header!r} at the end with it"
            )

    def _check_history(self) -> None:
        """Detects templates that render an earlier turn differently from how it was sampled."""
        reason = self._rewriting
        if reason is None:
            return
        if self.history == "template":
            logger.info("The chat template rewrites history (%s): turns begin sequences.", reason)
            return
        if self.history == "refuse":
            raise ChatTemplateError(f"the chat template rewrites history: {reason}")
        logger.warning(
            "The chat template rewrites history (%s); transcripts keep every turn as sampled, so "
            "the model is trained on other prompts than it is served with. Set history='template' "
            "to train on those, or history='refuse' to make this an error.",
            reason,
        )

    def _rewrites(self) -> str | None:
        user, later = self._message("user", _FIRST), self._message("user", _NEXT)
        prompt, action = self.template.render([user]), self._message("assistant", _ACTION)
        text = self.template.render([user, action, later])
        if not _same_start(text.partition(action["content"])[0], prompt):
            return "it changes the start of an action once the turn is over"
        reasoning = self.template.marker(3)
        thought = {**action, "content": f"<think>\n{reasoning}\n</think>\n\n{action['content']}"}
        if reasoning not in self.template.render([user, thought, later]):
            return "it drops the reasoning of earlier turns"
        return None

    def _check_markers(self) -> None:
        """Detects templates whose roles are marked by text, which a message can contain too."""
        parts = self._after(self._turn["user"])
        holds = (
            isinstance(part, Text) and any(isinstance(piece, Slot) for piece in part.pieces)
            for part in parts
        )
        place = list(holds).index(True)
        ends = {self.tokenizer.eos_token_id, self.tokenizer.bos_token_id}
        before = {p for p in parts[:place] if isinstance(p, int)} - ends
        behind = {p for p in parts[place:] if isinstance(p, int)} - ends - {self.end_of_turn}
        if not (before and behind):
            logger.warning(
                "The chat template marks who speaks by plain text, not by control tokens: a text "
                "that contains the same words can pretend to be another turn."
            )

    def _message(self, role: str, place: int) -> dict[str, str]:
        return {"role": role, "content": self.template.marker(place)}


def constants(template: Any) -> set[str]:
    """Returns the texts with symbols in the expressions of a template, such as `</think>`."""
    texts = template.values() if isinstance(template, dict) else [template]
    found: set[str] = set()
    for text in map(str, texts):
        for node in parser().parse(text).find_all(nodes.Const):
            if isinstance(node.value, str) and re.search(r"[^\w\s]", node.value):
                found.add(node.value.strip())
    return found


def _split_end(parts: Parts) -> tuple[int | None, Parts]:
    """Returns the control token that ends an action, if one does, and what follows it."""
    for n, part in enumerate(parts):
        if isinstance(part, int):
            return part, parts[n + 1 :]
        if not all(isinstance(piece, str) and piece.isspace() for piece in part.pieces):
            break
    return None, parts


def _same_start(text: str, prompt: str) -> bool:
    """Returns whether an action starts behind the prompt, apart from white space."""
    return text.startswith(prompt) and not text.removeprefix(prompt).strip()
