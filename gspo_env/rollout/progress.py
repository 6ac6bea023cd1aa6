"""What the episodes in flight wait for, and a log line when none has made progress for long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from gspo_env.types import Task

logger = logging.getLogger(__name__)

Cause = Literal["the engine", "their environments"]

STALL_SECONDS = 60.0
"""Seconds without progress before the log names what it is waiting for."""
_NO_LIMIT = "where no limit can end it: await what it waits for, or do not declare blocking = False"


@dataclass(slots=True)
class EpisodeProgress:
    """What one episode waits for."""

    progress: Progress
    task: Task
    cause: Cause = "their environments"
    turn: int = 0
    since: float = field(default_factory=time.monotonic)

    def wait_for(self, cause: Cause, turn: int) -> None:
        """Notes that the episode made progress and now waits for something else."""
        self.cause, self.turn = cause, turn
        self.since = self.progress.last = time.monotonic()


@dataclass(slots=True)
class Progress:
    """What the episodes in flight wait for."""

    last: float = field(default_factory=time.monotonic)
    """When an episode last made progress (monotonic clock)."""
    _episodes: dict[int, EpisodeProgress] = field(default_factory=dict)

    def __len__(self) -> int:
        """Returns the number of episodes in flight."""
        return len(self._episodes)

    def begin(self, task: Task) -> EpisodeProgress:
        """Adds an episode."""
        episode = EpisodeProgress(self, task)
        self._episodes[id(episode)] = episode
        self.last = episode.since
        return episode

    def end(self, episode: EpisodeProgress) -> None:
        """Removes an episode, which is over."""
        del self._episodes[id(episode)]
        self.last = time.monotonic()

    def idle(self) -> float:
        """Returns the seconds since an episode last made progress."""
        return time.monotonic() - self.last

    def describe(self) -> str:
        """Returns what the episodes wait for, with the longest wait for each cause."""
        causes: dict[Cause, list[EpisodeProgress]] = {}
        for episode in list(self._episodes.values()):
            causes.setdefault(episode.cause, []).append(episode)
        if not causes:
            return "no episode is in flight"
        return ", ".join(_line(cause, causes[cause]) for cause in sorted(causes))


def _line(cause: Cause, episodes: list[EpisodeProgress]) -> str:
    oldest = min(episodes, key=lambda episode: episode.since)
    task, seconds = oldest.task, time.monotonic() - oldest.since
    waiting = "1 episode waits" if len(episodes) == 1 else f"{len(episodes)} episodes wait"
    return (
        f"{waiting} for {cause} (longest: {seconds:.0f} s, {task.env_id} with seed {task.seed}, "
        f"turn {oldest.turn})"
    )


class Heartbeat:
    """A thread that logs what a rollout is waiting for whenever it makes no progress.

    A thread can log even while the code of an environment or a judge holds the event loop, which
    nothing can end.

    Args:
        idle: Returns the seconds since the last progress.
        describe: Returns what the rollout is waiting for.
        seconds: Time without progress before a line, and between two lines.
    """

    def __init__(
        self, idle: Callable[[], float], describe: Callable[[], str], seconds: float
    ) -> None:
        self._idle, self._describe, self._seconds = idle, describe, seconds
        self._watched = 0
        self._over: threading.Event | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what runs inside; several callers may be inside at the same time."""
        self._watched += 1
        self._thread = threading.get_ident()
        if self._over is None:
            self._over = threading.Event()
            threading.Thread(
                target=self._run, args=(self._over,), name="heartbeat", daemon=True
            ).start()
        try:
            yield
        finally:
            self._watched -= 1
            if not self._watched:
                self._over.set()
                self._over = None

    def _run(self, over: threading.Event) -> None:
        last = time.monotonic()
        while True:
            now = time.monotonic()
            quiet = min(self._idle(), now - last)
            if quiet >= self._seconds:
                from gspo_env.runtime.where import EVENT_LOOP, held_line

                line = held_line(self._thread, *EVENT_LOOP)
                held = f"; {line} holds the event loop, {_NO_LIMIT}" if line else ""
                logger.warning("no progress for %.0f s: %s%s", self._idle(), self._describe(), held)
                last, quiet = now, 0.0
            if over.wait(self._seconds - quiet):
                return
