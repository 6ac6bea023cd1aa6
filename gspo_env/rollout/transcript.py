"""Converts messages to token ids: the token-exact transcript.

Sampled ids are never decoded and tokenised again: turn k+1 is turn k, the ids sampled in turn k,
then the ids of the new environment text. `gspo_env.rollout.template` encodes the text, so that it
cannot become a control token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from gspo_env.errors import ChatTemplateError
from gspo_env.rollout.template import ChatTemplate, Parts, Shape, Slot, Text
from gspo_env.types import Episode, Prompt, Role, StepInfo

logger = logging.getLogger(__name__)

_FIRST, _ACTION, _NEXT = range(3)
"""Places of the messages in the conversation that shows how a turn is added."""


class ChatTokenizer:
    """Turns observations into token ids that extend a transcript, and sampled ids into text.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        history: Whether a template that changes earlier turns is an error ("refuse").

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or its template cannot be
            extended turn by turn, or does not begin the assistant's message.
    """

    def __init__(self, tokenizer: Any, *, history: Literal["keep", "refuse"] = "keep") -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self._after = lru_cache(8)(self._after_action)
        self._turn = {"user": Shape(roles=("user", "assistant", "user"))}
        tool = Shape(roles=("user", "assistant", "tool"))
        self._after(self._turn["user"])
        with suppress(ChatTemplateError):  # then a tool's result is a user message
            self._after(tool)
            self._turn["tool"] = tool
        self.end_of_turn = _split_end(self._after(self._turn["user"]))[0]
        self._check_start()
        self._check_history(history)
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
        shape, texts = self._turn.get(role, self._turn["user"]), ("", "", observation)
        parts = self.template.with_empty(shape, texts, self._after)
        end, rest = _split_end(parts)
        return tuple(self.template.fill(rest if end == last_id else parts, texts))

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

    def _check_history(self, history: str) -> None:
        """Detects templates that render an earlier turn differently from how it was sampled."""
        if (reason := self._rewrites()) is None:
            return
        if history == "refuse":
            raise ChatTemplateError(f"the chat template rewrites history: {reason}")
        logger.warning(
            "The chat template rewrites history (%s); transcripts keep every turn as sampled. "
            "Set history='refuse' to make this an error.",
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


class Transcript:
    """The token ids of one conversation, which are only ever appended to."""

    def __init__(self, chat: ChatTokenizer, prompt: Prompt) -> None:
        self.chat, self.prompt = chat, prompt
        self.ids: list[int] = []

    def read(self, observation: str, role: Role = "user") -> tuple[int, ...]:
        """Adds an observation; returns its ids, those of the prompt included the first time."""
        if self.ids:
            new = self.chat.follow(observation, self.ids[-1], role)
        else:
            new = self.chat.start(observation, self.prompt)
        self.ids.extend(new)
        return new

    def write(self, action_ids: Sequence[int]) -> None:
        """Adds the ids of an action, its end of turn included."""
        self.ids.extend(action_ids)


def tokenize(episode: Episode, chat: ChatTokenizer, max_context: int | None = None) -> Episode:
    """Adds to a text-only episode the ids that a rollout of the same actions would have.

    A turn that ends beyond `max_context` tokens, and all turns after it, are left out.

    The turns lose their `info`, because its per-token values refer to sampled tokens.
    """
    end = chat.stop_ids[0] if chat.end_of_turn is None else chat.end_of_turn
    transcript = Transcript(chat, episode.prompt)
    role: Role = "user"
    turns = []
    for turn in episode.turns:
        new = transcript.read(turn.observation, role)
        action = (*chat.encode(turn.text), end)
        transcript.write(action)
        if max_context is not None and len(transcript.ids) > max_context:
            break
        role = turn.info.observation_role
        turns.append(
            replace(
                turn,
                prompt_ids=new,
                action_ids=action,
                logprobs=(0.0,) * len(action),
                info=StepInfo(),
            )
        )
    return replace(episode, turns=tuple(turns))
