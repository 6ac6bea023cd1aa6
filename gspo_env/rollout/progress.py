"""Says in the log who is waited for when nothing has come for some time."""

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

SILENCE = 60.0
"""Default of the seconds without progress after which the log says who is waited for."""


@dataclass(slots=True)
class Wait:
    """What one episode waits for."""

    waits: Waits
    task: Task
    cause: Cause = "their environments"
    turn: int = 0
    since: float = field(default_factory=time.monotonic)

    def on(self, cause: Cause, turn: int) -> None:
        """Notes that the episode has come further, and waits for something else."""
        self.cause, self.turn = cause, turn
        self.since = self.waits.moved = time.monotonic()


@dataclass(slots=True)
class Waits:
    """What the episodes in flight wait for."""

    moved: float = field(default_factory=time.monotonic)
    """When an episode last came further (monotonic clock)."""
    _all: dict[int, Wait] = field(default_factory=dict)

    def begin(self, task: Task) -> Wait:
        """Notes that an episode has begun."""
        wait = Wait(self, task)
        self._all[id(wait)] = wait
        self.moved = wait.since
        return wait

    def end(self, wait: Wait) -> None:
        """Notes that an episode is over."""
        del self._all[id(wait)]
        self.moved = time.monotonic()

    def idle(self) -> float:
        """Returns the seconds since an episode last came further."""
        return time.monotonic() - self.moved

    def describe(self) -> str:
        """Returns what the episodes wait for, with the one that has waited longest for each."""
        causes: dict[Cause, list[Wait]] = {}
        for wait in list(self._all.values()):
            causes.setdefault(wait.cause, []).append(wait)
        if not causes:
            return "no episode is in flight"
        return ", ".join(_line(cause, causes[cause]) for cause in sorted(causes))


def _line(cause: Cause, waits: list[Wait]) -> str:
    first = min(waits, key=lambda wait: wait.since)
    task, seconds = first.task, time.monotonic() - first.since
    return (
        f"{len(waits)} episodes wait for {cause} (longest: {seconds:.0f} s, {task.env_id} with "
        f"seed {task.seed}, turn {first.turn})"
    )


class Heartbeat:
    """A thread that logs who is waited for, as often as nothing has come for some time.

    It is a thread so that it also speaks while an environment holds up the event loop.

    Args:
        idle: Returns the seconds since something came.
        describe: Returns who is waited for.
        seconds: Time without progress until a line, and between two lines.
    """

    def __init__(
        self, idle: Callable[[], float], describe: Callable[[], str], seconds: float = SILENCE
    ) -> None:
        self._idle, self._describe, self._seconds = idle, describe, seconds
        self._watched = 0
        self._over: threading.Event | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what is played inside; several may be inside at the same time."""
        self._watched += 1
        if self._over is None:
            self._over = threading.Event()
            begun = time.monotonic()
            threading.Thread(
                target=self._run, args=(self._over, begun), name="heartbeat", daemon=True
            ).start()
        try:
            yield
        finally:
            self._watched -= 1
            if not self._watched:
                self._over.set()
                self._over = None

    def _run(self, over: threading.Event, last: float) -> None:
        while True:
            now = time.monotonic()
            quiet = min(self._idle(), now - last)
            if quiet >= self._seconds:
                logger.warning("nothing has come for %.0f s: %s", self._idle(), self._describe())
                last, quiet = now, 0.0
            if over.wait(self._seconds - quiet):
                return
