"""The places of messages in a rendering of a chat template, and what the template does to them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

_EDGE = "\n \n"
HEAD, TAIL = f'{_EDGE}"\\é <b>', f"é&'\\\"{_EDGE}"
"""Texts whose ends show what a template strips or escapes."""
# what `rstrip` of an added token removes
_SPACE = r"[^\S\x1c-\x1f]+"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of a message in a rendering, and what the template does to the message."""

    index: int
    left: str | None = ""
    """Characters that are stripped at the start; None is all white space."""
    right: str | None = ""
    """Characters that are stripped at the end."""
    escaped: bool = False
    """Whether the message is written as a JSON string."""

    def show(self, text: str) -> str:
        """Returns what the template shows of a text."""
        text = text.lstrip(self.left).rstrip(self.right)
        return json.dumps(text, ensure_ascii=False)[1:-1] if self.escaped else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text between control tokens."""

    pieces: tuple[str | Slot, ...]
    left: bool = False
    """Whether the control token before it takes the white space at its start."""
    right: bool = False
    """Whether the control token behind it takes the white space at its end."""

    def show(self, texts: Sequence[str]) -> str:
        """Returns the text with those of the messages in its slots, by `Slot.index`."""
        shown = [p if isinstance(p, str) else p.show(texts[p.index]) for p in self.pieces]
        text = "".join(shown)
        if self.left:
            text = re.sub(rf"\A{_SPACE}", "", text)
        return re.sub(rf"{_SPACE}\Z", "", text) if self.right else text


Part = int | Text
"""A control token's id, or text."""
Parts = tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """All of a conversation but the texts of its messages."""

    roles: tuple[str, ...]
    schemas: str = "[]"
    """The tools as JSON."""
    generation: bool = True
    """Whether the start of the assistant's next message follows."""
    empty: frozenset[int] = frozenset()
    """The messages whose text is empty."""


def read_slots(
    places: Sequence[int], glue: Sequence[str], changed: Sequence[str]
) -> list[Slot] | None:
    """Returns the slots whose changes explain a rendering, or None if there are none.

    Args:
        places: The index of each of the n slots.
        glue: (n + 1,) texts between the markers.
        changed: (n + 1,) the same with `HEAD` before and `TAIL` behind each marker.
    """
    ways = list(itertools.product((False, True), ("", None, "\n")))
    heads = [(Slot(index=0, left=w[1], escaped=w[0]).show(HEAD), w) for w in ways]
    tails = [(Slot(index=0, right=w[1], escaped=w[0]).show(TAIL), w) for w in ways]
    nothing = [("", ways[0])]
    found = []
    for n, (between, text) in enumerate(zip(glue, changed, strict=True)):
        ends, starts = tails if n else nothing, heads if n < len(places) else nothing
        pairs = itertools.product(ends, starts)
        matches = ((e, s) for (end, e), (start, s) in pairs if text == end + between + start)
        found.append(next(matches, None))
    slots = []
    for index, (before, behind) in zip(places, itertools.pairwise(found), strict=True):
        if before is None or behind is None or before[1][0] != behind[0][0]:
            return None
        (escaped, left), (_, right) = before[1], behind[0]
        slots.append(Slot(index=index, left=left, right=right, escaped=escaped))
    return slots
