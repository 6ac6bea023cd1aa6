"""Plays groups for the learner: in turn with the updates, or ahead of them within a staleness.

The version of the weights is the number of updates that are done. A group that was admitted at
version v and is part of the update that ends version u is u - v versions old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from gspo_env.config import Config
from gspo_env.credit.scores import Scores
from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import Collector, RolloutRequest
from gspo_env.rollout.metrics import RolloutStats
from gspo_env.runtime.loops import run_in_daemon
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.training.curriculum import TaskSampler
from gspo_env.types import Episode, Group, Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOG_SECONDS = 60.0
"""Time after which, and between which, the log says what the learner waits for."""
_IDLE_MARGIN = 60.0
"""Seconds in which no episode may end, beyond those that one and its environment may take."""
_UPDATE_MARGIN = 10.0
"""Seconds that the end of a run waits for an update that still runs."""
_MAX_DROPS = 3
"""Times in a row that a group may be too old."""


@dataclass(slots=True)
class StalenessGate:
    """Counts groups by the version of the weights at which they were admitted.

    A group is admitted only while `admitted - dropped < batch * (version + max_staleness + 1)`.
    That counts groups that are played, that wait for the learner, and that were trained on; one
    that is sampled again, or is too old, gives its place back.

    So at version u there are at most `batch * (max_staleness + 1)` groups that were not trained on.
    `choose` takes the oldest that are ready, and only if all others can still be trained on in
    time. Both together keep every group within `max_staleness`, without dropping any.

    Example:
        >>> gate = StalenessGate(batch=2, max_staleness=0)
        >>> [gate.admit(n) for n in (0, 1)], gate.capacity
        ([None, None], 0)
        >>> gate.choose({0}), gate.choose({0, 1})
        (None, [0, 1])
        >>> gate.train([0, 1], version=1), gate.capacity
        (None, 2)
    """

    batch: int
    """Groups of an update."""
    max_staleness: int
    version: int = 0
    admitted: int = 0
    """Groups that were admitted, those of finished updates included."""
    dropped: int = 0
    """Groups that gave their place back."""
    ages: dict[int, int] = field(default_factory=dict)
    """The version at which each group was admitted that is played or waits, by its number."""

    @property
    def capacity(self) -> int:
        """The number of groups that may be admitted now."""
        limit = self.batch * (self.version + self.max_staleness + 1)
        return limit - (self.admitted - self.dropped)

    def admit(self, number: int) -> None:
        """Admits a group at the present version."""
        self.ages[number] = self.version
        self.admitted += 1

    def drop(self, number: int) -> None:
        """Takes the place of a group back; it may be admitted again."""
        del self.ages[number]
        self.dropped += 1

    def choose(self, ready: Collection[int]) -> list[int] | None:
        """Returns the groups of the next update; None if the learner has to wait.

        The oldest ready groups are taken. That leaves the best chance to the others: the n-th
        oldest of them can be trained on `1 + n // batch` versions later, where it must not be
        older than `max_staleness`.

        Args:
            ready: Numbers of the groups that are played.
        """
        oldest = sorted(self.ages, key=lambda number: (self.ages[number], number))
        batch = [number for number in oldest if number in ready][: self.batch]
        if len(batch) < self.batch:
            return None
        others = [number for number in oldest if number not in set(batch)]
        in_time = all(self._age_later(n, number) for n, number in enumerate(others))
        return sorted(batch) if in_time else None

    def _age_later(self, n: int, number: int) -> bool:
        """Returns whether the n-th oldest other group is young enough when its turn comes."""
        version = self.version + 1 + n // self.batch
        return version - self.ages[number] <= self.max_staleness

    def train(self, numbers: Collection[int], version: int) -> None:
        """Records an update that trained on groups and ended in a version."""
        for number in numbers:
            del self.ages[number]
        self.version = version


@dataclass(slots=True)
class AdmittedGroup:
    """A group that was admitted and not yet trained on."""

    number: int
    """Counts the groups of a run from 0, in the order of their tasks."""
    task: Task
    resamples: int = 0
    """How often another task was sampled in its place."""
    drops: int = 0
    """How often it was too old."""
    group: Group | None = None
    """None while it is played."""
    playing: asyncio.Task[None] | None = None


class RolloutBuffer:
    """Plays the groups of a run as asyncio tasks and gives them to the learner, a batch at a time.

    With `max_staleness` 0, groups are played only while the learner waits for them. Above 0 they
    are played at all times, as far as `StalenessGate` allows.

    Args:
        config: The settings.
        collector: Plays the groups.
        tasks: Draws the tasks of each step.
        scores: The rewards that decide whether a group is worth training on.
        held_out: Keys of tasks that are not played, by environment.
    """

    def __init__(
        self,
        config: Config,
        collector: Collector,
        tasks: TaskSampler,
        scores: Scores,
        held_out: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._config, self._supply, self._collector = config, config.supply, collector
        self.sampler, self._scores, self._held_out = tasks, scores, held_out or {}
        self._in_flight = asyncio.Semaphore(config.rollout.concurrency)
        self.gate = StalenessGate(config.tasks_per_step, config.supply.max_staleness)
        self._admitted: dict[int, AdmittedGroup] = {}
        self._waiting: list[AdmittedGroup] = []
        """Groups that gave their place back and wait for one."""
        self._next = 0
        """The number of the next group."""
        self._tasks: list[Task] = []
        """The tasks of the step that is being admitted."""
        self._batch: list[int] = []
        """Numbers of the groups that the learner has."""
        self._resampled: list[Group] = []
        self._stale: list[Group] = []
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._progress_at = 0.0
        """Time at which a group was last admitted or played."""
        self._taken_at: float | None = None
        """Time at which the learner took the last batch."""
        self._update: Future[Any] | None = None

    @property
    def ahead(self) -> bool:
        """Whether groups are played while the learner updates."""
        return self._supply.max_staleness > 0

    async def take(self) -> RolloutStats:
        """Waits for the groups of the next update and returns them, in the order of their tasks.

        Raises:
            RolloutError: No episode has ended for longer than any may take, a group is too old
                again and again, or see `Collector.play_group` and `Collector.check`.
        """
        clock = asyncio.get_running_loop().time
        requested = self._progress_at = clock()
        since = requested if self._taken_at is None else self._taken_at
        if self._collector.counter is not None:
            self._collector.counter.expect(self.gate.batch * self._config.rollout.group_size)
        self._admit()
        while (numbers := self._choose()) is None:
            await self._wait(requested)
        self._batch = numbers
        admitted_groups = [self._admitted[number] for number in numbers]
        groups = [admitted.group for admitted in admitted_groups if admitted.group is not None]
        now = self._taken_at = clock()
        metrics = self._metrics(groups, requested, since, now)
        unused = [*self._resampled, *self._stale]
        self._resampled, self._stale = [], []
        self._collector.check([*groups, *unused])
        seconds = max(now - (since if self.ahead else requested), 1e-9)
        return RolloutStats(groups, seconds, unused, metrics)

    async def run(self, update: Callable[[], T]) -> T:
        """Runs an update, in a thread of its own if groups are played meanwhile."""
        if not self.ahead:
            return update()
        # a daemon, which a second Ctrl-C need not wait for
        self._update = future = run_in_daemon(update, "learner")
        return await asyncio.wrap_future(future)

    def advance(self, version: int) -> None:
        """Records that the last batch was trained on and that the engine has the new weights."""
        for number in self._batch:
            del self._admitted[number]
        self.gate.train(self._batch, version)
        self._batch = []
        if self.ahead:
            self._admit()

    async def close(self) -> None:
        """Ends the groups that are played; waits a while for an update that still runs."""
        playing = [a.playing for a in self._admitted.values() if a.playing is not None]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        if self._update is not None and not self._update.done():
            await asyncio.wait([asyncio.wrap_future(self._update)], timeout=_UPDATE_MARGIN)

    def state(self) -> dict[str, Any]:
        """Returns the groups that are lost if the run ends now, as JSON; see `restore`.

        Those that the learner has are not lost: a checkpoint follows their update, and what is
        written before it keeps them.
        """
        admitted = [a for a in self._admitted.values() if a.number not in self._batch]
        lost = sorted([*admitted, *self._waiting], key=lambda a: a.number)
        return {"next": self._next, "open": [[a.number, a.resamples, asdict(a.task)] for a in lost]}

    def restore(self, state: Mapping[str, Any], version: int) -> None:
        """Restores a `state`; the groups that were lost are played first."""
        self._next = int(state["next"])
        self._waiting = [
            AdmittedGroup(number=int(number), resamples=int(resamples), task=Task(**task))
            for number, resamples, task in state["open"]
        ]
        self.gate.version = version
        self.gate.admitted = self._next
        self.gate.dropped = len(self._waiting)
        if self._next < 0 or self.gate.capacity < 0:  # no group would ever be played
            raise ValueError(f"buffer.next is {self._next}")

    def _admit(self) -> None:
        """Begins to play as many groups as there is room for."""
        last = self._config.steps * self.gate.batch
        while self.gate.capacity > 0 and (self._waiting or self._next < last):
            if self._waiting:
                admitted = self._waiting.pop(0)
            else:
                admitted = AdmittedGroup(number=self._next, task=self._next_task())
                self._next += 1
            self._admitted[admitted.number] = admitted
            self.gate.admit(admitted.number)
            self._progress_at = asyncio.get_running_loop().time()
            admitted.playing = asyncio.create_task(self._play(admitted))

    def _next_task(self) -> Task:
        step, place = divmod(self._next, self.gate.batch)
        if place == 0:  # where a run is resumed, too: a step is admitted as a whole
            self._tasks = list(self.sampler.draw(step + 1))
        return self._tasks[place]

    async def _play(self, admitted: AdmittedGroup) -> None:
        step, place = divmod(admitted.number, self.gate.batch)
        path: tuple[int | str, ...] = ("rollout", self._config.seed, step + 1)
        again = ("again", admitted.resamples) if admitted.resamples else ()
        request = RolloutRequest(
            task=admitted.task,
            seed=derive_seed(*path, *again),
            place=place,
            group_size=self._config.rollout.group_size,
            temperature=self._config.rollout.temperature,
            held_out=self._held_out,
        )
        try:
            group = await self._collector.play_group(request, self._in_flight)
            self._progress_at = asyncio.get_running_loop().time()
            if self._must_resample(admitted, group):
                self._resample(admitted, group)
            else:
                admitted.group = group
        except Exception as error:  # `take` raises it
            self._error = self._error or error
        self._changed.set()

    def _must_resample(self, admitted: AdmittedGroup, group: Group) -> bool:
        if admitted.resamples >= self._supply.max_resamples:
            return False
        successes = _successes(group.episodes)
        if not successes:
            return False  # `Collector.check` counts what failed
        low, high = self._supply.min_success, self._supply.max_success
        return not low <= float(np.mean(successes)) <= high or not self._scores.teaches(group)

    def _resample(self, admitted: AdmittedGroup, group: Group) -> None:
        """Frees the place of a group for another task of the same environment."""
        self._resampled.append(group)
        seed = derive_seed("again", admitted.task.seed) % HELD_OUT
        task = replace(admitted.task, seed=seed)
        self._give_back(AdmittedGroup(admitted.number, task, resamples=admitted.resamples + 1))

    def _give_back(self, admitted: AdmittedGroup) -> None:
        del self._admitted[admitted.number]
        self.gate.drop(admitted.number)
        self._waiting.append(admitted)
        self._admit()

    def _choose(self) -> list[int] | None:
        """Returns the groups of the next update, after dropping those that are too old.

        Raises:
            RolloutError: A group is too old again and again.
        """
        for admitted in list(self._admitted.values()):
            if admitted.group is not None:
                age = max(_ages(admitted.group, self.gate.version), default=0)
                if age > self._supply.max_staleness:
                    self._drop(admitted, admitted.group, age)
        return self.gate.choose([n for n, a in self._admitted.items() if a.group is not None])

    def _drop(self, admitted: AdmittedGroup, group: Group, age: int) -> None:
        self._stale.append(group)
        if admitted.drops >= _MAX_DROPS:
            raise RolloutError(
                f"a group of {admitted.task.env_id} (seed {admitted.task.seed}) was sampled with "
                f"weights that are {age} updates old, for the {_MAX_DROPS + 1}th time; expected "
                f"at most max_staleness {self._supply.max_staleness}: does the engine take the "
                "new weights?"
            )
        self._give_back(replace(admitted, drops=admitted.drops + 1, group=None, playing=None))

    async def _wait(self, requested: float) -> None:
        """Waits until a group is played; logs from time to time what is waited for.

        Raises:
            RolloutError: Nothing happens any more, or see `Collector.play_group`.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        if self._error is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(_LOG_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                logger.info("%s (for %.0f s)", self._status(), clock() - requested)
                if clock() - began > 2 * _LOG_SECONDS:  # this process was suspended
                    self._progress_at = clock()
                self._check_progress(clock())
        if self._error is not None:
            raise self._error

    def _check_progress(self, now: float) -> None:
        limits = self._config.rollout
        longest = 2 * (limits.max_retries + 1) * limits.episode_timeout + _IDLE_MARGIN
        if min(now - self._progress_at, self._collector.idle()) > longest:
            raise RolloutError(
                f"no episode made progress for {longest:g} s, although rollout.episode_timeout is "
                f"{limits.episode_timeout:g}: {self._status()}"
            )

    def _status(self) -> str:
        """Returns what the learner waits for, in one sentence."""
        playing = [a.task for a in self._admitted.values() if a.group is None]
        oldest = playing[: self.gate.batch]
        names = ", ".join(f"{task.env_id} seed {task.seed}" for task in oldest[:3])
        more = f" and {len(oldest) - 3} more" if len(oldest) > 3 else ""
        return (
            f"step {self.gate.version + 1} waits for groups of {names}{more}; "
            f"{len(self._admitted) - len(playing)} groups are ready, {len(playing)} are played"
        )

    def _metrics(
        self, groups: Sequence[Group], requested: float, since: float, now: float
    ) -> dict[str, float]:
        """Returns the metrics of a batch.

        Args:
            groups: The groups.
            requested: Time at which the learner asked for them.
            since: Time of the last batch.
            now: Time at which the learner gets them.
        """
        ages = [age for group in groups for age in _ages(group, self.gate.version)]
        limits, size = self._config.rollout, self._config.tasks_per_step
        in_flight = size * (self._supply.max_staleness + 1) * limits.group_size
        available = min(limits.concurrency, in_flight) * (now - since)
        busy = sum(g.seconds for g in [*groups, *self._resampled, *self._stale])
        metrics = {
            "rollout/staleness_mean": float(np.mean(ages)) if ages else 0.0,
            "rollout/staleness_max": float(max(ages, default=0)),
            "rollout/dropped_groups": float(len(self._stale)),
            "time/learner_idle": (now - requested) / (now - since) if now > since else 0.0,
            "time/rollout_idle": max(0.0, 1 - busy / available) if available else 0.0,
        }
        if self._supply.max_resamples:
            resampled = [e for group in self._resampled for e in group.episodes]
            episodes = [e for group in groups for e in group.episodes] + resampled
            tokens = sum(e.model_tokens for e in resampled)
            metrics |= {
                "rollout/resampled_groups": float(len(self._resampled)),
                "rollout/resampled_tokens": float(tokens),
                "rollout/resampled_share": tokens / max(1, sum(e.model_tokens for e in episodes)),
                "rollout/success_played": float(np.mean(_successes(episodes) or [False])),
            }
        return metrics


def _ages(group: Group, version: int) -> list[int]:
    """Returns how many versions old the oldest token of each episode is."""
    return [version - e.weights_versions[0] for e in group.episodes if e.turns]


def _successes(episodes: Sequence[Episode]) -> list[bool]:
    """Returns which of the episodes whose environment did not fail succeeded."""
    return [bool(episode.success) for episode in episodes if not episode.failed]
