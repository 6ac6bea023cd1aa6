"""One episode as text that a person can read from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from textwrap import indent

from gspo_env.episodes.schema import EpisodeRecord, TurnRecord
from gspo_env.errors import figure
from gspo_env.redaction import visible
from gspo_env.types import Episode, Turn

_WIDTH = 80
_VERDICTS = {True: "success", False: "no success"}


def render_episode(
    episode: Episode | EpisodeRecord, decode: Callable[[Sequence[int]], str] | None = None
) -> str:
    """Renders the task, every turn and how the episode ended; hidden characters as escapes.

    Args:
        episode: The episode.
        decode: Returns the text of token ids; then a turn shows the whole text that the model read,
            with the list of tools and the marks of the chat template, in place of the observation.
    """
    if isinstance(episode, EpisodeRecord):
        return _render_record(episode)
    prompt, task = episode.prompt, episode.task
    options = ", ".join(f"{name}={value!r}" for name, value in task.options.items())
    parts = [_rule(f"{task.env_id}, seed {task.seed}" + (f", {options}" if options else ""))]
    if prompt.system is not None and decode is None:
        parts.append(_block("system prompt", prompt.system))
    if decode is None:
        parts += [_block(f"earlier {m.role} message", m.content) for m in prompt.messages]
    for number, turn in enumerate(episode.turns, start=1):
        read = decode(turn.prompt_ids) if decode and turn.prompt_ids else None
        parts.append(_turn(number, turn, read))
    verdict = "its environment failed" if episode.failed else _VERDICTS[episode.success]
    outcome = figure(episode.outcome, "+.4g")
    end = f"{verdict}: outcome {outcome}, stopped by {episode.stop_reason.value}"
    count = f"{len(episode.turns)} turns, {episode.model_tokens} tokens sampled"
    parts.append("\n".join([_rule(end), count, *_ending(episode)]))
    return "\n\n".join(parts) + "\n"


def _render_record(record: EpisodeRecord) -> str:
    options = f", {record.options}" if record.options else ""
    parts = [_rule(f"{record.env}, seed {record.seed}{options}")]
    if record.messages:
        parts.append(_block("messages before", record.messages))
    parts += [_turn(number, turn, None) for number, turn in enumerate(record.turns, start=1)]
    outcome = figure(record.outcome, "+.4g")
    end = f"{_VERDICTS[record.success]}: outcome {outcome}, stopped by {record.stop_reason}"
    parts.append("\n".join([_rule(end), *_ending(record)]))
    return "\n\n".join(parts) + "\n"


def _turn(number: int, turn: Turn | TurnRecord, read: str | None) -> str:
    title = f"turn {number}: reward {figure(turn.reward, '+.4g')}"
    if turn.action_ids:
        title += f", {len(turn.prompt_ids)} tokens read, {len(turn.action_ids)} sampled"
    before = ("read", read) if read is not None else ("observation", turn.observation)
    blocks = [_block(*before), _block("action", turn.text)]
    return "\n".join([_rule(title, "-"), *blocks])


def _ending(episode: Episode | EpisodeRecord) -> Iterator[str]:
    if episode.final_observation:
        yield _block("final observation", episode.final_observation)
    if episode.error is not None:
        yield _block("error", episode.error)


def _block(title: str, text: str) -> str:
    """Indents every line, empty ones too, so that text cannot pass for a heading of this report."""
    return f"{title}:\n" + indent(visible(text) or "(nothing)", "  | ", lambda _line: True)


def _rule(title: str, line: str = "=") -> str:
    return f"{line * 2} {visible(title)} ".ljust(_WIDTH, line)
