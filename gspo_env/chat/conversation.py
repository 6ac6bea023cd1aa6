"""Decides which turn a prompt continues, and which of its tokens are new.

With `history="template"` a prompt is what the template renders for the conversation. It continues
an earlier turn if that text begins with all of the turn's text; then the sampled ids stay, and only
the new text is encoded. Otherwise a new sequence begins. Texts are compared, not ids, because a
model need not sample the ids that the tokenizer gives.

    turn 0   user: 2 + 3?                    assistant: <think>...</think> 5
    turn 1   user: 2 + 3?  assistant: 5      user: and twice that?   (no reasoning: a new sequence)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_env.chat.action import ParsedAction, message_for_template
from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.types import Episode, Fork, Message, Prompt, ResetInfo, Role, StepInfo, Turn

_MOST_SESSIONS = 4
"""Caches of an engine that one episode uses at the same time."""
_Key = tuple[Any, ...]
"""What two messages have in common if they are equal; reasoning may be absent in one."""


@dataclass(kw_only=True, slots=True)
class PromptIds:
    """The prompt of a turn."""

    ids: list[int]
    """All ids of the prompt."""
    parent: int | None
    """See `Turn.parent`."""
    prompt_ids: tuple[int, ...]
    """The ids that follow those of the parent."""
    fork: Fork | None = None
    """See `Turn.fork`."""
    session: int = 0
    """Number of the engine's cache that has most of these ids."""


@dataclass(kw_only=True, slots=True)
class TurnState:
    """A turn, or the prompt of the turn that comes next."""

    observation: str
    role: Role
    messages: tuple[Message, ...]
    """The conversation that it answers. It is empty until it is needed if it is that of the turn
    before, its action and the observation."""
    said: tuple[int | None, ...]
    """The turn whose action each of the messages is."""
    tools: tuple[Any, ...]
    opening: PromptIds
    literal: str | None = None
    """The rendered prompt and, once it is written, the action; None until it is needed."""
    ids: list[int]
    """All ids, those of the action included."""
    saying: ParsedAction | None = None
    """The action, once it is written."""

    @property
    def keys(self) -> tuple[_Key, ...]:
        """What is compared of the messages: equal keys mean equal messages."""
        pairs = zip(self.messages, self.said, strict=True)
        return tuple(_key(message) if turn is None else (turn,) for message, turn in pairs)


_NOTHING = PromptIds(ids=[], parent=None, prompt_ids=())
"""Stands for a prompt until it is known."""


