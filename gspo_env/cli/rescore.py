"""`gspo-env rescore`."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from gspo_env.cli.capture import check_new_file
from gspo_env.errors import ConfigError
from gspo_env.registry import load_function
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.episodes import EpisodeRecord
    from gspo_env.types import Episode, Group


@settings
class Rescore:
    """Score the kept episodes of a run with other rewards, without playing."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of the run."""
    rewards: tuple[str, ...] = ()
    """The rewards, as in `gspo/Dataset-v0`, such as `mine.py:exact_match` or `judges.py:JUDGE`."""
    weights: tuple[float, ...] = ()
    """One for each reward; 1 by default."""
    data: str = ""
    """The rows that the rewards read; those of the run by default."""
    phases: tuple[str, ...] = ("train",)
    """Any of train, eval and greedy."""
    out: str = ""
    """File to write: a JSON line for each episode with its return before and now."""

    def run(self) -> None:
        """Prints what would have changed."""
        from gspo_env.episodes import read_episodes

        if not self.folder or not self.rewards:
            raise ConfigError("expected the folder of a run and --rewards")
        if self.out:
            check_new_file(self.out)
        by_group: dict[str, list[EpisodeRecord]] = {}
        for record in read_episodes(self.folder, phases=self.phases):
            if record.turns:
                by_group.setdefault(record.group, []).append(record)
        try:
            before = [_to_group(records) for records in by_group.values()]
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"an episode of {self.folder} is damaged: {error}") from error
        now = asyncio.run(self._score(before))
        print("\n".join(_compare(before, now)))
        if self.out:
            records = [record for group in by_group.values() for record in group]
            scored = [episode for group in now for episode in group.episodes]
            with Path(self.out).open("x", encoding="utf-8") as file:
                for record, episode in zip(records, scored, strict=True):
                    row = {"episode": record.episode, "before": record.total_reward}
                    row |= {"now": float(episode.rewards.sum()), "error": episode.error}
                    parts = dict(episode.turns[-1].info.reward_parts)
                    file.write(json.dumps({**row, "parts": parts}) + "\n")

    async def _score(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups with the new rewards in place of the old ones."""
        from gspo_env.trust import read_saved

        saved = read_saved(self.folder)
        kwargs: dict[str, Any] = dict(saved.tree.get("env_kwargs", {})) if saved else {}
        data = self.data or kwargs.get("data")
        names = [name for name in ("split", "subset", "held_out") if name in kwargs]
        make_rows = load_function("gspo_envs.data.rows:TaskRows", "data")
        rows = make_rows(data, **{name: kwargs[name] for name in names}) if data else None
        load = load_function("gspo_envs.data.rewards:Rewards", "rewards")
        rewards = load("rescore", list(self.rewards), list(self.weights))
        bare = [_score_each(group, rewards, rows, kwargs.get("score")) for group in groups]
        add = rewards.of_group(kwargs.get("success"))
        return await asyncio.gather(*map(add, bare)) if add else bare


def _score_each(group: Group, rewards: Any, rows: Any, when: Any) -> Group:
    """Scores each episode with the rewards that see one."""
    from gymnasium.utils.seeding import np_random

    from gspo_env.rewards.judge import conversation, opening
    from gspo_env.types import StopReason

    make = load_function("gspo_envs.data.rewards:Attempt", "rewards")
    task, row = group.task, {}
    if rows is not None:
        row, _ = rows.pick(np_random(task.seed)[0], task.seed, task.options.get("row"))
    episodes = []
    for episode in group.episodes:
        turns, prompt = list(episode.turns), _plain(opening(episode))
        for k in range(len(turns)):
            value, parts = 0.0, {}
            is_last = k == len(turns) - 1
            # `step` never saw an action that was cut
            is_cut = is_last and episode.stop_reason is StopReason.MAX_TURN_TOKENS
            if (when == "turn" or is_last) and not is_cut:
                spoken = _plain(conversation(episode, k))
                ids = tuple(i for turn in turns[: k + 1] for i in turn.action_ids)
                attempt = make(
                    prompt=prompt, completion=spoken, row=row, plain=len(prompt) == 1, token_ids=ids
                )
                value, parts = rewards.judge(attempt)
            info = replace(turns[k].info, reward_parts=parts)
            turns[k] = replace(turns[k], reward=value, info=info)
        ending = replace(episode.ending, outcome=None)
        episodes.append(replace(episode, turns=tuple(turns), ending=ending))
    return replace(group, episodes=tuple(episodes))


def _plain(messages: Sequence[tuple[str, str]]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": text} for role, text in messages)


def _to_group(records: Sequence[EpisodeRecord]) -> Group:
    from gspo_env.types import Group

    episodes = tuple(map(_to_episode, records))
    return Group(task=episodes[0].task, episodes=episodes)


def _to_episode(record: EpisodeRecord) -> Episode:
    """Returns what rewards and estimators read of a kept episode."""
    from gspo_env.serving.dialects.chat import read_messages
    from gspo_env.types import Ending, Episode, Prompt, StepInfo, StopReason, Task, Turn

    roles = [turn.role for turn in record.turns[1:]]
    turns = tuple(
        Turn(
            text=turn.action,
            observation=turn.observation,
            reward=turn.reward,
            action_ids=turn.action_ids,
            logprobs=turn.engine_logprobs,
            state_key=turn.state_key,
            info=StepInfo(observation_role="tool" if role == "tool" else "user"),
        )
        for turn, role in zip(record.turns, [*roles, "user"], strict=True)
    )
    messages = tuple(read_messages(json.loads(record.turns[0].messages or "[]")))
    options = dict(json.loads(record.options or "{}"))
    if record.seed < 0:
        raise ValueError(f"its seed is {record.seed}; expected at least 0")
    return Episode(
        task=Task(env_id=record.env, seed=record.seed, options=options),
        prompt=Prompt(messages=messages),
        turns=turns,
        ending=Ending(
            reason=StopReason(record.stop_reason),
            outcome=record.outcome if record.own_outcome else None,
            success=record.success,
        ),
    )


def _compare(before: Sequence[Group], now: Sequence[Group]) -> list[str]:
    """Returns the lines to print: what would have changed, without the episodes that are lost."""
    from gspo_env.rollout.metrics import EpisodeStats

    groups = [
        [
            (one, two)
            for one, two in zip(old.episodes, new.episodes, strict=True)
            if not one.failed and not two.failed
        ]
        for old, new in zip(before, now, strict=True)
    ]
    played = [pair for group in groups for pair in group]
    old, new = (EpisodeStats.of([pair[n] for pair in played]) for n in (0, 1))
    returns = [[(a.rewards.sum(), b.rewards.sum()) for a, b in group] for group in groups]
    swaps = [
        (a - c) * (b - d) < 0
        for group in returns
        for (a, b), (c, d) in itertools.combinations(group, 2)
    ]
    flat = [sum(len({pair[n] for pair in group}) < 2 for group in returns) for n in (0, 1)]
    count = sum(len(group.episodes) for group in now)
    return [
        f"episodes  {count} in {len(now)} groups, {count - len(played)} lost",
        f"return    {old.mean_return:.3f} before, {new.mean_return:.3f} now",
        f"order     {sum(swaps)} of {len(swaps)} pairs of a group are swapped",
        f"flat      {flat[0]} groups with equal returns before, {flat[1]} now",
        *(f"{name}  {value:.3f}" for name, value in new.reward_parts.items()),
    ]
