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
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.errors import PromptLengthError
from gspo_env.tools.calls import parse_message
from gspo_env.types import Episode, Fork, Message, Prompt, ResetInfo, Role, StepInfo, Turn

_MOST_SESSIONS = 4
"""Caches of an engine that one episode uses at the same time."""
_SHORT = 1 << 16
"""Characters that are always encoded, since an unknown word of any length may be one token."""
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
    sources: tuple[int | None, ...]
    """The turn whose action each of the messages is."""
    tools: tuple[Any, ...]
    prompt: PromptIds
    rendering: str | None = None
    """The rendered prompt and, once it is sampled, the action; None until it is needed."""
    ids: list[int]
    """All ids, those of the action included."""
    action: ParsedAction | None = None
    """The action, once it is sampled."""
    parsed: Message | None = None
    """The action as the reader of tool calls parses its text; None until it is needed."""

    def recognize(self, message: Message) -> dict[str, Any] | None:
        """Returns a message for the template if `message` is the action of this turn, else None."""
        action = self.action
        if action is None:
            return None
        if self.parsed is None:
            reading = parse_message(action.text, self.tools, in_reasoning=action.in_reasoning)
            self.parsed = reading[0]
        return action.recognize(message, self.parsed)

    @property
    def keys(self) -> tuple[_Key, ...]:
        """What is compared of the messages: equal keys mean equal messages."""
        pairs = zip(self.messages, self.sources, strict=True)
        return tuple(_key(message) if turn is None else (turn,) for message, turn in pairs)


_NO_PROMPT = PromptIds(ids=[], parent=None, prompt_ids=())


