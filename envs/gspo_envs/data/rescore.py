"""Scores kept episodes with other rewards, as if these had been the environment's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymnasium.utils.seeding import np_random

from gspo_env.rollout.failures import EnvironmentFailed, FaultLog, limited, lose_unscored, lost
from gspo_env.types import Episode, Group, StopReason
from gspo_env.types import Message as EpisodeMessage
from gspo_envs.data.rewards import Attempt, Rewards
from gspo_envs.data.rows import Message, TaskRows, is_text, prompt_column


async def rescore(
    groups: Sequence[Group],
    rewards: Sequence[str],
    weights: Sequence[float],
    settings: Mapping[str, Any],
) -> list[Group]:
    """Returns groups with these rewards in place of the old ones.

    Args:
        groups: Episodes with turns.
        rewards: See `gspo_envs.data.dataset.DatasetEnv`.
        weights: One for each reward, or none.
        settings: The other arguments of the environment.
    """
    scorer = Rewards("rescore", list(rewards), list(weights))
    opened = {name: settings[name] for name in ("split", "subset", "held_out") if name in settings}
    data = settings.get("data")
    rows = TaskRows(data, **opened) if data else None
    add, log = scorer.of_group(settings.get("success")), FaultLog()

    async def score(group: Group) -> Group:
        row: Mapping[str, Any] = {}
        if rows is not None:
            task = group.task
            row, _ = rows.pick(np_random(task.seed)[0], task.seed, task.options.get("row"))

        async def alone(one: Group) -> Group:
            return replace(one, episodes=(_score(one.episodes[0], scorer, row, settings),))

        parts = [replace(group, episodes=(episode,)) for episode in group.episodes]
        parts = [await _attempt(part, alone, log) for part in parts]
        group = replace(group, episodes=tuple(part.episodes[0] for part in parts))
        return await _attempt(group, add, log) if add else group

    scored = await asyncio.gather(*map(score, groups))
    return [lose_unscored(group, log) for group in scored]


async def _attempt(
    group: Group, score: Callable[[Group], Awaitable[Group]], log: FaultLog
) -> Group:
    """Scores a group, whose episodes are lost if a reward raises."""
    try:
        async with limited("a reward", None):
            return await score(group)
    except EnvironmentFailed as failed:
        log.note(group.task, failed.fault)
        return replace(group, episodes=tuple(lost(e, failed.fault) for e in group.episodes))


def _score(
    episode: Episode, rewards: Rewards, row: Mapping[str, Any], settings: Mapping[str, Any]
) -> Episode:
    """Scores an episode with the rewards that see one."""
    turns = list(episode.turns)
    prompt = _plain(episode.prompt.first_messages(turns[0].observation))
    column = prompt_column(row, settings.get("column", ""))
    alone = [m["role"] for m in prompt if m["role"] != "system"] == ["user"]
    plain = is_text(row[column]) if column in row else alone
    ids: tuple[int, ...] = ()
    for k in episode.action_turns:
        turn = turns[k]
        value, parts, scored = None, dict[str, float](), None
        ids += turn.action_ids
        is_last = k == len(turns) - 1
        # `step` never saw an action that was cut
        is_cut = is_last and episode.stop_reason is StopReason.MAX_TURN_TOKENS
        if (settings.get("score") == "turn" or is_last) and not is_cut:
            completion = _plain(episode.played_messages(k))
            attempt = Attempt(
                prompt=prompt, completion=completion, row=row, plain=plain, token_ids=ids
            )
            value, parts = rewards.judge(attempt)
            scored = value is not None
        info = replace(turn.info, reward_parts=parts, scored=scored)
        turns[k] = replace(turn, reward=value or 0.0, info=info)
    return replace(episode, turns=tuple(turns), ending=replace(episode.ending, outcome=None))


def _plain(messages: Iterable[EpisodeMessage]) -> tuple[Message, ...]:
    return tuple({"role": message.role, "content": message.content} for message in messages)
