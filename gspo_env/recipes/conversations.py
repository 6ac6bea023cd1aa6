"""Conversations to imitate, which were recorded or written by hand: JSON lines in chat form.

A line is an object with `messages` and, if the assistant may call tools, `tools`, both in OpenAI's
format; `reward` and `task_key` are optional, and further keys are left alone. A message of the
assistant with `"weight": 0` is not imitated. `gspo-env capture` writes such lines.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_env.chat import ChatTokenizer
from gspo_env.chat.action import message_for_template
from gspo_env.chat.fields import parse_json
from gspo_env.chat.messages import read_messages, read_tools, write_message
from gspo_env.errors import ConfigError, RefusedError, raised_as
from gspo_env.given_file import read_given
from gspo_env.recipes.build import LITERAL, build_tokenizer
from gspo_env.recipes.tiny import Tiny
from gspo_env.redaction import clean
from gspo_env.tools.tool import Tool, format_tool_call, tool_call_frames
from gspo_env.types import (
    LARGEST_REWARD,
    Ending,
    Episode,
    Message,
    Prompt,
    ResetInfo,
    StepInfo,
    StopReason,
    Task,
    Turn,
)

_MOST_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A conversation whose messages of the assistant are imitated."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    reward: float | None = None
    task_key: str | None = None
    """Name of the task; conversations about held-out tasks are not imitated."""
    unweighted: frozenset[int] = frozenset()
    """Indices of the messages that have the weight 0."""

    def line(self, **more: Any) -> str:
        """Returns the conversation as a line of a file.

        Args:
            more: Further keys.
        """
        weights = ({"weight": 0} if n in self.unweighted else {} for n in range(len(self.messages)))
        messages = [write_message(m) | w for m, w in zip(self.messages, weights, strict=True)]
        row: dict[str, Any] = {"messages": messages}
        if self.tools:
            row["tools"] = [tool.schema for tool in self.tools]
        optional = {"reward": self.reward, "task_key": self.task_key, **more}
        row |= {key: value for key, value in optional.items() if value is not None}
        return json.dumps(row, ensure_ascii=False)


def read_conversations(path: str, least: float | None = None) -> list[Conversation]:
    """Reads a file.

    Args:
        path: The file.
        least: Least reward; conversations with less, or without one, are left out. None takes all.

    Raises:
        ConfigError: It cannot be read, a line is malformed, or there is no conversation.
    """
    with raised_as(ConfigError, f"cannot read the conversations {path!r}", OSError):
        data = read_given(Path(os.path.expanduser(path)), _MOST_BYTES)
    conversations = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not line.strip():
            continue
        with raised_as(ConfigError, f"{path!r}, line {number}", RefusedError):
            conversations.append(_read(parse_json(line)))
    selected = [
        c for c in conversations if least is None or (c.reward is not None and c.reward >= least)
    ]
    if not selected:
        raise ConfigError(
            f"{path!r} has {len(conversations)} conversations"
            f"{f', none with a reward of at least {least}' if conversations else ''}; expected some"
        )
    return selected


def _read(row: dict[str, Any]) -> Conversation:
    if "messages" not in row:
        raise RefusedError(f"messages is missing, the keys are {', '.join(row) or 'none'}")
    values = [row.get(key) or [] for key in ("messages", "tools")]
    if not all(isinstance(value, list) for value in values):
        raise RefusedError("messages or tools is not a list; expected lists of objects")
    unweighted = frozenset(n for n, value in enumerate(values[0]) if _weight(value, n) == 0)
    messages = tuple(read_messages(values[0]))
    for number, message in enumerate(messages):
        says = message.content or message.tool_calls or message.reasoning
        if message.role == "assistant" and number not in unweighted and not says:
            raise RefusedError(f"messages[{number}] has neither content nor tool_calls")
    if not any(m.role == "assistant" and n not in unweighted for n, m in enumerate(messages)):
        raise RefusedError(
            "no message is the assistant's, or all of them have the weight 0; expected one to "
            "imitate"
        )
    if messages[0].role == "assistant":
        raise RefusedError("the first message is the assistant's; expected one that it answers")
    reward, key = row.get("reward"), row.get("task_key")
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if reward is not None and not (is_number and abs(reward) <= LARGEST_REWARD):
        raise RefusedError(
            f"reward is {str(reward)[:50]!r}; expected a number up to {LARGEST_REWARD:g} in size"
        )
    if row.get("functions"):
        raise RefusedError("functions is not a key of a conversation; expected tools")
    return Conversation(
        messages=messages,
        tools=tuple(read_tools(values[1])),
        reward=None if reward is None else float(reward),
        task_key=key if isinstance(key, str) else None,
        unweighted=unweighted,
    )


def _weight(message: Any, number: int) -> int:
    """Takes the weight out of a message; 1 by default.

    Raises:
        RefusedError: It is neither 0 nor 1, or that of a message that nobody imitates.
    """
    weight = message.pop("weight", None) if isinstance(message, dict) else None
    if weight is None:
        return 1
    allowed = (0, 1) if message.get("role") == "assistant" else (0,)
    if isinstance(weight, bool) or weight not in allowed:
        raise RefusedError(
            f"messages[{number}].weight is {weight!r}; expected {' or '.join(map(str, allowed))}"
        )
    return int(weight)


def to_episode(
    conversation: Conversation, chat: ChatTokenizer, env_id: str, number: int
) -> Episode:
    """Returns an episode without ids, whose actions are the messages of the assistant.

    Args:
        conversation: The conversation.
        chat: The tokenizer whose template writes calls and reasoning.
        env_id: The environment that is trained on.
        number: Its number, which becomes the seed of the task.
    """
    messages, tools = conversation.messages, conversation.tools
    indices = [n for n in range(len(messages)) if n not in conversation.unweighted]
    places = [n for n in indices if messages[n].role == "assistant"]
    turns = []
    for place, following in zip(places, [*places[1:], None], strict=True):
        then = None if following is None else messages[:following]
        literal = action_literal(messages, place, tools, chat)
        has_controls = bool(chat.text.controls_of(literal))
        turns.append(
            Turn(
                text=chat.text.to_text(literal),
                observation=messages[place - 1].content,
                reward=0.0,
                info=StepInfo(
                    messages=then, tools=tools, extra={LITERAL: literal} if has_controls else {}
                ),
            )
        )
    first = messages[: places[0]]
    return Episode(
        task=Task(env_id=env_id, seed=number),
        prompt=Prompt(messages=first, tools=tools),
        turns=tuple(turns),
        ending=Ending(reason=StopReason.TERMINATED, outcome=conversation.reward),
        reset=ResetInfo(messages=first, tools=tools, task_key=conversation.task_key),
    )


def action_literal(
    messages: Sequence[Message], place: int, tools: Sequence[Tool], chat: ChatTokenizer
) -> str:
    """Returns what the policy has to write so that its action is this message, as a rendering.

    That is what the template writes for it. Where the template changes the start of a message or
    leaves something out, it is the message with its calls as JSON in `<tool_call>`.
    """
    template, message = chat.template, messages[place]
    spoken = [message_for_template(m) for m in messages[: place + 1]]
    schemas = [tool.schema for tool in tools]
    before = template.render(spoken[:-1], schemas)
    whole = template.render(spoken, schemas, generation=False)
    thought = (message.reasoning or "").strip()
    if whole.startswith(before):
        text = whole[len(before) :]
        ends = [chat.text.decode_rendering((i,)) for i in chat.stop_ids]
        text = text[: min((p for p in map(text.find, ends) if p >= 0), default=len(text))]
        needed = [thought, *(call.name for call in message.tool_calls)]
        if all(piece in chat.text.to_text(text) for piece in needed):
            return text
    thought = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    calls = [format_tool_call(call.name, call.arguments) for call in message.tool_calls]
    return clean(thought + "\n".join(filter(None, [message.content, *calls])))


def read_demonstrations(
    path: str, least: float | None, chat: ChatTokenizer, env_id: str
) -> list[Episode]:
    """Returns the conversations of a file as episodes to imitate; see `read_conversations`."""
    conversations = read_conversations(path, least)
    return [to_episode(one, chat, env_id, number) for number, one in enumerate(conversations)]


def read_for_building(config: Tiny, env_id: str) -> tuple[set[str], list[str], list[Episode]]:
    """Reads the conversations of a config, for a model that is built for them.

    Returns:
        The texts that its vocabulary has, the strings that are one token each, and the episodes to
        imitate, as the template of such a model renders them.
    """
    conversations = read_conversations(config.conversations, config.min_reward)
    bare = ChatTokenizer(build_tokenizer([]))
    episodes = [to_episode(each, bare, env_id, n) for n, each in enumerate(conversations)]
    messages = [message for each in conversations for message in each.messages]
    tools = [tool for each in conversations for tool in each.tools]
    texts = {turn.text for episode in episodes for turn in episode.turns}
    texts |= {text for m in messages for text in (m.content, m.reasoning or "")}
    texts |= {text for tool in tools for text in (tool.name, tool.description)}
    return texts, sorted({f for tool in tools for f in tool_call_frames(tool)}), episodes