class Transcript:
    """The turns of one episode as token sequences.

    Args:
        chat: The tokenizer.
        prompt: What precedes the first observation.
        max_context: Maximum tokens of a sequence. A prompt that is too long by its characters
            raises `PromptLengthError` before it is encoded. None is any number.
    """

    def __init__(self, chat: ChatTokenizer, prompt: Prompt, max_context: int | None = None) -> None:
        self.chat, self.prompt, self._max_context = chat, prompt, max_context
        self.ids: list[int] = []
        """The ids of the last prompt and, once it is sampled, of its action."""
        self._turns: list[TurnState] = []
        self._next: TurnState | None = None
        self._is_custom = False
        """Whether the environment has sent a conversation or tools of its own."""
        self._sessions: list[int] = [0]
        self._session_count = 1
        self._stop: tuple[str, ...] = ()

    def read(
        self, observation: str, role: Role = "user", request: ResetInfo | StepInfo | None = None
    ) -> PromptIds:
        """Returns the prompt of the next turn.

        Args:
            observation: The observation, which follows the last action if the environment sends no
                conversation.
            role: Its source.
            request: The conversation and the tools that the environment sends, and stop texts.

        Raises:
            ChatTemplateError: The template refuses the conversation.
            PromptLengthError: The prompt is too long by its characters.
        """
        self._check_length(observation)
        turn = self._new_turn(observation, role, request)
        if self._turns and not self._is_custom and self._is_plain(observation):
            last_id = self._turns[-1].ids[-1]
            self._append(turn, self.chat.follow(observation, last_id, role))
        else:
            self._complete(turn)
            self._set_prompt(turn)
        turn.ids = turn.prompt.ids.copy()
        self.ids, self._next = turn.ids, turn
        return turn.prompt

    def write(self, action_ids: Sequence[int]) -> ParsedAction:
        """Adds the ids of an action, its end of turn included; returns it as a message."""
        turn = self._next
        if turn is None:
            raise ValueError("write() was called before read(), which begins a turn")
        turn.action = self.chat.parser.parse(
            action_ids, self.chat.stop_ids, turn.prompt.prompt_ids, turn.tools, self._stop
        )
        turn.ids.extend(action_ids)
        if turn.rendering is not None:
            turn.rendering += turn.action.rendering
        self._turns.append(turn)
        self._next = None
        return turn.action

    def session_ids(self) -> tuple[int, ...]:
        """Returns the numbers of the engine's caches that are in use."""
        return tuple(self._sessions)

    def _new_turn(
        self, observation: str, role: Role, request: ResetInfo | StepInfo | None
    ) -> TurnState:
        """Returns the conversation that the policy answers, without a prompt."""
        tools = self._turns[-1].tools if self._turns else self.prompt.tools
        self._stop = () if request is None else request.stop
        if isinstance(request, StepInfo) and request.tools is not None and request.tools != tools:
            tools, self._is_custom = request.tools, True
        messages: tuple[Message, ...] = ()
        sources: tuple[int | None, ...] = ()
        if isinstance(request, StepInfo) and request.messages is not None:
            self._is_custom = True
            messages, sources = request.messages, self._sources_of(request.messages)
        elif not self._turns:
            messages = self.prompt.first_messages(observation)
            sources = (None,) * len(messages)
            self._is_custom = self.prompt.is_whole
        return TurnState(
            observation=observation,
            role=role,
            messages=messages,
            sources=sources,
            tools=tools,
            prompt=_NO_PROMPT,
            ids=[],
        )

    def _check_length(self, text: str) -> None:
        tokens, most = len(text) // self.chat.text.longest, self._max_context
        if most is not None and len(text) > _SHORT and tokens > most:
            raise PromptLengthError(most, tokens)

    def _complete(self, *others: TurnState) -> None:
        """Sets the messages of all turns, and of the one that comes next."""
        before: TurnState | None = None
        for number, turn in enumerate((*self._turns, *others)):
            if before is not None and not turn.messages:
                text = before.action.text if before.action else ""
                answer = Message(role="assistant", content=text)
                observed = Message(role=turn.role, content=turn.observation)
                turn.messages = (*before.messages, answer, observed)
                turn.sources = (*before.sources, number - 1, None)
            before = turn

    def _sources_of(self, messages: Sequence[Message]) -> tuple[int | None, ...]:
        """Returns the turn whose action each message is, None for messages of others.

        A turn with equal messages before it comes first, otherwise the latest one.
        """
        self._complete()
        keys: list[_Key] = []
        sources: list[int | None] = []
        turns = [(number, turn, turn.keys) for number, turn in enumerate(self._turns)][::-1]
        for message in messages:
            candidates: list[tuple[int, tuple[_Key, ...]]] = []
            if message.role == "assistant":
                candidates = [
                    (number, turn_keys)
                    for number, turn, turn_keys in turns
                    if turn.recognize(message) is not None
                ]
            same_start = (number for number, turn_keys in candidates if turn_keys == tuple(keys))
            source = next(same_start, candidates[0][0] if candidates else None)
            sources.append(source)
            keys.append(_key(message) if source is None else (source,))
        return tuple(sources)

    def _is_plain(self, observation: str) -> bool:
        """Returns whether the prompt is the last turn and `ChatTokenizer.follow`."""
        if self.chat.history != "template":
            return True
        last = self._turns[-1]
        if last.action is None or last.action.stop_text is not None or not self.chat.appends:
            return False
        end = last.ids[-1]
        if end in self.chat.stop_ids and end != self.chat.end_of_turn:
            return False
        return self.chat.is_plain(last.action.text, observation)

    def _append(self, turn: TurnState, new_ids: Sequence[int], parent: int = -1) -> None:
        """Continues an earlier turn."""
        number = parent % len(self._turns)
        before = self._turns[number]
        has_child = any(t.prompt.parent == number for t in self._turns[number + 1 :])
        turn.prompt = PromptIds(
            ids=before.ids + list(new_ids),
            parent=number,
            prompt_ids=tuple(new_ids),
            fork="edited" if has_child else None,
            session=self._use_session(before.prompt.session),
        )

    def _set_prompt(self, turn: TurnState) -> None:
        """Continues the latest turn that the conversation contains, or begins a sequence."""
        if self.chat.history != "template":
            if self._append_messages(turn):
                return
            turn.rendering = self._render(turn)
        else:
            rendering = turn.rendering = self._render(turn)
            for number in reversed(range(len(self._turns))):
                before = self._turns[number]
                start = self._rendering_of(before)
                if rendering.startswith(start) and len(rendering) > len(start):
                    new_ids = self.chat.text.encode_rendering(
                        rendering[len(start) :], previous=before.ids[-1]
                    )
                    self._append(turn, new_ids, number)
                    return
        self._begin(turn, self.chat.text.encode_rendering(turn.rendering, first=True))

    def _append_messages(self, turn: TurnState) -> bool:
        """Continues the latest turn whose conversation, with its action, comes first in this one.

        Returns:
            Whether there is one.
        """
        for number in reversed(range(len(self._turns))):
            before = self._turns[number]
            start = (*before.keys, (number,))
            if len(start) < len(turn.messages) and start == turn.keys[: len(start)]:
                messages = [message_for_template(m) for m in turn.messages[len(start) :]]
                self._append(turn, self.chat.follow_messages(messages, before.ids[-1]), number)
                return True
        return False

    def _begin(self, turn: TurnState, ids: list[int]) -> None:
        """Begins a sequence."""
        fork, session = None, 0
        if self._turns:
            fork, nearest = self._reason(turn)
            session = self._use_session(None if fork == "new" else nearest.prompt.session)
        turn.prompt = PromptIds(
            ids=ids, parent=None, prompt_ids=tuple(ids), fork=fork, session=session
        )

    def _reason(self, turn: TurnState) -> tuple[Fork, TurnState]:
        """Returns why no turn is continued, and the turn with the most equal messages."""
        keys = turn.keys
        starts = [(*before.keys, (number,)) for number, before in enumerate(self._turns)]
        shared = [_count_equal(start, keys) for start in starts]
        most = max(shared)
        nearest = [number for number, count in enumerate(shared) if count == most]
        last = self._turns[nearest[-1]]
        if not most:
            return "new", last
        if any(most == len(starts[n]) and self._turns[n].tools == turn.tools for n in nearest):
            return "template", last
        is_shorter = most < len(keys) < len(last.messages)
        return ("compacted" if is_shorter else "edited"), last

    def _use_session(self, number: int | None) -> int:
        """Marks a cache as the last one used, a new one for None; returns its number."""
        if number == self._sessions[-1]:
            return number
        if number is None:
            number, self._session_count = self._session_count, self._session_count + 1
        if number in self._sessions:
            self._sessions.remove(number)
        self._sessions = [*self._sessions, number][-_MOST_SESSIONS:]
        return number

    def _rendering_of(self, turn: TurnState) -> str:
        """Returns the rendering of a turn, its action included."""
        if turn.rendering is None:
            turn.rendering = self._render(turn) + (turn.action.rendering if turn.action else "")
        return turn.rendering

    def _render(self, turn: TurnState) -> str:
        """Renders the messages of a turn.

        Raises:
            PromptLengthError: The rendering is too long.
        """
        messages = []
        for message, source in zip(turn.messages, turn.sources, strict=True):
            action = None if source is None else self._turns[source].action
            form = None if source is None else self._turns[source].recognize(message)
            if form and action and not self.chat.template.shows(form):
                form = action.for_template()  # only the sampled text has a form of the calls
            messages.append(form or message_for_template(message))
        rendering = self.chat.template.render(messages, [tool.schema for tool in turn.tools])
        self._check_length(rendering)
        return rendering


