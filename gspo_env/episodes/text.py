"""One episode as text that a person can read from top to bottom."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from textwrap import indent

from gspo_env.episodes.schema import EpisodeRecord, TurnRecord
from gspo_env.redaction import visible
from gspo_env.types import Episode, Turn

_WIDTH = 80
_MAX_TEXT = 4000
"""Characters of one text of a kept episode."""
_VERDICTS = {True: "success", False: "no success"}


def render_episode(episode: Episode, decode: Callable[[Sequence[int]], str] | None = None) -> str:
    """Renders the task, every turn and how the episode ended; hidden characters as escapes.

    Args:
        episode: The episode.
        decode: Returns the text of token ids; then a turn shows the whole text that the model read,
            with the list of tools and the marks of the chat template, in place of the observation.
    """
    prompt, task = episode.prompt, episode.task
    options = ", ".join(f"{name}={value!r}" for name, value in task.options.items())
    parts = [_rule(f"{task.env_id}, seed {task.seed}" + (f", {options}" if options else ""))]
    if prompt.system is not None and decode is None:
        parts.append(_block("system prompt", prompt.system))
    if decode is None:
        parts += [_block(f"earlier {m.role} message", m.content) for m in prompt.messages]
    for number, turn in enumerate(episode.turns, start=1):
        read = decode(turn.prompt_ids) if decode and turn.prompt_ids else None
        parts.append(_turn(number, turn, turn.text, read=read))
    verdict = "its environment failed" if episode.failed else _VERDICTS[episode.success]
    end = f"{verdict}: outcome {episode.outcome:+.4g}, stopped by {episode.stop_reason.value}"
    count = f"{len(episode.turns)} turns, {episode.model_tokens} tokens sampled"
    parts.append("\n".join([_rule(end), count, *_ending(episode)]))
    return "\n\n".join(parts) + "\n"


def render_record(record: EpisodeRecord) -> str:
    """Renders a kept episode like `render_episode`; long texts are cut."""
    options = f", {record.options}" if record.options else ""
    parts = [_rule(f"{record.env}, seed {record.seed}{options}"), *_earlier_messages(record)]
    for number, turn in enumerate(record.turns, start=1):
        advantages = [value for value in turn.advantages or () if value is not None]
        parts.append(_turn(number, turn, turn.action, advantages))
    end = f"return {record.total_reward:+.4g}, outcome {record.outcome:+.4g}"
    end = f"{_VERDICTS[record.success]}: {end}, stopped by {record.stop_reason}"
    parts.append("\n".join([_rule(end), *_ending(record)]))
    return "\n\n".join(parts) + "\n"


def _earlier_messages(record: EpisodeRecord) -> Iterator[str]:
    """Yields the messages before the first observation."""
    try:
        messages = json.loads((record.turns[0].messages if record.turns else None) or "[]")
        for message in messages:
            yield _block(f"{message['role']} message", str(message.get("content", "")), _MAX_TEXT)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ):  # of a file that was changed
        yield _block("messages", "(not readable)")


def _turn(
    number: int,
    turn: Turn | TurnRecord,
    action: str,
    advantages: Sequence[float] = (),
    read: str | None = None,
) -> str:
    title = f"turn {number}: reward {turn.reward:+.4g}"
    if advantages:
        title += f", mean advantage {sum(advantages) / len(advantages):+.4g}"
    if turn.action_ids:
        title += f", {len(turn.prompt_ids)} tokens read, {len(turn.action_ids)} sampled"
    longest = _MAX_TEXT if isinstance(turn, TurnRecord) else None
    before = ("read", read) if read is not None else ("observation", turn.observation)
    blocks = [_block(*before, longest), _block("action", action, longest)]
    return "\n".join([_rule(title, "-"), *blocks])


def _ending(episode: Episode | EpisodeRecord) -> Iterator[str]:
    longest = _MAX_TEXT if isinstance(episode, EpisodeRecord) else None
    if episode.final_observation:
        yield _block("final observation", episode.final_observation, longest)
    if episode.error is not None:
        yield _block("error", episode.error, longest)


def _block(title: str, text: str, longest: int | None = None) -> str:
    """Indents every line, empty ones too, so that text cannot pass for a heading of this report."""
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}\n({len(text) - longest} more characters)"
    return f"{title}:\n" + indent(visible(text) or "(nothing)", "  | ", lambda _line: True)


def _rule(title: str, line: str = "=") -> str:
    return f"{line * 2} {visible(title)} ".ljust(_WIDTH, line)
