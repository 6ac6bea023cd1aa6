"""Records of traces: what happened in an episode, as spans. Imports no tracking library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SpanKind = Literal["episode", "turn", "step"]
"""A whole episode, a turn of the policy, or what the environment did with an action."""


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