def tokenize(
    episode: Episode,
    chat: ChatTokenizer,
    max_context: int | None = None,
    encode: Callable[[Turn], Sequence[int]] | None = None,
) -> Episode:
    """Adds to a text-only episode the ids that a rollout of the same actions would have.

    A turn that ends beyond `max_context` tokens, and all turns after it, are left out. The turns
    lose their `info`, because its per-token values refer to sampled tokens.

    Args:
        episode: The episode.
        chat: The tokenizer.
        max_context: Maximum tokens of a sequence; None is any number.
        encode: Returns the ids of an action without its end; by default those of its text.
    """
    encode = encode or (lambda turn: chat.encode(turn.text))
    end = chat.stop_ids[0] if chat.end_of_turn is None else chat.end_of_turn
    transcript = Transcript(chat, episode.prompt, max_context)
    request: ResetInfo | StepInfo = episode.reset
    turns = []
    for turn, role in zip(episode.turns, episode.roles, strict=True):
        try:
            prompt = transcript.read(turn.observation, role, request)
        except PromptLengthError:
            break
        action_ids = (*encode(turn), end)
        transcript.write(action_ids)
        if max_context is not None and len(transcript.ids) > max_context:
            break
        request = turn.info
        turns.append(
            replace(
                turn,
                parent=prompt.parent,
                fork=prompt.fork,
                prompt_ids=prompt.prompt_ids,
                action_ids=action_ids,
                logprobs=(0.0,) * len(action_ids),
                info=StepInfo(),
            )
        )
    return replace(episode, turns=tuple(turns))


def _key(message: Message) -> _Key:
    calls = [[call.name, call.arguments] for call in message.tool_calls]
    calls_json = json.dumps(calls, sort_keys=True, default=str) if calls else ""
    return message.role, message.content, calls_json, message.tool_call_id, message.name


def _count_equal(a: Sequence[_Key], b: Sequence[_Key]) -> int:
    """Returns the number of equal messages at the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