class Transcript:
    """The turns of one episode as token sequences.

    Args:
        chat: The tokenizer.
        prompt: What precedes the first observation.
    """

    def __init__(self, chat: ChatTokenizer, prompt: Prompt) -> None:
        self.chat, self.prompt = chat, prompt
        self.ids: list[int] = []
        """The ids of the last prompt and, once it is written, of its action."""
        self._turns: list[TurnState] = []
        self._next: TurnState | None = None
        self._given = False
        """Whether the environment has given a conversation or tools of its own."""
        self._sessions: list[int] = [0]
        self._count = 1
        self._stop: tuple[str, ...] = ()

    def read(
        self, observation: str, role: Role = "user", request: ResetInfo | StepInfo | None = None
    ) -> PromptIds:
        """Returns the prompt of the next turn.

        Args:
            observation: The observation, which follows the last action if the environment gives no
                conversation.
            role: Its source.
            request: The conversation and the tools that the environment gives, and stop texts.

        Raises:
            ChatTemplateError: The template refuses the conversation.
        """
        told = self._conversation(observation, role, request)
        if self._given or (self._turns and not self._is_plain(observation)):
            self._complete(told)
            self._open(told)
        elif not self._turns:
            ids = list(self.chat.start(observation, self.prompt))
            told.opening = PromptIds(ids=ids, parent=None, prompt_ids=tuple(ids))
        else:
            self._append(told, self.chat.follow(observation, self.ids_of(-1)[-1], role))
        told.ids = told.opening.ids.copy()
        self.ids, self._next = told.ids, told
        return told.opening

    def write(self, action_ids: Sequence[int]) -> ParsedAction:
        """Adds the ids of an action, its end of turn included; returns it as a message."""
        told = self._next
        if told is None:
            raise ValueError("write() was called before read(), which begins a turn")
        told.saying = self.chat.parser.parse(
            action_ids,
            self.chat.stop_ids,
            told.opening.prompt_ids,
            told.tools,
            self._stop,
        )
        told.ids.extend(action_ids)
        if told.literal is not None:
            told.literal += told.saying.literal
        self._turns.append(told)
        self._next = None
        return told.saying

    def ids_of(self, turn: int) -> list[int]:
        """Returns all ids of a turn, those of its action included."""
        return self._turns[turn].ids

    def session_ids(self) -> tuple[int, ...]:
        """Returns the numbers of the engine's caches that are in use."""
        return tuple(self._sessions)

    def _conversation(
        self, observation: str, role: Role, request: ResetInfo | StepInfo | None
    ) -> TurnState:
        """Returns the conversation that the policy answers, without a prompt."""
        last = self._turns[-1] if self._turns else None
        tools = self.prompt.tools if last is None else last.tools
        self._stop = () if request is None else request.stop
        if isinstance(request, StepInfo) and request.tools is not None and request.tools != tools:
            tools, self._given = request.tools, True
        messages: tuple[Message, ...] = ()
        said: tuple[int | None, ...] = ()
        if isinstance(request, StepInfo) and request.messages is not None:
            self._given = True
            messages, said = request.messages, self._recognised(request.messages)
        elif last is None:
            messages = _first_messages(self.prompt, observation)
            said = (None,) * len(messages)
            self._given = _is_whole(self.prompt) or not self._starts_plain()
        return TurnState(
            observation=observation,
            role=role,
            messages=messages,
            said=said,
            tools=tools,
            opening=_NOTHING,
            ids=[],
        )

    def _complete(self, *others: TurnState) -> None:
        """Sets the messages of all turns, and of the one that comes next."""
        before: TurnState | None = None
        for number, told in enumerate((*self._turns, *others)):
            if before is not None and not told.messages:
                spoken = before.saying.shown if before.saying else ""
                answer = Message(role="assistant", content=spoken)
                observed = Message(role=told.role, content=told.observation)
                told.messages = (*before.messages, answer, observed)
                told.said = (*before.said, number - 1, None)
            before = told

    def _starts_plain(self) -> bool:
        """Returns whether `ChatTokenizer.start` gives what the template renders."""
        return self.chat.history != "template" or self.chat.appends

    def _recognised(self, messages: Sequence[Message]) -> tuple[int | None, ...]:
        """Returns the turn whose action each message is; one with equal messages before it first.

        The latest turn comes first otherwise.
        """
        self._complete()
        keys: list[_Key] = []
        found: list[int | None] = []
        known = [(place, told, told.keys) for place, told in enumerate(self._turns)][::-1]
        for message in messages:
            same = []
            if message.role == "assistant":
                same = [(p, k) for p, told, k in known if _stands(told, message)]
            before = tuple(keys)
            turn = next((p for p, k in same if k == before), same[0][0] if same else None)
            found.append(turn)
            keys.append(_key(message) if turn is None else (turn,))
        return tuple(found)

    def _is_plain(self, observation: str) -> bool:
        """Returns whether the prompt is the last turn and `ChatTokenizer.follow`."""
        if self.chat.history != "template":
            return True
        last = self._turns[-1]
        said = last.saying
        if said is None or not self.chat.appends:
            return False
        end = last.ids[-1]
        ends_otherwise = end in self.chat.stop_ids and end != self.chat.end_of_turn
        return not ends_otherwise and self.chat.is_plain(said.shown, observation)

    def _append(self, told: TurnState, new: Sequence[int], parent: int = -1) -> None:
        """Continues an earlier turn."""
        place = parent % len(self._turns)
        before = self._turns[place]
        forked = any(t.opening.parent == place for t in self._turns[place + 1 :])
        told.opening = PromptIds(
            ids=before.ids + list(new),
            parent=place,
            prompt_ids=tuple(new),
            fork="edited" if forked else None,
            session=self._session(before.opening.session),
        )

    def _open(self, told: TurnState) -> None:
        if self.chat.history != "template":
            self._open_by_messages(told)
            return
        rendered = told.literal = self._render(told)
        for place in reversed(range(len(self._turns))):
            before = self._turns[place]
            text = self._literal(before)
            if rendered.startswith(text) and len(rendered) > len(text):
                rest = rendered[len(text) :]
                self._append(told, self.chat.literal.encode(rest, behind=before.ids[-1]), place)
                return
        self._begin(told, self.chat.literal.encode(rendered, first=True))

    def _open_by_messages(self, told: TurnState) -> None:
        """Keeps the latest turn whose conversation, with its action, comes first in this one."""
        for place in reversed(range(len(self._turns))):
            before = self._turns[place]
            held = (*before.keys, (place,))
            if len(held) < len(told.messages) and held == told.keys[: len(held)]:
                rest = told.messages[len(held) :]
                spoken = [message_for_template(m, self.chat.literal) for m in rest]
                new = self.chat.follow_messages(spoken, before.ids[-1])
                self._append(told, new, place)
                return
        told.literal = self._render(told)
        self._begin(told, self.chat.literal.encode(told.literal, first=True))

    def _begin(self, told: TurnState, ids: list[int]) -> None:
        """Begins a sequence."""
        fork, session = None, 0
        if self._turns:
            fork, nearest = self._reason(told)
            session = self._session(None if fork == "new" else nearest.opening.session)
        told.opening = PromptIds(
            ids=ids, parent=None, prompt_ids=tuple(ids), fork=fork, session=session
        )

    def _reason(self, told: TurnState) -> tuple[Fork, TurnState]:
        """Returns why no turn is continued, and the turn with the most equal messages."""
        keys = told.keys
        held = [(*before.keys, (place,)) for place, before in enumerate(self._turns)]
        shared = [_common(one, keys) for one in held]
        most = max(shared)
        nearest = [n for n, count in enumerate(shared) if count == most]
        last = self._turns[nearest[-1]]
        if not most:
            return "new", last
        if any(most == len(held[n]) and self._turns[n].tools == told.tools for n in nearest):
            return "template", last
        shorter = most < len(keys) < len(last.messages)
        return ("compacted" if shorter else "edited"), last

    def _session(self, wanted: int | None) -> int:
        """Returns the number of a cache: the wanted one, or one of its own."""
        if wanted == self._sessions[-1]:
            return wanted
        if wanted is None:
            wanted, self._count = self._count, self._count + 1
        if wanted in self._sessions:
            self._sessions.remove(wanted)
        self._sessions = [*self._sessions, wanted][-_MOST_SESSIONS:]
        return wanted

    def _literal(self, told: TurnState) -> str:
        """Returns the text of a turn, its action included."""
        if told.literal is None:
            told.literal = self._render(told) + (told.saying.literal if told.saying else "")
        return told.literal

    def _render(self, told: TurnState) -> str:
        literal = self.chat.literal
        spoken = []
        for message, turn in zip(told.messages, told.said, strict=True):
            saying = None if turn is None else self._turns[turn].saying
            form = None if saying is None else saying.recognise(message)
            if form and saying and "tool_calls" in form and not self.chat.template.shows_calls:
                form = saying.spoken()  # only the sampled text has a form of the calls
            spoken.append(form or message_for_template(message, literal))
        return self.chat.template.literal(spoken, literal.hide_tree(self._schemas_of(told.tools)))

    def _schemas_of(self, tools: tuple[Any, ...]) -> Any:
        return [tool.schema for tool in tools]


