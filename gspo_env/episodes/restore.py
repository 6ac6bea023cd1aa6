"""Makes an `Episode` of the record that a run has kept of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, get_args

from gspo_env.chat.messages import read_tools
from gspo_env.episodes.schema import EpisodeRecord, TurnRecord
from gspo_env.errors import DAMAGE, OutputError, raised_as
from gspo_env.tools.tool import Tool
from gspo_env.types import (
    Ending,
    Episode,
    Fault,
    Group,
    Message,
    Prompt,
    ResetInfo,
    Role,
    StepInfo,
    StopReason,
    Task,
    Timing,
    ToolCall,
    Turn,
)


def to_groups(records: Sequence[EpisodeRecord]) -> list[Group]:
    """Returns the groups of episodes that follow each other; see `to_episode`."""
    groups = [tuple(map(to_episode, each)) for _, each in groupby(records, lambda r: r.group)]
    return [Group(task=episodes[0].task, episodes=episodes) for episodes in groups]


def to_episode(record: EpisodeRecord) -> Episode:
    """Returns an episode with all that its record has: texts, tokens, rewards and how it ended.

    A tool has no function. The keys of `info` that have no column have their defaults.

    Raises:
        OutputError: A text or a number was changed so that no run has written it.
    """
    with raised_as(OutputError, f"the kept episode {record.episode!r} is damaged", *DAMAGE):
        return _episode(record)


def _episode(record: EpisodeRecord) -> Episode:
    messages = _messages(record.messages) or ()
    system = messages[0].content if messages and messages[0].role == "system" else None
    first = record.turns[0] if record.turns else None
    reason = StopReason(record.stop_reason)
    if record.seed < 0:
        raise ValueError(f"its seed is {record.seed}; expected at least 0")
    return Episode(
        task=Task(env_id=record.env, seed=record.seed, options=_json(record.options, dict)),
        prompt=Prompt(
            system=system,
            tools=_tools(record.tools) or (),
            messages=messages if system is None else messages[1:],
        ),
        turns=tuple(_turn(t, record.turns[k + 1 : k + 3]) for k, t in enumerate(record.turns)),
        ending=Ending(
            reason=reason,
            outcome=record.outcome if record.own_outcome else None,
            success=record.success,
            fault=None
            if record.error is None
            else Fault(reason=reason, message=record.error, where=""),
        ),
        final_observation=record.final_observation,
        reset=ResetInfo(
            task_key=record.task_key,
            agent=None if first is None else first.agent,
            state_key=None if first is None else first.state_key,
        ),
    )


def _turn(turn: TurnRecord, rest: Sequence[TurnRecord]) -> Turn:
    """Returns a turn.

    Args:
        turn: Its record.
        rest: The two turns after it: a summary lies between an observation and the action.
    """
    parts = _json(turn.reward_parts, dict)
    info = StepInfo(reward_parts=parts)
    if rest:
        following = rest[0]
        met = next((t for t in rest if t.kind == "action"), following)
        if met.role not in get_args(Role):
            raise ValueError(f"a role is {met.role!r}")
        info = StepInfo(
            reward_parts=parts,
            observation_role=met.role,  # type: ignore[arg-type]
            messages=_messages(following.messages),
            tools=_tools(following.tools),
            agent=following.agent,
            state_key=None if turn.kind == "summary" else met.state_key,
        )
    if turn.kind not in ("action", "summary"):
        raise ValueError(f"the kind of a turn is {turn.kind!r}")
    runs = [(v, len([*same])) for v, same in groupby(turn.token_versions or ())]
    return Turn(
        kind=turn.kind,  # type: ignore[arg-type]
        observation=turn.observation,
        text=turn.action,
        reward=turn.reward,
        parent=turn.parent,
        fork=turn.fork,  # type: ignore[arg-type]
        prompt_ids=turn.prompt_ids,
        action_ids=turn.action_ids,
        logprobs=turn.engine_logprobs,
        weights_version=turn.weights_version,
        weights_versions=tuple(runs),
        timing=Timing(generate=turn.generate_seconds, step=turn.step_seconds),
        state_key=turn.state_key,
        info=info,
    )


def _json(text: str | None, kind: type) -> Any:
    value = kind() if text is None else json.loads(text)
    if not isinstance(value, kind):
        raise ValueError(f"expected a JSON {kind.__name__}, got {text!r:.80}")
    return value


def _messages(text: str | None) -> tuple[Message, ...] | None:
    return None if text is None else tuple(map(_message, _json(text, list)))


def _message(tree: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in tree.get("tool_calls", ()))
    message = Message(**{**tree, "tool_calls": calls})
    if not isinstance(message.content, str) or not isinstance(message.role, str):
        raise ValueError(f"a message is {tree!r:.80}")
    return message


def _tools(text: str | None) -> tuple[Tool, ...] | None:
    return None if text is None else tuple(read_tools(_json(text, list)))
