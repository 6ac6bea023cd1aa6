"""One episode as text that a person can read from top to bottom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from textwrap import indent

from gspo_env.episodes.schema import EpisodeRecord
from gspo_env.redaction import visible
from gspo_env.types import Episode, Turn

_WIDTH = 80
_MOST = 4000
"""Characters of one text of a kept episode."""


def render_episode(episode: Episode) -> str:
    """Renders the task, every turn and how the episode ended; hidden characters as escapes."""
    prompt = episode.prompt
    messages = [] if prompt.system is None else [("system prompt", prompt.system)]
    messages += [
        (f"earlier {message.role} message", message.content) for message in prompt.messages
    ]
    parts = [_header(episode)]
    parts += [_block(title, text) for title, text in messages]
    parts += [_turn(number, turn) for number, turn in enumerate(episode.turns, start=1)]
    parts.append(_footer(episode))
    return "\n\n".join(parts) + "\n"


def render_record(record: EpisodeRecord) -> str:
    """Renders a kept episode like `render_episode`; long texts are cut."""
    options = f", {record.options}" if record.options else ""
    parts = [_rule(f"{record.env}, seed {record.seed}{options}"), *_earlier_messages(record)]
    for number, turn in enumerate(record.turns, start=1):
        title = f"turn {number}: reward {turn.reward:+.4g}"
        advantages = [value for value in turn.advantages or () if value is not None]
        if advantages:
            title += f", mean advantage {sum(advantages) / len(advantages):+.4g}"
        if turn.action_ids:
            title += f", {len(turn.prompt_ids)} tokens read, {len(turn.action_ids)} sampled"
        blocks = [
            _block("observation", _cut(turn.observation)),
            _block("action", _cut(turn.action)),
        ]
        parts.append("\n".join([_rule(title, "-"), *blocks]))
    verdict = {True: "success", False: "no success", None: "no verdict"}[record.success]
    end = f"{verdict}: return {record.total_reward:+.4g}, outcome {record.outcome:+.4g}"
    parts.append(_rule(f"{end}, stopped by {record.stop_reason}"))
    if record.final_observation:
        parts.append(_block("final observation", _cut(record.final_observation)))
    if record.error is not None:
        parts.append(_block("error", _cut(record.error)))
    return "\n\n".join(parts) + "\n"


def _earlier_messages(record: EpisodeRecord) -> Iterator[str]:
    """Yields the messages before the first observation."""
    try:
        messages = json.loads((record.turns[0].messages if record.turns else None) or "[]")
        for message in messages:
            yield _block(f"{message['role']} message", _cut(str(message.get("content", ""))))
    except (ValueError, TypeError, KeyError, AttributeError):  # of a file that was changed
        yield _block("messages", "(not readable)")


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]}\n({len(text) - _MOST} more characters)"


def _header(episode: Episode) -> str:
    task = episode.task
    options = ", ".join(f"{name}={value!r}" for name, value in task.options.items())
    return _rule(f"{task.env_id}, seed {task.seed}" + (f", {options}" if options else ""))


def _turn(number: int, turn: Turn) -> str:
    title = f"turn {number}: reward {turn.reward:+.4g}"
    if turn.action_ids:
        title += f", {len(turn.prompt_ids)} tokens read, {len(turn.action_ids)} sampled"
    blocks = [_block("observation", turn.observation), _block("action", turn.text)]
    return "\n".join([_rule(title, "-"), *blocks])


def _footer(episode: Episode) -> str:
    verdict = {True: "success", False: "no success", None: "no verdict"}[episode.success]
    if episode.failed:
        verdict = "its environment failed"
    title = f"{verdict}: outcome {episode.outcome:+.4g}, stopped by {episode.stop_reason.value}"
    lines = [_rule(title), f"{len(episode.turns)} turns, {episode.model_tokens} tokens sampled"]
    if episode.final_observation:
        lines.append(_block("final observation", episode.final_observation))
    if episode.error is not None:
        lines.append(_block("error", episode.error))
    return "\n".join(lines)


def _block(title: str, text: str) -> str:
    """Indents every line, empty ones too, so that text cannot pass for a heading of this report."""
    return f"{title}:\n" + indent(visible(text) or "(nothing)", "  | ", lambda _line: True)


def _rule(title: str, line: str = "=") -> str:
    return f"{line * 2} {visible(title)} ".ljust(_WIDTH, line)
