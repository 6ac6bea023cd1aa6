"""Gives the learner its groups: in turn with the updates, or ahead of them within a staleness."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from gspo_env.config import Config
from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import RolloutRequest
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.types import Episode, Group, Task

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BEAT = 60.0
"""Seconds after which, and between which, the log says what the learner waits for."""
_MARGIN = 60.0
"""Seconds in which no episode may end, beyond those that one and its environment may take."""
_PATIENCE = 10.0
"""Seconds that the end of a run waits for an update that still runs."""
_MOST_DROPS = 3
"""Times in a row that a group may be too old."""


class Player(Protocol):
    """Plays groups; see `gspo_env.rollout.Collector`."""

    async def play(self, request: RolloutRequest, gate: asyncio.Semaphore) -> Group:
        """Plays the episodes of one group."""
        ...

    def check(self, groups: Sequence[Group]) -> None:
        """Checks the groups of a batch."""
        ...

    def idle(self) -> float:
        """Returns the seconds since an episode last made progress."""
        ...


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
        >>> admission = Admission(batch=2, max_staleness=0)
        >>> [admission.admit(n) for n in (0, 1)], admission.room
        ([None, None], 0)
        >>> admission.choose({0}), admission.choose({0, 1})
        (None, [0, 1])
        >>> admission.train([0, 1], version=1), admission.room
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
    def room(self) -> int:
        """The number of groups that may be admitted now."""
        most = self.batch * (self.version + self.max_staleness + 1)
        return most - (self.admitted - self.dropped)

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
        chosen = [number for number in oldest if number in ready][: self.batch]
        if len(chosen) < self.batch:
            return None
        taken = set(chosen)
        others = [number for number in oldest if number not in taken]
        in_time = all(self._age_later(n, number) for n, number in enumerate(others))
        return sorted(chosen) if in_time else None

    def _age_later(self, n: int, number: int) -> bool:
        """Returns whether the n-th oldest other group is young enough when its turn comes."""
        version = self.version + 1 + n // self.batch
        return version - self.ages[number] <= self.max_staleness

    def train(self, numbers: Collection[int], version: int) -> None:
        """Notes that an update trained on groups and ended in a version."""
        for number in numbers:
            del self.ages[number]
        self.version = version


@dataclass(slots=True)
class TaskAttempt:
    """A group that was admitted and not yet trained on."""

    number: int
    """Counts the groups of a run from 0, in the order of their tasks."""
    task: Task
    attempt: int = 0
    """How often another task was sampled in its place."""
    drops: int = 0
    """How often it was too old."""
    group: Group | None = None
    """None while it is played."""
    playing: asyncio.Task[None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The groups of an update."""

    groups: list[Group]
    discarded: list[Group]
    """Those that were sampled again since the last batch."""
    dropped: list[Group]
    """Those that were too old since the last batch."""
    seconds: float
    """Time in which they were played: since the learner asked, or since the last batch."""
    metrics: dict[str, float]

    @property
    def all(self) -> list[Group]:
        """Every group that was played."""
        return [*self.groups, *self.left]

    @property
    def left(self) -> list[Group]:
        """The groups that were played and are not trained on."""
        return [*self.discarded, *self.dropped]


