"""The interface of trackers. Imports no tracking library.

A tracker is chosen by its settings, a frozen dataclass with a method `start` (`TrackerChoice`).
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol

from gspo_env.errors import MissingExtraError

Status = Literal["FINISHED", "FAILED", "KILLED"]

MODEL = "model"
"""The artifact folder of the trained model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a tracker gets when a run starts."""

    name: str
    folder: Path
    """Where the run writes its files; it exists."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The settings. A tracker gets them flat, with names such as `learner.learning_rate`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    parent: Path | None = None
    """Folder of the comparison that the run belongs to."""
    resume: Mapping[str, str] = field(default_factory=dict)
    """The id that each tracker, by name, gave to the run that goes on; empty for a new run. An id
    is empty if the tracker had not begun, or gives none."""
    started: float = field(default_factory=time.time)
    """When the run began, in seconds since 1970."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells the run from all others; a run that goes on keeps it."""

    @property
    def unique_name(self) -> str:
        """The name and a few digits that tell the run from others of this name."""
        return f"{self.name}-{self.key[:6]}"

    @property
    def group(self) -> str | None:
        """Name of the comparison that the run belongs to."""
        return None if self.parent is None else self.parent.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The metrics of one call of `log`."""

    step: int
    time: int
    """When they were logged, in milliseconds since 1970."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """What a run learns from or is measured on, without secrets."""

    name: str
    """Such as the id of an environment."""
    digest: str
    """Equal for equal inputs; at most 36 characters."""
    context: Literal["training", "evaluation"]
    source: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from, such as the arguments of an environment."""
    profile: Mapping[str, Any] = field(default_factory=dict)
    """How much there is of it, such as the number of tasks."""


class Tracker(Protocol):
    """Records one run; see `Repeatable` for one that a network or a server is part of.

    After `start`, each tracker is called in a thread of its own, in the order of the calls of the
    run. Its methods may raise: the errors are logged and counted, and the run continues.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records metrics of a step; values are finite floats."""

    def text(self, name: str, text: str) -> None:
        """Stores a text under a name such as `episodes/step-0010.txt`."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Stores a file, or the files of a folder; the caller keeps them until `finish`."""

    def finish(self, status: Status, reason: str) -> None:
        """Writes what is left and ends the run; called once.

        Args:
            status: How the run ended.
            reason: Why it failed; empty if it did not.
        """

    @property
    def how_to_look(self) -> str:
        """The command or the address that shows the run."""


class Repeatable(Tracker, Protocol):
    """A tracker whose calls can be repeated: the same call twice records the same as once.

    A call that fails for a passing reason is repeated until it succeeds, also by a later process.
    If it has a method `log_input`, that gets each `Input`. If its settings have a field `traces`
    above 0, its method `log_traces` gets sequences of `gspo_env.tracking.traces.Trace`; see
    `gspo_env.tracking.MLflow` for it and for `train_traces`.
    """

    def open(self) -> str:
        """Begins the run, or goes on with it; returns its id.

        Called before the others, and again after a call that failed.
        """

    def log_points(self, points: Sequence[Point]) -> None:
        """Records points; called instead of `log`."""

    def passing(self, error: Exception) -> bool:
        """Returns whether a call that raised this error may succeed later."""


class TrackerChoice(Protocol):
    """The settings of a tracker: a frozen dataclass, found by its name."""

    def start(self, run: RunInfo) -> Tracker:
        """Begins to record a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoTracker:
    """Records in no tracker; the run's `metrics.jsonl` is written all the same."""

    how_to_look = ""

    def start(self, run: RunInfo) -> Tracker:
        """Returns itself, which does nothing."""
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Does nothing."""

    def text(self, name: str, text: str) -> None:
        """Does nothing."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Does nothing."""

    def finish(self, status: Status, reason: str) -> None:
        """Does nothing."""


def flatten(tree: object, *, mappings: bool = True) -> dict[str, Any]:
    """Returns the leaves of nested mappings and dataclasses by dotted name.

    Args:
        tree: A mapping or a dataclass.
        mappings: Whether the entries of mappings are leaves of their own.

    Example:
        >>> flatten({"learner": {"learning_rate": 1e-5}, "env_kwargs": {}})
        {'learner.learning_rate': 1e-05, 'env_kwargs': {}}
    """
    return dict(_leaves(tree, "", mappings))


def _leaves(value: Any, name: str, mappings: bool) -> Iterator[tuple[str, Any]]:
    record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if record:
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if record or (mappings and isinstance(value, Mapping) and (value or not name)):
        for key, child in value.items():
            yield from _leaves(child, f"{name}.{key}" if name else str(key), mappings)
    else:
        yield name, value.value if isinstance(value, Enum) else value


_begun: list[float] = []


def begin_run() -> float:
    """Returns when a run began, in seconds since 1970.

    The first run of a program began with the process, before its imports. In a notebook, and for
    later runs, it is the time now.
    """
    stat = Path("/proc/self/stat")
    first = not _begun and not hasattr(sys, "ps1") and "ipykernel" not in sys.modules
    now = time.time()
    _begun.append(now)
    if not first or not stat.exists():
        return now
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # proc(5): field 22, starttime
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turns an import that fails into an error with the install command.

    Raises:
        MissingExtraError: The package of the extra cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"the tracker {extra} needs a package that cannot be imported ({error}): "
            f"pip install 'gspo-env[{extra}]'"
        ) from error
