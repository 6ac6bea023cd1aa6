"""Splits the tasks of environments: those of the evaluation, and those that training may play."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from numbers import Integral
from typing import Any

from gspo_env.errors import EnvironmentContractError
from gspo_env.rollout.play import look
from gspo_env.rollout.pool import EnvPool, EnvPools, play_again, play_pooled
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.seeding import HELD_OUT, SEEDS, derive_seed
from gspo_env.types import Episode, ResetInfo, Task

logger = logging.getLogger(__name__)

_PROBES = 64
"""Training tasks that are drawn to see how many of them are tasks of the evaluation."""
_SHARE = 0.5
"""Largest share of the training tasks that is held out."""
_MOST = 20
"""Maximum evaluation seeds to try, as a multiple of the tasks of an evaluation."""

_READERS = 16
"""Maximum environments that are reset at the same time to read task keys."""

Read = Callable[[Sequence[Task]], Sequence[ResetInfo | None]]
"""Resets an environment to each task; None for a reset that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The tasks of an evaluation, and the keys of tasks that training does not play."""

    tasks: tuple[Task, ...]
    keys: tuple[str, ...]
    """The key of each task, or its seed if it has no key."""
    held_out: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The task keys that training does not play, by environment."""
    num_tasks: int | None = None
    """The number of tasks that the environment declares."""
    overlap_known: bool = True
    """False if the tasks have no keys, so that it is unknown whether training plays them."""
    parts: tuple[Split, ...] = ()
    """The splits of several environments that this one has the tasks of; see `join`."""

    @property
    def distinct(self) -> int:
        """The number of different tasks of the evaluation."""
        return min(len(set(self.keys)), self.num_tasks or len(self.keys))

    def __str__(self) -> str:
        """Describes the tasks: how many are different, and whether training plays them.

        Example:
            >>> tasks = (Task(env_id="x", seed=8), Task(env_id="x", seed=9))
            >>> str(Split(tasks=tasks, keys=("a", "a"), held_out={"x": frozenset("a")}))
            '2 episodes of 1 held-out task'
        """
        if self.parts:
            return "; ".join(f"{part.tasks[0].env_id}: {part}" for part in self.parts)
        count, distinct = len(self.tasks), self.distinct
        if not self.overlap_known:
            return f"{_many(count)}, split by seed, overlap unknown"
        if not self.held_out:
            return f"{count} episodes of the training tasks, {_many(distinct, 'different ')}"
        name = "held-out "
        same = count == distinct
        return _many(count, name) if same else f"{count} episodes of {_many(distinct, name)}"

    def first(self, count: int) -> Split:
        """Returns the split with only the first tasks of the evaluation."""
        if self.parts:
            names = Counter(task.env_id for task in self.tasks[:count])
            return join([p.first(n) for p in self.parts if (n := names[p.tasks[0].env_id])])
        return replace(self, tasks=self.tasks[:count], keys=self.keys[:count])

    def holds_out(self, episode: Episode) -> bool:
        """Returns whether training does not play the task of an episode.

        The task of an episode of no environment of the split, such as a recorded conversation, is
        one that any of the environments holds out.
        """
        keys = self.held_out.get(episode.task.env_id)
        held = frozenset().union(*self.held_out.values()) if keys is None else keys
        return episode.reset.task_key in held


def join(splits: Sequence[Split]) -> Split:
    """Returns the split of several environments, whose tasks alternate in proportion.

    So its first tasks are of all environments, too. The keys begin with the environment's name.
    """
    if len(splits) == 1:
        return splits[0]
    places = [
        ((n + 0.5) / len(split.tasks), task, f"{task.env_id}/{key}")
        for split in splits
        for n, (task, key) in enumerate(zip(split.tasks, split.keys, strict=True))
    ]
    places.sort(key=lambda place: place[0])
    numbers = [split.num_tasks for split in splits]
    return Split(
        tasks=tuple(task for _, task, _ in places),
        keys=tuple(key for *_, key in places),
        held_out={env_id: keys for split in splits for env_id, keys in split.held_out.items()},
        num_tasks=None if None in numbers else sum(filter(None, numbers)),
        overlap_known=all(split.overlap_known for split in splits),
        parts=tuple(splits),
    )


def share_out(count: int, weights: Sequence[float]) -> list[int]:
    """Shares tasks out in proportion to weights, at least one each.

    Example:
        >>> share_out(10, [0.7, 0.3]), share_out(3, [98, 1, 1])
        ([7, 3], [1, 1, 1])
    """
    shares = [1] * len(weights)
    for _ in range(count - len(weights)):  # to the one that is furthest behind
        behind = [w / sum(weights) * count - n for w, n in zip(weights, shares, strict=True)]
        shares[behind.index(max(behind))] += 1
    return shares


