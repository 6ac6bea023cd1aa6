"""Converts messages to token ids, and sampled ids to text and messages.

Sampled ids are never decoded and encoded again to be trained on. `gspo_env.chat.template` renders
messages, and `gspo_env.chat.conversation` decides which turn a prompt continues.
"""

from __future__ import annotations

import logging
import re
import typing
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from jinja2 import nodes

from gspo_env.chat.action import ActionParser, message_for_template
from gspo_env.chat.bounds import parser
from gspo_env.chat.encode import BoundedCache
from gspo_env.chat.template import Chat, ChatTemplate
from gspo_env.errors import ChatTemplateError
from gspo_env.types import Message, Prompt

logger = logging.getLogger(__name__)

HistoryMode = typing.Literal["template", "keep", "refuse"]

_CACHE_BYTES = 1 << 24
"""Bytes of the observations that are kept with their ids."""
_EDITED = 'aB"\\é <b>'
_EDGE = "\n \n"
"""Texts that show whether a template edits messages, or strips their ends."""


class ChatTokenizer:
    """Turns observations into token ids that extend a transcript, and sampled ids into text.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        history: The prompt of a later turn: what the template renders for the conversation
            ("template"); or always the earlier turns as they were sampled ("keep"), where a
            template that changes them can be an error ("refuse").
        end_ids: Ids that end an action for the model; see `gspo_env.model.head.match_tokenizer`.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or its template cannot be
            extended turn by turn, or does not begin the assistant's message.
    """

    def __init__(
        self, tokenizer: Any, *, history: HistoryMode = "template", end_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.history, self.end_ids = tokenizer, history, tuple(end_ids)
        self.template = ChatTemplate(tokenizer)
        self.text = self.template.text
        source = str(tokenizer.chat_template)
        splits_reasoning = "reasoning" in source or "thinking" in source
        self.parser = ActionParser(tokenizer, self.text, splits_reasoning=splits_reasoning)
        self._user, self._action, self._observation = map(self.template.marker, range(3))
        self._roles = ("user", "tool") if self.template.takes_tool_role else ("user",)
        self._follow_cached = BoundedCache(self._follow, _CACHE_BYTES)
        self.end_of_turn = self._split_end(self._after_action("user"))[0]
        self._check_start()
        self._rewriting = self._find_rewriting()
        self._check_history()
        self._check_roles()
        if self._edits("user"):
            logger.warning("The chat template changes the text of messages, also inside of it.")

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an action: ends of turn, the end of sequence, and the model's."""
        ends = [self._split_end(self._after_action(role))[0] for role in self._roles]
        ends += [*self.end_ids, self.tokenizer.eos_token_id]
        return tuple(sorted({i for i in ends if i is not None}))

    def start(self, observation: str, prompt: Prompt | None = None) -> tuple[int, ...]:
        """Returns the ids of the first prompt.

        Args:
            observation: The observation of `reset`.
            prompt: What precedes the observation; the system prompt lists the tools if the template
                does not.
        """
        prompt = prompt or Prompt()
        messages = [message_for_template(m) for m in prompt.first_messages(observation)]
        return tuple(self.template.ids(messages, [tool.schema for tool in prompt.tools]))

    def follow(self, observation: str, last_id: int, role: str = "user") -> tuple[int, ...]:
        """Returns the ids that follow an action whose last sampled id is `last_id`."""
        return self._follow_cached(observation, last_id, role)

    def _follow(self, observation: str, last_id: int, role: str) -> tuple[int, ...]:
        message = Message(role="tool" if role == "tool" else "user", content=observation)
        return tuple(self.follow_messages([message_for_template(message)], last_id))

    def follow_messages(self, messages: Chat, last_id: int) -> list[int]:
        """Returns the ids of messages that follow an action whose last sampled id is `last_id`."""
        chat = [_user(self._user), _assistant(self._action), *messages]
        text = self.template.render(chat).partition(self._action)[2]
        end, rest = self._split_end(text)
        return self.text.encode_rendering(rest if end == last_id else text, previous=last_id)

    @cached_property
    def appends(self) -> bool:
        """Whether the template only appends what `follow` gives, whatever the turns before it.

        It is tried with conversations of a few turns. Texts that the template itself looks for, and
        ends of texts that it strips, are the business of `is_plain`.
        """
        if self._rewriting is not None or self.end_of_turn is None:
            return False
        try:
            return all(self._appends(role, system) for role in self._roles for system in ("", "s"))
        except ChatTemplateError:
            return False

    def _appends(self, role: str, system: str) -> bool:
        chat = [{"role": "system", "content": system}] if system else []
        chat.append(_user("stone"))
        end = self.end_of_turn
        assert end is not None
        ids = self.text.encode_rendering(self.template.render(chat), first=True)
        for n in range(3):
            action = self.encode(f"birch {n}")
            ids += [*action, end, *self.follow(f"river {n}", end, role)]
            chat += [_assistant(self.decode_all(action)), {"role": role, "content": f"river {n}"}]
            rendering = self.template.render(chat)
            if self.text.decode_rendering(ids) != rendering and (
                self.text.encode_rendering(rendering, first=True) != ids
            ):
                return False
        return True

    def is_plain(self, action: str, observation: str) -> bool:
        """Returns whether the template shows an earlier action unchanged, next to any text."""
        if self._looked_for.search(action) or self._looked_for.search(observation):
            return False
        if not action or self._edits_actions:
            return False
        return not self._strips_actions or action == action.strip()

    @cached_property
    def _looked_for(self) -> re.Pattern[str]:
        """Finds texts with which the template compares the texts of messages."""
        texts = constants(self.tokenizer.chat_template)
        return re.compile("|".join(map(re.escape, sorted(texts))) or r"(?!)")

    @cached_property
    def _edits_actions(self) -> bool:
        return self._edits("assistant")

    @cached_property
    def _strips_actions(self) -> bool:
        action = f"{_EDGE}{self._action}{_EDGE}"
        chat = [_user(self._user), _assistant(action), _user(self._observation)]
        return action not in self.template.render(chat)

    def _edits(self, role: str) -> bool:
        """Returns whether the template changes the inside of messages of a role."""
        text = f"{self._action}{_EDITED}{self._action}"
        chat = [_user(text if role == "user" else "x")]
        chat += [_assistant(text), _user("x")] if role == "assistant" else []
        return text not in self.template.render(chat)

    def ends(self, stop: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
        """Returns whether sampled ids have one of these texts at their end; None without texts."""
        if not stop:
            return None
        # every id but a few has at least one byte of the text
        window = max(len(text.encode()) for text in stop) + 8

        def has_ended(ids: Sequence[int]) -> bool:
            tail = self.decode_all(ids[-window:])
            return any(text in tail for text in stop)

        return has_ended

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of plain text; no control token is among them."""
        return self.text.encode(text)

    def decode(self, action_ids: Sequence[int]) -> str:
        """Returns the text of an action, without the id that ended it."""
        has_end = bool(action_ids) and action_ids[-1] in self.stop_ids
        return self.decode_all(action_ids[:-1] if has_end else action_ids)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of any ids, including control tokens."""
        return self.text.decode(ids)

    def _after_action(self, role: str) -> str:
        """Returns what follows an action: its end, the next message, the next action's start.

        Raises:
            ChatTemplateError: The template drops, repeats or moves a message.
        """
        observation = {"role": role, "content": self._observation}
        rendering = self.template.render([_user(self._user), _assistant(self._action), observation])
        markers = (self._user, self._action, self._observation)
        if any(rendering.count(marker) != 1 for marker in markers):
            raise ChatTemplateError(
                f"the chat template drops or repeats a message of user, assistant, {role}; it has "
                "to show each message once"
            )
        before, _, after = rendering.partition(self._action)
        if self._user not in before or self._observation in before:
            raise ChatTemplateError(
                "the chat template moves messages when a turn is added, so a transcript cannot be "
                "extended token by token; use a template that only appends"
            )
        return after

    def _split_end(self, text: str) -> tuple[int | None, str]:
        """Returns the control token with which a rendering begins, if any, and what follows it."""
        stripped = text.lstrip()
        controls = self.text.controls_of(stripped[:2])
        return (controls[0], stripped[2:]) if controls else (None, text)

    def _check_start(self) -> None:
        """Detects templates that leave the header of an action to the model.

        Raises:
            ChatTemplateError: The template ignores `add_generation_prompt` and needs it.
        """
        prompt = self.template.render([_user(self._user)])
        if prompt != self.template.render([_user(self._user)], generation=False):
            return
        chat = [_user(self._user), _assistant(self._action)]
        header = self.template.render(chat).partition(self._action)[0]
        header = header.removeprefix(prompt) if header.startswith(prompt) else ""
        if header.strip():
            raise ChatTemplateError(
                "the chat template has no generation prompt: it writes the same with and without "
                f"`add_generation_prompt`; expected {self.text.to_text(header)!r} at the end with "
                "it"
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

    def _find_rewriting(self) -> str | None:
        """Returns how the template changes earlier turns, if it does."""
        user, later = _user(self._user), _user(self._observation)
        prompt = self.template.render([user])
        text = self.template.render([user, _assistant(self._action), later])
        before = text.partition(self._action)[0]
        if not before.startswith(prompt) or before.removeprefix(prompt).strip():
            return "it changes the start of an action once the turn is over"
        reasoning = self.template.marker(3)
        action = f"<think>\n{reasoning}\n</think>\n\n{self._action}"
        thoughtful = _assistant(self.text.to_rendering(action))
        if reasoning not in self.template.render([user, thoughtful, later]):
            return "it drops the reasoning of earlier turns"
        return None

    def _check_roles(self) -> None:
        """Detects templates whose roles are marked by text, which a message can contain too."""
        before, _, after = self._after_action("user").partition(self._observation)
        ends = {self.tokenizer.eos_token_id, self.end_of_turn}
        opening = set(self.text.controls_of(before)) - {self.tokenizer.eos_token_id}
        closing = set(self.text.controls_of(after)) - ends
        if not (opening and closing):
            logger.warning(
                "The chat template marks who speaks by plain text, not by control tokens: a text "
                "that contains the same words can pretend to be another turn."
            )


def constants(template: Any) -> set[str]:
    """Returns the texts with symbols in the expressions of a template, such as `</think>`."""
    texts = template.values() if isinstance(template, dict) else [template]
    return {
        node.value.strip()
        for text in map(str, texts)
        for node in parser().parse(text).find_all(nodes.Const)
        if isinstance(node.value, str) and re.search(r"[^\w\s]", node.value)
    }


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
