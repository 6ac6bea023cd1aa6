"""The interface of trackers. Imports no tracking library.

A tracker is selected by its settings: a frozen dataclass with a method `start` (`TrackerChoice`).
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol

from gspo_env.redaction import visible
from gspo_env.settings import settings

Status = Literal["FINISHED", "FAILED", "KILLED"]

SpanKind = Literal["episode", "turn", "step"]
"""A whole episode, a turn of the policy, or what the environment did with an action."""
SUMMARY = "summary.md"
"""The text that says what a run is and what it reached, in Markdown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One part of a trace; values are JSON."""

    name: str
    kind: SpanKind
    parent: int | None
    """Index of the span that it is a part of; None for the first."""
    start: int
    """Nanoseconds since 1970."""
    end: int
    inputs: Any = None
    outputs: Any = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    input_tokens: int | None = None
    """Tokens of the context of a turn; None for other spans."""
    output_tokens: int | None = None
    """Tokens that the policy sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One episode; its first span is the whole episode."""

    key: str
    """Tells the trace from all others of the run."""
    name: str
    spans: tuple[Span, ...]
    tags: Mapping[str, str] = field(default_factory=dict)
    """What traces are searched by."""
    error: str = ""
    """Why the episode failed; empty if it did not."""


def read_trace(*, spans: list[dict[str, Any]], **fields: Any) -> Trace:
    """Makes a trace of the fields that JSON has of it.

    Raises:
        TypeError: A field is missing or unknown.
    """
    return Trace(spans=tuple(Span(**span) for span in spans), **fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a tracker gets when a run starts."""

    name: str
    folder: Path
    """The existing folder of the run."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The settings. A tracker gets them flat, with names such as `learner.learning_rate`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    parent: Path | None = None
    """Folder of the comparison that the run belongs to."""
    resume: Mapping[str, int] | None = None
    """For a resumed run, the bytes of its files `metrics` and `calls` that its checkpoint has; a
    file without an entry is kept whole. None for a new run."""
    id: str = ""
    """What the tracker called the run before it was resumed."""
    repeats: int | None = None
    """The first step that a resumed run records again."""
    started: float = field(default_factory=time.time)
    """Start of the run, in seconds since 1970."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique key of the run; a resumed run keeps it."""

    def __post_init__(self) -> None:
        """Shows hidden characters of the name, which trackers print."""
        object.__setattr__(self, "name", visible(self.name))

    @property
    def unique_name(self) -> str:
        """The name and the first digits of the key, as the name of a file."""
        return f"{self.name}-{self.key[:6]}".replace("/", "_")

    @property
    def group(self) -> str | None:
        """Name of the comparison that the run belongs to."""
        return None if self.parent is None else visible(self.parent.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The metrics of one call of `log`."""

    step: int
    time: int
    """When they were logged, in milliseconds since 1970."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """The data that a run trains on or is evaluated on."""

    name: str
    """For example the id of an environment."""
    digest: str
    """Equal for equal data; at most 36 characters."""
    context: Literal["training", "evaluation"]
    source: Mapping[str, Any] = field(default_factory=dict)
    """Its origin, for example the arguments of an environment."""
    profile: Mapping[str, Any] = field(default_factory=dict)
    """Its size, for example the number of tasks."""


class Tracker:
    """Records one run: the base class of trackers.

    After `TrackerChoice.start`, all calls come from one thread, the metrics of a step before what
    the run recorded behind them. A method may raise: a transient error is repeated until the call
    succeeds, also by a later process; any other is logged and counted, and the run continues.
    """

    id: str = ""
    """What the tracker calls the run, if it can be resumed."""
    address: str = ""
    """The address of the store, if it has one."""
    how_to_look: str = ""
    """The command or the address that shows the run."""
    points_per_call = 1
    """Maximum number of points of one `log_points`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records metrics of a step; values are finite floats."""

    def log_points(self, points: Sequence[Point]) -> None:
        """Records points with their times."""
        for point in points:
            self.log(point.metrics, point.step)

    def text(self, name: str, text: str) -> None:
        """Stores a text under a name such as `score.txt`."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Stores a file, or the files of a folder; they exist until `finish`."""

    def log_input(self, source: Input) -> None:
        """Records what the run trains on or is evaluated on."""

    def log_traces(self, traces: Sequence[Trace]) -> None:
        """Records episodes."""

    def finish(self, status: Status, reason: str) -> None:
        """Flushes everything and ends the run; called once.

        Args:
            status: How the run ended.
            reason: Why it failed, or an empty string.
        """

    def is_transient(self, error: Exception) -> bool:
        """Returns whether a call that raised this error may succeed later.

        Only for a tracker that records a repeated call once.
        """
        return False


class TrackerChoice(Protocol):
    """The settings of a tracker: a frozen dataclass that `gspo_env.registry` finds by name.

    It may have `package`, which must be installed (the extra has the same name), and a method
    `check`, which opens its store before anything is written or trained.
    """

    def start(self, run: RunInfo) -> Tracker:
        """Begins or resumes a run; an error ends it before it trains."""


@settings
class NoTracker:
    """Records in no tracker; the run writes its `metrics.jsonl` regardless."""

    def start(self, run: RunInfo) -> Tracker:
        """Is never called: `MultiTracker` leaves this choice out."""
        raise NotImplementedError


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