class RolloutBuffer:
    """Plays the groups of a run as asyncio tasks and gives them to the learner, a batch at a time.

    With `max_staleness` 0, groups are played only while the learner waits for them. Above 0 they
    are played at all times, as far as `StalenessGate` allows.

    Args:
        config: The settings.
        player: Plays the groups.
        draw: Returns the tasks of a step, counted from 1.
        flat: Whether nothing is learned from a group, since its advantages are all 0.
        held_out: Keys of tasks that are not played, by environment.
    """

    def __init__(
        self,
        config: Config,
        player: Player,
        draw: Callable[[int], Sequence[Task]],
        flat: Callable[[Group], bool],
        held_out: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._config, self._settings, self._player = config, config.supply, player
        self._draw, self._flat, self._held_out = draw, flat, held_out or {}
        self._gate = asyncio.Semaphore(config.rollout.concurrency)
        self.admission = StalenessGate(config.tasks_per_step, config.supply.max_staleness)
        self._tickets: dict[int, TaskAttempt] = {}
        self._again: list[TaskAttempt] = []
        """Those that gave their place back and wait for one."""
        self._next = 0
        """The number of the next group."""
        self._tasks: list[Task] = []
        """Those of the step that is being admitted."""
        self._chosen: list[int] = []
        """Numbers of the groups that the learner has."""
        self._discarded: list[Group] = []
        self._dropped: list[Group] = []
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._moved = 0.0
        """Time at which a group was last admitted or played."""
        self._given: float | None = None
        """Time at which the last batch was given."""
        self._background = Background()

    @property
    def ahead(self) -> bool:
        """Whether groups are played while the learner updates."""
        return self._settings.max_staleness > 0

    async def take(self) -> Batch:
        """Waits for the groups of the next update and returns them, in the order of their tasks.

        Raises:
            RolloutError: No episode has ended for longer than any may take, a group is too old
                again and again, or see `Collector.play` and `Collector.check`.
        """
        clock = asyncio.get_running_loop().time
        asked = self._moved = clock()
        since = asked if self._given is None else self._given
        self._admit()
        while (chosen := self._choose()) is None:
            await self._wait(asked)
        self._chosen = chosen
        tickets = [self._tickets[number] for number in chosen]
        groups = [ticket.group for ticket in tickets if ticket.group is not None]
        now = self._given = clock()
        metrics = self._metrics(groups, asked, since, now)
        discarded, self._discarded = self._discarded, []
        dropped, self._dropped = self._dropped, []
        self._player.check([*groups, *discarded, *dropped])
        return Batch(
            groups=groups,
            discarded=discarded,
            dropped=dropped,
            seconds=max(now - (since if self.ahead else asked), 1e-9),
            metrics=metrics,
        )

    async def run(self, update: Callable[[], T]) -> T:
        """Runs an update, in a thread of its own if groups are played meanwhile."""
        return await self._background.run(update) if self.ahead else update()

    def advance(self, version: int) -> None:
        """Notes that the last batch was trained on, and that the engine has the new weights."""
        for number in self._chosen:
            del self._tickets[number]
        self.admission.train(self._chosen, version)
        self._chosen = []
        if self.ahead:
            self._admit()

    async def close(self) -> None:
        """Ends the groups that are played; waits a while for an update that still runs."""
        playing = [t.playing for t in self._tickets.values() if t.playing is not None]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await self._background.close()

    def waits_for(self) -> str:
        """Says what the learner waits for, in one sentence."""
        oldest = [t for t in self._tickets.values() if t.group is None][: self.admission.batch]
        names = ", ".join(f"{t.task.env_id} seed {t.task.seed}" for t in oldest[:3])
        more = f" and {len(oldest) - 3} more" if len(oldest) > 3 else ""
        played = sum(t.group is None for t in self._tickets.values())
        return (
            f"step {self.admission.version + 1} waits for groups of {names}{more}; "
            f"{len(self._tickets) - played} groups are ready, {played} are played"
        )

    def state(self) -> dict[str, Any]:
        """Returns the groups that are lost if the run ends now, as JSON; see `restore`."""
        lost = sorted([*self._tickets.values(), *self._again], key=lambda t: t.number)
        return {
            "next": self._next,
            "open": [[t.number, t.attempt, asdict(t.task)] for t in lost],
        }

    def restore(self, saved: Mapping[str, Any], version: int) -> None:
        """Takes over a `state`; the groups that were lost are played first."""
        self._next = int(saved["next"])
        self._again = [
            TaskAttempt(number=int(number), attempt=int(attempt), task=Task(**task))
            for number, attempt, task in saved["open"]
        ]
        self.admission.version = version
        self.admission.admitted = self._next
        self.admission.dropped = len(self._again)
        self._tasks = []

    def _admit(self) -> None:
        """Begins to play as many groups as there is room for."""
        last = self._config.steps * self.admission.batch
        while self.admission.room > 0 and (self._again or self._next < last):
            if self._again:
                ticket = self._again.pop(0)
            else:
                ticket = TaskAttempt(number=self._next, task=self._next_task())
                self._next += 1
            self._tickets[ticket.number] = ticket
            self.admission.admit(ticket.number)
            self._moved = asyncio.get_running_loop().time()
            ticket.playing = asyncio.create_task(self._play(ticket))

    def _next_task(self) -> Task:
        step, place = divmod(self._next, self.admission.batch)
        if place == 0:  # where a run goes on, too: a step is admitted as a whole
            self._tasks = list(self._draw(step + 1))
        return self._tasks[place]

    async def _play(self, ticket: TaskAttempt) -> None:
        step, place = divmod(ticket.number, self.admission.batch)
        parts: tuple[int | str, ...] = ("rollout", self._config.seed, step + 1)
        job = RolloutRequest(
            task=ticket.task,
            seed=derive_seed(*parts, *(("again", ticket.attempt) if ticket.attempt else ())),
            place=place,
            group_size=self._config.rollout.group_size,
            temperature=self._config.rollout.temperature,
            held_out=self._held_out,
        )
        try:
            group = await self._player.play(job, self._gate)
            self._moved = asyncio.get_running_loop().time()
            if self._must_resample(ticket, group):
                self._resample(ticket, group)
            else:
                ticket.group = group
        except Exception as error:  # `take` raises it
            self._error = self._error or error
        self._changed.set()

    def _must_resample(self, ticket: TaskAttempt, group: Group) -> bool:
        if ticket.attempt >= self._settings.max_resamples:
            return False
        wins = _wins(group.episodes)
        if not wins:
            return False  # `Collector.check` counts what failed
        low, high = self._settings.min_success, self._settings.max_success
        return not low <= float(np.mean(wins)) <= high or self._flat(group)

    def _resample(self, ticket: TaskAttempt, group: Group) -> None:
        """Gives the place of a group back, for another task of the same environment."""
        self._discarded.append(group)
        seed = derive_seed("again", ticket.task.seed) % HELD_OUT
        task = replace(ticket.task, seed=seed)
        self._give_back(TaskAttempt(number=ticket.number, task=task, attempt=ticket.attempt + 1))

    def _give_back(self, ticket: TaskAttempt) -> None:
        del self._tickets[ticket.number]
        self.admission.drop(ticket.number)
        self._again.append(ticket)
        self._admit()

    def _choose(self) -> list[int] | None:
        """Returns the groups of the next update, after dropping those that are too old.

        Raises:
            RolloutError: A group is too old again and again.
        """
        for ticket in list(self._tickets.values()):
            if ticket.group is None:
                continue
            age = max(_ages(ticket.group, self.admission.version), default=0)
            if age > self._settings.max_staleness:
                self._drop(ticket, ticket.group, age)
        return self.admission.choose([n for n, t in self._tickets.items() if t.group is not None])

    def _drop(self, ticket: TaskAttempt, group: Group, age: int) -> None:
        self._dropped.append(group)
        if ticket.drops >= _MOST_DROPS:
            raise RolloutError(
                f"a group of {ticket.task.env_id} (seed {ticket.task.seed}) was sampled with "
                f"weights that are {age} updates old, for the {_MOST_DROPS + 1}th time; expected "
                f"at most max_staleness {self._settings.max_staleness}: does the engine take the "
                "new weights?"
            )
        again = replace(ticket, drops=ticket.drops + 1, group=None, playing=None)
        self._give_back(again)

    async def _wait(self, asked: float) -> None:
        """Waits until a group is played; says from time to time what is waited for.

        Raises:
            RolloutError: Nothing happens any more, or see `Collector.play`.
        """
        if self._error is not None:
            raise self._error
        self._changed.clear()
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(_BEAT):
                await self._changed.wait()
        except TimeoutError:
            logger.info("%s (for %.0f s)", self.waits_for(), clock() - asked)
            if clock() - began > 2 * _BEAT:  # nothing could move: this process was suspended
                self._moved = clock()
            limits = self._config.rollout
            most = 2 * (limits.max_retries + 1) * limits.episode_timeout + _MARGIN
            if min(clock() - self._moved, self._player.idle()) > most:
                raise RolloutError(
                    f"no episode came further for {most:g} s, although rollout.episode_timeout "
                    f"is {limits.episode_timeout:g}: {self.waits_for()}"
                ) from None
        if self._error is not None:
            raise self._error

    def _metrics(
        self, groups: Sequence[Group], asked: float, since: float, now: float
    ) -> dict[str, float]:
        """Returns the metrics of a batch, before it is given.

        Args:
            groups: The groups.
            asked: Time at which the learner asked for them.
            since: Time of the last batch.
            now: Time at which they are given.
        """
        ages = [age for group in groups for age in _ages(group, self.admission.version)]
        limits, size = self._config.rollout, self._config.tasks_per_step
        in_flight = size * (self._settings.max_staleness + 1) * limits.group_size
        places = min(limits.concurrency, in_flight) * (now - since)
        busy = sum(group.seconds for group in [*groups, *self._discarded, *self._dropped])
        metrics = {
            "rollout/staleness_mean": float(np.mean(ages)) if ages else 0.0,
            "rollout/staleness_max": float(max(ages, default=0)),
            "rollout/dropped_groups": float(len(self._dropped)),
            "time/learner_idle": (now - asked) / (now - since) if now > since else 0.0,
            "time/rollout_idle": max(0.0, 1 - busy / places) if places else 0.0,
        }
        if self._settings.max_resamples:
            metrics |= _cost(groups, self._discarded)
        return metrics


def _ages(group: Group, version: int) -> list[int]:
    """Returns how many versions old the oldest token of each episode is."""
    return [version - e.weights_versions[0] for e in group.episodes if e.turns]


def _cost(groups: Sequence[Group], discarded: Sequence[Group]) -> dict[str, float]:
    """Returns what was played beyond the groups of a batch, as metrics."""
    extra = [e for group in discarded for e in group.episodes]
    every = [e for group in groups for e in group.episodes] + extra
    tokens = sum(e.model_tokens for e in extra)
    return {
        "rollout/resampled_groups": float(len(discarded)),
        "rollout/resampled_tokens": float(tokens),
        "rollout/resampled_share": tokens / max(1, sum(e.model_tokens for e in every)),
        "rollout/success_played": float(np.mean(_wins(every) or [False])),
    }


def _wins(episodes: Sequence[Episode]) -> list[bool]:
    """Returns which of the episodes whose environment did not fail succeeded."""
    return [bool(episode.success) for episode in episodes if not episode.failed]


class Background:
    """Runs one function at a time in a thread that does not keep the process from ending."""

    def __init__(self) -> None:
        self._running: Future[Any] | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function and waits for it; other tasks of the event loop go on."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._running = future

        def work() -> None:
            try:
                result = function()
            except BaseException as error:  # the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        # a daemon, which a second Ctrl-C need not wait for
        threading.Thread(target=work, name="learner", daemon=True).start()
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Waits a while for a function whose caller was cancelled."""
        if self._running is not None and not self._running.done():
            await asyncio.wait([asyncio.wrap_future(self._running)], timeout=_PATIENCE)
