"""`gspo-env rescore`."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from gspo_env.cli.capture import check_new_file
from gspo_env.errors import ConfigError, RolloutError
from gspo_env.registry import load_function
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.types import Group


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
        from gspo_env.episodes.restore import to_groups
        from gspo_env.runs import Run

        if not self.folder or not self.rewards:
            raise ConfigError("expected the folder of a run and --rewards")
        if self.out:
            check_new_file(self.out)
        run = Run.open(self.folder)
        records = [r for r in read_episodes(run.folder, phases=self.phases) if r.turns]
        before = to_groups(records)
        now = asyncio.run(self._score(before))
        print("\n".join(_compare(before, now)))
        if self.out:
            scored = [episode for group in now for episode in group.episodes]
            with Path(self.out).open("x", encoding="utf-8") as file:
                for record, episode in zip(records, scored, strict=True):
                    row = {"episode": record.episode, "before": record.total_reward}
                    row |= {"now": float(episode.rewards.sum()), "error": episode.error}
                    parts = dict(episode.turns[-1].info.reward_parts)
                    file.write(json.dumps({**row, "parts": parts}) + "\n")

    async def _score(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups with the new rewards in place of the old ones."""
        from gspo_env.env.registration import find_builtin
        from gspo_env.saved import read_saved

        saved = read_saved(self.folder)
        arguments = dict(saved.tree.get("env_kwargs", {})) if saved else {}
        if self.data:
            arguments["data"] = self.data
        env: Any = load_function(find_builtin("gspo/Dataset-v0") or "", "environment")
        scored: list[Group] = await env.rescore(groups, self.rewards, self.weights, arguments)
        return scored


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
    count = sum(len(group.episodes) for group in now)
    if not played:
        errors = [e.error for groups in (now, before) for g in groups for e in g.episodes]
        first = next(filter(None, errors), "there are none of these phases")
        raise RolloutError(f"none of {count} episodes has a score; the first error: {first}")
    old, new = (EpisodeStats.of([pair[n] for pair in played]) for n in (0, 1))
    returns = [[(a.rewards.sum(), b.rewards.sum()) for a, b in group] for group in groups]
    swaps = [
        (a - c) * (b - d) < 0
        for group in returns
        for (a, b), (c, d) in itertools.combinations(group, 2)
    ]
    flat = [sum(len({pair[n] for pair in group}) < 2 for group in returns) for n in (0, 1)]
    return [
        f"episodes  {count} in {len(now)} groups, {count - len(played)} lost",
        f"return    {old.mean_return:z.3f} before, {new.mean_return:z.3f} now",
        f"order     {sum(swaps)} of {len(swaps)} pairs of a group are swapped",
        f"flat      {flat[0]} groups with equal returns before, {flat[1]} now",
        *(f"{name}  {value:z.3f}" for name, value in new.reward_parts.items()),
    ]
