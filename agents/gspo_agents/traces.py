"""Makes traces of episodes: a span a turn, and one for each tool call or environment step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from gspo_env.episodes.schema import Phase
from gspo_env.episodes.writer import tool_calls
from gspo_env.redaction import redact_text
from gspo_env.tracking.base import Span, Trace
from gspo_env.types import Episode, Group, Turn

_MOST_TURNS = 200
"""Turns of an episode that become spans."""
_MOST_TEXT = 20_000
"""Characters of a text."""


def traces(
    step: int, phase: Phase, groups: Mapping[int, Group], most: int, now: float | None = None
) -> Iterator[Trace]:
    """Yields traces of at most this many episodes, of as many groups as possible.

    Args:
        step: The training step.
        phase: How they were played.
        groups: The groups by index.
        most: Maximum number of traces.
        now: When the episodes were over at the latest, in seconds since 1970.
    """
    places = sorted((g, p) for p, group in groups.items() for g in range(len(group.episodes)))
    for g, p in islice(places, most):
        episode = groups[p].episodes[g]
        tags = {"step": str(step), "phase": phase, "group": f"{phase}-{step}-{p}"}
        yield _trace(f"{phase}-{step}-{p}-{g}", tags, episode, time.time() if now is None else now)


def _trace(key: str, tags: dict[str, str], episode: Episode, now: float) -> Trace:
    task, turns = episode.task, episode.turns[:_MOST_TURNS]
    times = _times(turns, now)
    returned = float(sum(turn.reward for turn in episode.turns))
    outputs = {
        "outcome": float(episode.outcome),
        "return": returned,
        "success": episode.success,
        "stop_reason": episode.stop_reason.value,
        "turns": len(episode.turns),
    }
    first = turns[0].observation if turns else episode.final_observation
    opening = [("system", episode.prompt.system), ("user", first)]
    messages = [{"role": role, "content": text} for role, text in opening if text is not None]
    root = Span(
        name="episode",
        kind="episode",
        parent=None,
        start=min((start for start, *_ in times), default=int(now * 1e9)),
        end=max((end for *_, end in times), default=int(now * 1e9)),
        inputs=_clean({"messages": messages, "seed": task.seed, "options": dict(task.options)}),
        outputs=outputs | ({"error": _clean(episode.error)} if episode.error else {}),
    )
    tags |= {
        "env": task.env_id,
        "seed": str(task.seed),
        "success": str(bool(episode.success)).lower(),
        "return": f"{returned:.6g}",
        "turns": str(len(episode.turns)),
        "stop": episode.stop_reason.value,
    }
    return Trace(
        key=key,
        name=f"{task.env_id.rpartition('/')[2]} {tags['phase']} step {tags['step']}",
        spans=(root, *_spans(episode, turns, times)),
        tags={name: str(_clean(value)) for name, value in tags.items()},
        error=str(_clean(episode.error or "")),
    )


def _times(turns: Sequence[Turn], now: float) -> list[tuple[int, int, int]]:
    """Returns when each turn began, was sampled and was over, in nanoseconds since 1970.

    Turns whose beginning is not known follow each other, and the last one is over now.
    """
    lengths = [(turn.timing.generate, turn.timing.step) for turn in turns]
    if all(turn.timing.began for turn in turns):
        begins = [turn.timing.began for turn in turns]
    else:
        remaining = [sum(map(sum, lengths[k:])) for k in range(len(turns))]
        begins = [now - seconds for seconds in remaining]
    return [
        (int(began * 1e9), int((began + generate) * 1e9), int((began + generate + step) * 1e9))
        for began, (generate, step) in zip(begins, lengths, strict=True)
    ]


def _spans(
    episode: Episode, turns: Sequence[Turn], times: Sequence[tuple[int, int, int]]
) -> list[Span]:
    """Returns a span for each turn and, behind it, those of what the environment did.

    The episode itself is span 0.
    """
    parents, roles, contexts = episode.parents, episode.roles, [0] * len(turns)
    tools = tuple(episode.prompt.tools)
    spans: list[Span] = []
    for k, (turn, (start, sampled, end)) in enumerate(zip(turns, times, strict=True)):
        info = turns[k - 1].info if k else None
        if info is not None and info.tools is not None:
            tools = tuple(info.tools)
        above = parents[k]
        before = 0 if above is None else contexts[above] + len(turns[above].action_ids)
        contexts[k] = before + len(turn.prompt_ids)
        role = roles[k]
        calls = tool_calls(turn, tools)
        spans.append(
            Span(
                name=f"turn {k}",
                kind="turn",
                parent=0,
                start=start,
                end=end,
                inputs={"messages": [{"role": role, "content": _clean(turn.observation)}]},
                outputs={"messages": [{"role": "assistant", "content": _clean(turn.text)}]},
                attributes=_facts(turn),
                input_tokens=contexts[k],
                output_tokens=len(turn.action_ids),
            )
        )
        number = len(spans)
        for name, inputs in _steps(episode, k, calls):
            after = {"observation": _clean(_next(episode, k)), "reward": float(turn.reward)}
            step = Span(name=name, kind="step", parent=number, start=sampled, end=end)
            spans.append(replace(step, inputs=_clean(inputs), outputs=after))
    return spans


def _facts(turn: Turn) -> dict[str, Any]:
    """Returns what a turn cost and what it was worth."""
    facts: dict[str, Any] = {
        "generate_seconds": round(turn.timing.generate, 6),
        "step_seconds": round(turn.timing.step, 6),
        "tokens": len(turn.action_ids),
        "reward": float(turn.reward),
        "weights_version": turn.weights_version,
    }
    if turn.weights_versions:  # (version, tokens) of each run of tokens
        facts["weights_versions"] = [list(run) for run in turn.weights_versions]
    if turn.timing.generate and turn.action_ids:
        facts["tokens_per_second"] = round(len(turn.action_ids) / turn.timing.generate, 3)
    if turn.logprobs:
        facts["mean_logprob"] = round(sum(turn.logprobs) / len(turn.logprobs), 6)
    if turn.info.reward_parts:
        facts["reward_parts"] = _clean(dict(turn.info.reward_parts))
    return facts | ({"fork": turn.fork} if turn.fork else {})


def _steps(
    episode: Episode, k: int, calls: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns name and input of each tool call of a turn, else of the step of the environment.

    Nothing, if the environment did not see the action.
    """
    turn, last = episode.turns[k], k == len(episode.turns) - 1
    if last and episode.truncated and not turn.timing.step:
        return []
    named = [
        (str(_clean(str(call["name"]))), call["arguments"]) for call in calls if "name" in call
    ]
    return named or [("step", {"action": turn.text})]


def _next(episode: Episode, k: int) -> str:
    """Returns the observation after a turn."""
    last = k == len(episode.turns) - 1
    return episode.final_observation if last else episode.turns[k + 1].observation


def _clean(value: Any) -> Any:
    """Returns JSON without secrets, lone surrogates and very long texts."""
    if isinstance(value, Mapping):
        return {str(_clean(str(key))): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, (bool, int)) or value is None:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    text = redact_text(str(value)).encode(errors="backslashreplace").decode()
    more = len(text) - _MOST_TEXT
    return text if more <= 0 else f"{text[:_MOST_TEXT]}… ({more} more characters)"
