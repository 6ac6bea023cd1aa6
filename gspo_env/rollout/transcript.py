"""Converts messages to token ids: the token-exact transcript.

A chat template is rendered once with markers in place of the messages. The text between the markers
is glue, whose control tokens become ids directly. All other text is encoded by a tokenizer without
added tokens, so environment text cannot produce a control token. Sampled ids are never decoded and
tokenised again: turn k+1 is turn k, the ids sampled in turn k, then the ids of the new environment
text.

    <|im_start|> system / SYSTEM <|im_end|> / <|im_start|> user / OBSERVATION <|im_end|> /
    └── id ────┘ └── one text ──┘└── id ──┘   └── id ────┘ └─── one text ───┘└── id ──┘
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from tokenizers import Tokenizer

from gspo_env.errors import ChatTemplateError
from gspo_env.types import Episode, Prompt, Role, StepInfo

logger = logging.getLogger(__name__)

_SYSTEM, _FIRST, _ACTION, _NEXT, _REASONING = (
    f"GSPOENVMARK{name}4711" for name in ("SYSTEM", "FIRST", "ACTION", "NEXT", "REASONING")
)
_CACHE = 1 << 16

Part = int | str
"""A control token's id, or text to encode (a marker stands for a message)."""


class ChatTokenizer:
    """Turns observations into token ids that extend a transcript, and sampled ids into text.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or its template cannot be
            extended turn by turn.
    """

    def __init__(self, tokenizer: Any, *, history: Literal["keep", "refuse"] = "keep") -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ChatTemplateError(
                "the tokenizer has no chat template, which multi-turn prompts need: set "
                "`tokenizer.chat_template` or use an instruction-tuned model"
            )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ChatTemplateError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: save it as tokenizer.json"
            )
        self._backend = backend
        self._tokens = dict(tokenizer.added_tokens_decoder)
        self._added = {token.content: (index, token) for index, token in self._tokens.items()}
        self._plain = _without_added_tokens(backend)
        self._encode = lru_cache(_CACHE)(self._encode_plain)
        self._decode = lru_cache(_CACHE)(self.decode_all)
        self._prompts: dict[str, list[Part]] = {}
        self._tails = {"user": self._tail("user")}
        with suppress(ChatTemplateError):  # then a tool's result is a user message
            self._tails["tool"] = self._tail("tool")
        first = self._tails["user"][0]
        self.end_of_turn = first if isinstance(first, int) else None
        self._check_history(history)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an action: the template's end of turn, the end of sequence."""
        ids = {self.end_of_turn, self.tokenizer.eos_token_id}
        return tuple(sorted(i for i in ids if i is not None))

    def start(self, observation: str, prompt: Prompt | None = None) -> tuple[int, ...]:
        """Returns the ids of the first prompt.

        Args:
            observation: The observation of `reset`.
            prompt: What precedes the observation; the system prompt lists the tools if the template
                does not.
        """
        prompt = prompt or Prompt()
        system, schemas = prompt.system, [tool.schema for tool in prompt.tools]
        if schemas and not self._shows_tools(schemas):
            listing = "\n".join(json.dumps(schema) for schema in schemas)
            system = f"{system or ''}\n\nTools:\n{listing}".strip()
            schemas = []
        parts = self._prompt(system is not None, schemas)
        first, *later = [*(message.content for message in prompt.messages), observation]
        ids = self._fill(parts, {_SYSTEM: system or "", _FIRST: first})
        for answer, question in zip(later[::2], later[1::2], strict=True):
            ids += self._encode(answer) + self.follow(question, -1)
        return ids

    def follow(self, observation: str, last_id: int, role: str = "user") -> tuple[int, ...]:
        """Returns the ids that follow an action whose last sampled id is `last_id`."""
        parts = self._tails.get(role, self._tails["user"])
        if parts and parts[0] == last_id:
            parts = parts[1:]
        return self._fill(parts, {_NEXT: observation})

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of plain text; no control token is among them."""
        return self._encode(text)

    def decode(self, action_ids: Sequence[int]) -> str:
        """Returns the text of an action, without the id that ended it."""
        ids = tuple(action_ids)
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        return self._decode(ids)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of any ids, including control tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def _render(self, messages: list[dict[str, str]], tools: Any = None) -> str:
        render = self.tokenizer.apply_chat_template
        try:
            text = render(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            roles = "messages of " + ", ".join(message["role"] for message in messages)
            raise ChatTemplateError(f"the chat template refuses {roles}: {error}") from error
        return str(text)

    def _shows_tools(self, schemas: list[dict[str, Any]]) -> bool:
        name = str(schemas[0]["function"]["name"])
        return any(isinstance(p, str) and name in p for p in self._prompt(True, schemas))

    def _prompt(self, system: bool, schemas: list[dict[str, Any]]) -> list[Part]:
        key = json.dumps([system, schemas])
        if key not in self._prompts:
            messages = [{"role": "system", "content": _SYSTEM}] if system else []
            messages.append({"role": "user", "content": _FIRST})
            hidden, names = self._hide_controls(schemas)
            text = self._render(messages, hidden)
            if text.count(_FIRST) != 1 or text.count(_SYSTEM) != int(system):
                raise ChatTemplateError(
                    "the chat template drops or repeats a message of the first prompt; "
                    "it has to show the system and the user message once each"
                )
            self._prompts[key] = [
                part if isinstance(part, int) else _replaced(part, names)
                for part in self._parts(text)
            ]
        return self._prompts[key]

    def _hide_controls(self, schemas: list[dict[str, Any]]) -> tuple[Any, dict[str, str]]:
        """Replaces control tokens in the schemas by markers: a description is not glue."""
        text = json.dumps(schemas, ensure_ascii=False)
        names = [n for n, (_, token) in self._added.items() if token.special and n in text]
        markers = {f"GSPOENVMARKCONTROL{place}END": name for place, name in enumerate(names)}
        for marker, name in markers.items():
            text = text.replace(name, marker)
        return json.loads(text), markers

    def _tail(self, role: str) -> list[Part]:
        """Returns what follows an action: its end, the next message, the next action's start."""
        messages = [
            {"role": "user", "content": _FIRST},
            {"role": "assistant", "content": _ACTION},
            {"role": role, "content": _NEXT},
        ]
        before, found, tail = self._render(messages).partition(_ACTION)
        if not found or _FIRST not in before or tail.count(_NEXT) != 1 or _FIRST in tail:
            raise ChatTemplateError(
                "the chat template moves or drops messages when a turn is added, so a transcript "
                "cannot be extended token by token; use a template that only appends"
            )
        return self._parts(tail)

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
        user = {"role": "user", "content": _FIRST}
        later = {"role": "user", "content": _NEXT}
        prompt = self._render([user])
        action = {"role": "assistant", "content": _ACTION}
        if not self._render([user, action, later]).startswith(prompt + _ACTION):
            return "it changes the start of an action once the turn is over"
        thought = {"role": "assistant", "content": f"<think>\n{_REASONING}\n</think>\n\n{_ACTION}"}
        if _REASONING not in self._render([user, thought, later]):
            return "it drops the reasoning of earlier turns"
        return None

    def _parts(self, text: str, *, special: bool = True) -> list[Part]:
        """Splits glue at its control tokens; markers stay inside the texts."""
        names = [n for n, (_, token) in self._added.items() if special or not token.special]
        if not names:
            return [text]
        pattern = "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))
        parts: list[Part] = []
        for piece in re.split(f"({pattern})", text):
            if piece in self._added:
                index, token = self._added[piece]
                if token.lstrip and parts and isinstance(parts[-1], str):
                    parts[-1] = parts[-1].rstrip()
                parts.append(index)
            elif piece:
                before = self._tokens.get(parts[-1]) if parts else None
                parts.append(piece.lstrip() if before and before.rstrip else piece)
        return [p for p in parts if p != ""]

    def _fill(self, parts: list[Part], texts: dict[str, str]) -> tuple[int, ...]:
        ids: list[int] = []
        for part in parts:
            pieces = [part]
            if isinstance(part, str) and _SYSTEM in part:
                system = part.replace(_SYSTEM, texts[_SYSTEM])
                pieces = self._parts(system, special=False)
            for piece in pieces:
                ids += [piece] if isinstance(piece, int) else self._encode(_replaced(piece, texts))
        return tuple(ids)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """Encodes text so that no id of it is a control token."""
        ids = tuple(self._plain.encode(text, add_special_tokens=False).ids)
        if self._tokens.keys().isdisjoint(ids) or len(text) < 2:
            return tuple(i for i in ids if i not in self._tokens)
        # The vocabulary itself can form a control token: split the text until it cannot.
        middle = len(text) // 2
        return self._encode_plain(text[:middle]) + self._encode_plain(text[middle:])


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


def tokenize(episode: Episode, chat: ChatTokenizer) -> Episode:
    """Adds to a text-only episode the ids that a rollout of the same actions would have.

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


def _replaced(text: str, contents: Mapping[str, str]) -> str:
    for marker, content in contents.items():
        text = text.replace(marker, content)
    return text


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    plain = json.loads(backend.to_str())
    plain["added_tokens"] = []
    plain["post_processor"] = None
    plain["padding"] = plain["truncation"] = None
    return Tokenizer.from_str(json.dumps(plain))