def tokenize(
    episode: Episode,
    chat: ChatTokenizer,
    max_context: int | None = None,
    encode: Callable[[Turn], Sequence[int]] | None = None,
) -> Episode:
    """Adds to a text-only episode the ids that a rollout of the same actions would have.

    A turn that ends beyond `max_context` tokens, and all turns after it, are left out.

    The turns lose their `info`, because its per-token values refer to sampled tokens.

    Args:
        episode: The episode.
        chat: The tokenizer.
        max_context: Maximum tokens of a sequence; None is any number.
        encode: Returns the ids of an action without its end; by default those of its text.
    """
    encode = encode or (lambda turn: chat.encode(turn.text))
    end = chat.stop_ids[0] if chat.end_of_turn is None else chat.end_of_turn
    transcript = Transcript(chat, episode.prompt)
    request: ResetInfo | StepInfo = episode.reset
    turns = []
    for turn in episode.turns:
        role = request.observation_role if isinstance(request, StepInfo) else "user"
        opening = transcript.read(turn.observation, role, request)
        action = (*encode(turn), end)
        transcript.write(action)
        if max_context is not None and len(transcript.ids) > max_context:
            break
        request = turn.info
        turns.append(
            replace(
                turn,
                parent=opening.parent,
                fork=opening.fork,
                prompt_ids=opening.prompt_ids,
                action_ids=action,
                logprobs=(0.0,) * len(action),
                info=StepInfo(),
            )
        )
    return replace(episode, turns=tuple(turns))


def _is_whole(prompt: Prompt) -> bool:
    """Returns whether the messages of a prompt are the whole first conversation."""
    return bool(prompt.messages) and prompt.messages[-1].role != "assistant"


def _first_messages(prompt: Prompt, observation: str) -> tuple[Message, ...]:
    system = () if prompt.system is None else (Message(role="system", content=prompt.system),)
    last = () if _is_whole(prompt) else (Message(role="user", content=observation),)
    return (*system, *prompt.messages, *last)


def _stands(told: TurnState, message: Message) -> bool:
    return told.saying is not None and told.saying.recognise(message) is not None


def _key(message: Message) -> _Key:
    calls = [[call.name, call.arguments] for call in message.tool_calls]
    shown = json.dumps(calls, sort_keys=True, default=str) if calls else ""
    return message.role, message.content, shown, message.tool_call_id, message.name


def _common(a: Sequence[_Key], b: Sequence[_Key]) -> int:
    """Returns the number of equal messages at the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
