"""Shared prefixes: where samples begin with the same tokens, those tokens are computed once.

A token's hidden state depends on the tokens up to it and on nothing else, so samples may share it
whatever they make of it: which of them sampled it, in which turn, with which advantage.

    a: 1 2 3 4 5        run 0: 1 2 3    run 1: 4 5    run 2: 9
    b: 1 2 3 9          row:   1 2 3 4 5 9     places of b: 0 1 2 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gspo_env.types import IntArray

LEAST = 16
"""Tokens of the shortest run that is shared: a run costs a call in every layer."""
_WORTH = 0.05
"""The least share of tokens that has to be saved; below it, rows are packed as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive tokens that belong to the same samples; what follows it stands behind it."""

    start: int
    """Position in the row."""
    length: int
    depth: int
    """Tokens before it, which is the position of its first token in its samples."""
    end: int
    """Position in the row where the runs that continue it end."""

    @property
    def stop(self) -> int:
        """Position in the row behind its last token."""
        return self.start + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Runs in depth-first order, and each sample's way through them."""

    runs: tuple[Run, ...]
    places: tuple[IntArray, ...]
    """Row position of each token, for each sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Sequences sorted by their tokens, so that those that share a prefix stand together."""

    ids: tuple[int, ...]
    shared: IntArray
    """Tokens that each shares with the one before it; 0 for the first."""
    saved: int
    """Tokens that need not be computed if short runs are left alone; an understatement."""
    total: int

    @property
    def pays(self) -> bool:
        """Whether enough is shared to be worth a tree."""
        return self.saved >= _WORTH * self.total


def order(sequences: Sequence[IntArray]) -> Order:
    """Sorts sequences by their tokens."""
    keys = [row.astype(">i8").tobytes() for row in sequences]  # sorts as the numbers do
    ids = sorted(range(len(sequences)), key=keys.__getitem__)
    shared = np.zeros(len(ids), dtype=np.int64)
    for n in range(1, len(ids)):
        shared[n] = _common(sequences[ids[n - 1]], sequences[ids[n]])
    return Order(
        ids=tuple(ids),
        shared=shared,
        saved=int(sure(shared).sum()),
        total=sum(map(len, sequences)),
    )


def sure(shared: IntArray) -> IntArray:
    """What neighbours certainly share in a tree that leaves runs below `LEAST` alone."""
    whole: IntArray = np.maximum(shared - (LEAST - 1), 0)
    return whole


def _common(a: IntArray, b: IntArray) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def grow(sequences: Sequence[IntArray], sorted_: Order) -> Tree:
    """The tree of a row."""
    places: list[IntArray] = [np.empty(len(row), dtype=np.int64) for row in sequences]
    found: list[tuple[int, int, int]] = []
    size = 0
    parts = [(0, len(sequences), 0)]
    while parts:
        low, high, depth = parts.pop()
        until = _prefix(sequences, sorted_, low, high)
        if high - low == 1 or until - depth >= LEAST:
            for n in sorted_.ids[low:high]:
                places[n][depth:until] = np.arange(size, size + until - depth)
            if until > depth:
                found.append((size, until - depth, depth))
            size += until - depth
            depth = until
        if high - low > 1:
            parts += [(a, b, depth) for a, b in reversed(_split(sorted_, low, high))]
    return Tree(runs=_close(found, size), places=tuple(places))


def _prefix(sequences: Sequence[IntArray], sorted_: Order, low: int, high: int) -> int:
    """Tokens that all of a part share; all that it has where it is one sequence."""
    if high - low == 1:
        return len(sequences[sorted_.ids[low]])
    return int(sorted_.shared[low + 1 : high].min())


def _split(sorted_: Order, low: int, high: int) -> list[tuple[int, int]]:
    """The parts that go on differently behind what all share."""
    inner = sorted_.shared[low + 1 : high]
    cuts = [low, *(np.flatnonzero(inner == inner.min()) + low + 1).tolist(), high]
    return list(pairwise(cuts))


def _close(found: list[tuple[int, int, int]], size: int) -> tuple[Run, ...]:
    """Finds where the runs that continue each run end: at the next one that is no deeper."""
    runs: list[Run] = []
    later: list[tuple[int, int]] = []
    for start, length, depth in reversed(found):
        while later and later[-1][1] > depth:
            later.pop()
        end = later[-1][0] if later else size
        runs.append(Run(start=start, length=length, depth=depth, end=end))
        later.append((start, depth))
    return tuple(reversed(runs))


def deal(
    sequences: Sequence[IntArray], count: int, generator: np.random.Generator
) -> list[list[int]]:
    """Deals sequences at random into `count` hands; those that share a prefix stay together.

    What is dealt is the largest parts of the tree that fit a hand. They are laid round a circle in
    random order from a random place, and a part goes to the sector that its middle lies in: every
    part, so every sequence, is equally likely to be in every hand, and no hand is empty.
    """
    sorted_ = order(sequences)
    hands: list[list[int]] = [[] for _ in range(count)]
    size = len(sequences)
    units = _units(sorted_, size // count)
    place = generator.random() * size
    for n in generator.permutation(len(units)):
        low, high = units[n]
        middle = (place + (high - low) / 2) % size
        hands[min(int(middle * count / size), count - 1)] += sorted_.ids[low:high]
        place += high - low
    return hands


def _units(sorted_: Order, largest: int) -> list[tuple[int, int]]:
    parts, units = [(0, len(sorted_.ids), 0)], []
    while parts:
        low, high, above = parts.pop()
        if high - low == 1:
            units.append((low, high))
            continue
        depth = int(sorted_.shared[low + 1 : high].min())
        if sorted_.pays and depth - above >= LEAST and high - low <= largest:
            units.append((low, high))
        else:
            parts += [(a, b, depth) for a, b in _split(sorted_, low, high)]
    return units