def hold_out(env_id: str, count: int, read: Read, num_tasks: int | None = None) -> Split:
    """Draws the tasks of an evaluation and decides which task keys training does not play.

    The result depends only on the environment and on `count`, so it is the same in every run. All
    keys of the evaluation are held out, unless more than half of the training tasks have one: then
    only some are, up to that half, and the evaluation plays only these. An environment with one
    task holds out nothing.

    Args:
        env_id: The environment.
        count: Tasks of the evaluation.
        read: Resets the environment.
        num_tasks: The number of tasks that the environment declares.

    Raises:
        EnvironmentContractError: The declared number is not a positive integer.
    """
    if num_tasks is not None and (not isinstance(num_tasks, Integral) or num_tasks < 1):
        raise EnvironmentContractError(
            f"{env_id}: num_tasks is {num_tasks!r}, expected an integer of at least 1."
        )
    tasks = _tasks(env_id, range(HELD_OUT, HELD_OUT + count))
    few = num_tasks is not None and num_tasks <= count
    keys = tuple("" if num_tasks == 1 else str(task.seed) for task in tasks)
    unsplit = Split(tasks=tasks, keys=keys, num_tasks=num_tasks, overlap_known=few)
    if num_tasks == 1 or _keys(read, tasks[:1]) == [None]:
        return unsplit
    drawn = _keys(read, tasks)
    if None in drawn:
        logger.warning("%s: some resets have a task_key and others have none", env_id)
        return unsplit
    pairs = list(zip(tasks, map(str, drawn), strict=True))
    keys = tuple(dict.fromkeys(key for _, key in pairs))
    held_out = _spare(keys, _probe(env_id, read), num_tasks)
    if held_out:
        pairs = _select(env_id, pairs, held_out, read)
    return Split(
        tasks=tuple(task for task, _ in pairs),
        keys=tuple(key for _, key in pairs),
        held_out={env_id: frozenset(held_out)} if held_out else {},
        num_tasks=num_tasks,
    )


def _probe(env_id: str, read: Read) -> Counter[str | None]:
    """Counts the keys of some training tasks, which are the same in every run.

    A reset that failed says nothing about the shares of the others.
    """
    tasks = _tasks(env_id, (derive_seed("probe", n) % HELD_OUT for n in range(_PROBES)))
    return Counter(reset.task_key for reset in read(tasks) if reset is not None)


def _spare(keys: Sequence[str], probes: Counter[str | None], num_tasks: int | None) -> list[str]:
    """Returns the keys that can be held out: all, or up to half of the tasks, in their order."""
    most = _SHARE * probes.total()
    if sum(probes[key] for key in keys) <= most:
        return list(keys)
    number = num_tasks or len({*keys, *probes})
    spare: list[str] = []
    for key in keys:
        if len(spare) + 1 <= _SHARE * number and probes[key] <= most:
            spare.append(key)
            most -= probes[key]
    return spare


def _select(
    env_id: str, pairs: list[tuple[Task, str]], held_out: Collection[str], read: Read
) -> list[tuple[Task, str]]:
    """Replaces the tasks whose keys are not held out by further ones whose keys are."""
    count = len(pairs)
    evaluated = [pair for pair in pairs if pair[1] in held_out]
    for begin in range(count, _MOST * count, count):
        if len(evaluated) == count:
            break
        tasks = _tasks(env_id, range(HELD_OUT + begin, HELD_OUT + begin + count))
        more = zip(tasks, _keys(read, tasks), strict=True)
        evaluated += [(task, str(key)) for task, key in more if key in held_out]
        del evaluated[count:]
    return evaluated


def _tasks(env_id: str, seeds: Iterable[int]) -> tuple[Task, ...]:
    return tuple(Task(env_id=env_id, seed=seed) for seed in seeds)


def _keys(read: Read, tasks: Sequence[Task]) -> list[str | None]:
    """Returns the key of each task; the seed of a task whose reset failed."""
    resets = zip(tasks, read(tasks), strict=True)
    return [str(task.seed) if reset is None else reset.task_key for task, reset in resets]


async def read_resets(
    pool: EnvPool | EnvPools, limits: RolloutConfig, tasks: Sequence[Task]
) -> list[ResetInfo | None]:
    """Resets environments of a pool to the tasks; None for a reset that failed or timed out."""
    gate = asyncio.Semaphore(min(_READERS, limits.concurrency))

    async def one(task: Task) -> ResetInfo | None:
        async with gate:
            episode = await play_again(
                lambda _: play_pooled(pool, task, look, timeout=limits.episode_timeout),
                limits.max_retries,
                pool.faults,
            )
        return reset_of(episode)

    return await asyncio.gather(*map(one, tasks))


def reset_of(episode: Episode) -> ResetInfo | None:
    """Returns the `info` of an episode's `reset`, or None if it failed."""
    return None if episode.failed else episode.reset


def _many(count: int, kind: str = "") -> str:
    return f"{count} {kind}task{'s' * (count != 1)}"


def draw_tasks(
    weights: Mapping[str, float],
    *,
    seed: int,
    step: int,
    count: int,
    options: Mapping[str, Any] | None = None,
) -> list[Task]:
    """Returns the tasks of a step; each one's environment and seed follow from its place.

    Args:
        weights: The weight of each environment, by the `env_id` of its tasks.
        seed: Seed of the run.
        step: Number of the step.
        count: Number of tasks, P.
        options: Options of every `reset`.
    """
    names, limits = list(weights), list(accumulate(weights.values()))
    tasks = []
    for p in range(count):
        drawn = derive_seed("env", seed, step, p) % SEEDS / SEEDS * limits[-1]
        place = min(bisect(limits, drawn), len(names) - 1)
        task_seed = derive_seed("task", seed, step, p) % HELD_OUT
        tasks.append(Task(env_id=names[place], seed=task_seed, options=options or {}))
    return tasks
