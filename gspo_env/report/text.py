"""One episode as text that a person can read from top to bottom."""

from __future__ import annotations

from textwrap import indent

from gspo_env.types import Episode, Turn
from gspo_env.visible import visible

_WIDTH = 80


def render_episode(episode: Episode) -> str:
    """Renders the task, every turn and how the episode ended; hidden characters as escapes."""
    prompt = episode.prompt
    told = [] if prompt.system is None else [("system prompt", prompt.system)]
    told += [(f"earlier {message.role} message", message.content) for message in prompt.messages]
    parts = [_header(episode)]
    parts += [_block(title, text) for title, text in told]
    parts += [_turn(number, turn) for number, turn in enumerate(episode.turns, start=1)]
    parts.append(_footer(episode))
    return "\n\n".join(parts) + "\n"


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
