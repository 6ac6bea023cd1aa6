"""Plays branched, compacted and forked episodes, and compares them with replays and the trainer.

    python stress/branches.py                 # 1,000 branches and 500 episodes
    python stress/branches.py --branches 200 --episodes 100

Each branched episode of every built-in environment is played again from its first turn, in an
environment of its own: each observation and reward has to be the same, byte by byte. A changed byte
has to be found. Then a tiny model plays episodes that branch, are compacted, or fork: engine and
trainer have to agree within 1e-4, and rollout and update have to compute few tokens twice.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rollout"))
import conftest
import forks
from rollouts import collector, episodes
from test_branching import KWARGS, Babbler, branch
from test_compaction import COMPACTION, LIMITS, Long

from gspo_env.batch.packing import microbatches, pack
from gspo_env.batch.sample import to_samples
from gspo_env.credit.branches import shared_turns
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.registration import _BUILTIN, make_env
from gspo_env.errors import ConfigError, EnvironmentContractError, MissingExtraError
from gspo_env.rollout.branching import EveryTurn
from gspo_env.rollout.play import PolicyOutput, play_now
from gspo_env.types import Episode, Group, Task


def played_again(env: Any, episode: Episode) -> list[tuple[str, float]]:
    """Returns the observations and rewards of the same actions in another environment."""

    def act(inputs: Any) -> PolicyOutput:
        turn = episode.turns[inputs.turn]
        return PolicyOutput(text=turn.text, action_ids=turn.action_ids)

    again = play_now(env, episode.task, act, max_turns=len(episode.turns))
    return [(turn.observation, turn.reward) for turn in again.turns]


def branched(chat: Any, count: int) -> Iterator[tuple[int, int]]:
    """Yields how many branches of each environment were replayed, and how many differ."""
    for env_id in sorted(_BUILTIN):
        make = lambda name=env_id: make_env(name, **KWARGS.get(name, {}))  # noqa: E731
        try:
            env, tasks, branches = make(), 4, list[Episode]()
            while len(branches) < count and tasks <= 256:
                limits = {"tasks": tasks, "size": 2, "engine": Babbler}
                groups, _ = branch(chat, make, EveryTurn(continuations=3), env_id, **limits)
                branches, tasks = [*filter(shared_turns, episodes(groups))], 4 * tasks
        except (MissingExtraError, ConfigError, EnvironmentContractError) as error:
            print(f"{env_id}: not played: {str(error)[:80]}", flush=True)
            continue
        wrong = 0
        for episode in branches[:count]:
            records = [(turn.observation, turn.reward) for turn in episode.turns]
            wrong += played_again(env, episode) != records
        print(f"{env_id}: {len(branches[:count])} branches, {wrong} differ", flush=True)
        yield len(branches[:count]), wrong


def compared(name: str, player: Any, groups: list[Group], fed: int) -> bool:
    """Prints how engine and trainer agree, and what is computed twice."""
    played = episodes(groups)
    worst = float(forks.differences(player.model, played).max())
    rollout = fed / forks.fed_at_least(played)
    computed = distinct = 0
    for group in groups:
        samples = to_samples(group.episodes, [np.zeros(len(e.turns)) for e in group.episodes])
        rows = microbatches(samples, 1 << 16, share=True)
        computed += sum(len(pack(part).input_ids_T) for part in rows)
        turns = (turn for e in group.episodes for turn in e.turns[shared_turns(e) :])
        distinct += sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in turns)
    update = computed / distinct
    print(
        f"{name}: {len(played)} episodes, {worst:.1e}, rollout {rollout:.3f}, update {update:.3f}"
    )
    return worst <= 1e-4 and rollout <= 1.1 and update <= 1.05


def main() -> int:
    """Returns 1 if anything differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--branches", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=500)
    args = parser.parse_args()
    chat = forks.make_chat()
    counts = [*branched(chat, -(-args.branches // 16))]
    total, wrong = map(sum, zip(*counts, strict=True))
    make = lambda: make_env("gspo/Additive-v0")  # noqa: E731
    (group,), _ = branch(chat, make, EveryTurn(), tasks=1, size=1)
    first, *rest = group.episodes[-1].turns
    turns = (replace(first, observation=f"{first.observation} "), *rest)
    records = [(turn.observation, turn.reward) for turn in turns]
    found = played_again(make(), replace(group.episodes[-1], turns=turns)) != records
    print(
        f"{total} branches, {wrong} differ; a changed byte is {'found' if found else 'NOT found'}"
    )

    player, third = conftest.player._fixture_function(), args.episodes // 3
    good = wrong == 0 and found and total >= args.branches
    lookup = lambda: make_env(player.env_id)  # noqa: E731
    few = {"concurrency": 16, "group_size": 4}
    for name, make, choice, limits, tasks in (
        ("branched", lookup, EveryTurn(), {"max_turns": 6} | few, third // 40),
        ("compacted", Long, COMPACTION, LIMITS | few, third // 4),
    ):
        running = choice.wrap(collector(player, make, **limits))
        every = [Task(env_id="test", seed=n) for n in range(tasks + 1)]
        groups = asyncio.run(running.collect(every, seed=0))
        good = compared(name, player, groups, running.engine.fed_tokens) and good
    # a slot for each of the two agents of 16 episodes
    engine = TransformersEngine(forks.make_model(chat), max_slots=32, max_context=300)
    played = forks.play(engine, chat, third + 1)
    worst = float(forks.differences(forks.make_model(chat), played).max())
    rollout = engine.fed_tokens / forks.fed_at_least(played)
    computed, distinct = map(sum, zip(*map(forks.computed_and_distinct, played), strict=True))
    update = computed / distinct
    print(
        f"forked: {len(played)} episodes, {worst:.1e}, rollout {rollout:.3f}, update {update:.3f}"
    )
    return 0 if good and worst <= 1e-4 and rollout <= 1.1 and update <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
