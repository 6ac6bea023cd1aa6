"""Shared prefixes: tokens that several samples begin with are computed once.

The hidden state of a token depends only on the tokens up to it. So samples can share it, even if
the token has another turn or advantage in each of them.

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
"""Minimum tokens of a shared run, because each run costs a call in every layer."""
_WORTH = 0.05
"""Minimum fraction of tokens that sharing has to save; otherwise rows are packed without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive tokens that belong to the same samples; the runs that continue it follow it."""

    start: int
    """Position in the row."""
    length: int
    depth: int
    """Position of its first token in its samples."""
    end: int
    """Position in the row at which the runs that continue it end."""

    @property
    def stop(self) -> int:
        """Position in the row after its last token."""
        return self.start + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Runs in depth-first order, and the path of each sample through them."""

    runs: tuple[Run, ...]
    places: tuple[IntArray, ...]
    """Row position of each token, for each sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Sequences sorted by their tokens, so that those with a common prefix are neighbours."""

    ids: tuple[int, ...]
    shared: IntArray
    """Tokens that each sequence shares with the one before it; 0 for the first."""
    saved: IntArray
    """Lower bound on those that a tree shares; its runs have at least `LEAST` tokens."""
    pays: bool
    """Whether sharing saves enough to build a tree."""


def sort_by_prefix(sequences: Sequence[IntArray]) -> Order:
    """Sorts sequences by their tokens."""
    keys = [row.astype(">i8").tobytes() for row in sequences]  # bytes sort like the numbers
    ids = sorted(range(len(sequences)), key=keys.__getitem__)
    shared = np.zeros(len(ids), dtype=np.int64)
    for n in range(1, len(ids)):
        shared[n] = common_prefix(sequences[ids[n - 1]], sequences[ids[n]])
    saved = np.maximum(shared - (LEAST - 1), 0)
    pays = bool(saved.sum() >= _WORTH * sum(map(len, sequences)))
    return Order(ids=tuple(ids), shared=shared, saved=saved, pays=pays)


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Returns how many tokens two sequences begin with alike."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def build_tree(sequences: Sequence[IntArray], order: Order) -> Tree:
    """Builds the tree of a row."""
    places: list[IntArray] = [np.empty(len(row), dtype=np.int64) for row in sequences]
    spans: list[tuple[int, int, int]] = []
    size = 0
    parts = [(0, len(sequences), 0)]
    while parts:
        low, high, depth = parts.pop()
        until = _prefix(sequences, order, low, high)
        if high - low == 1 or until - depth >= LEAST:
            for n in order.ids[low:high]:
                places[n][depth:until] = np.arange(size, size + until - depth)
            if until > depth:
                spans.append((size, until - depth, depth))
            size += until - depth
            depth = until
        if high - low > 1:
            parts += [(a, b, depth) for a, b in reversed(_split(order, low, high))]
    runs = []
    for n, (start, length, depth) in enumerate(spans):
        # the subtree of a run ends where the next run that is not deeper starts
        end = next((later for later, _, other in spans[n + 1 :] if other <= depth), size)
        runs.append(Run(start=start, length=length, depth=depth, end=end))
    return Tree(runs=tuple(runs), places=tuple(places))


def separate_runs(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Returns the runs of sequences that share nothing."""
    ends = np.cumsum(lengths).tolist()
    return tuple(
        Run(start=end - length, length=length, depth=0, end=end)
        for end, length in zip(ends, lengths, strict=True)
    )


def _prefix(sequences: Sequence[IntArray], order: Order, low: int, high: int) -> int:
    """Returns the length of the prefix that all sequences of a part share."""
    if high - low == 1:
        return len(sequences[order.ids[low]])
    return int(order.shared[low + 1 : high].min())


def _split(order: Order, low: int, high: int) -> list[tuple[int, int]]:
    """Splits a part by how its sequences continue the common prefix."""
    inner = order.shared[low + 1 : high]
    cuts = [low, *(np.flatnonzero(inner == inner.min()) + low + 1).tolist(), high]
    return list(pairwise(cuts))


def split_minibatches(
    sequences: Sequence[IntArray], count: int, generator: np.random.Generator
) -> list[list[int]]:
    """Partitions into random minibatches of equal size, give or take one.

    Sequences with a common prefix stay together where that is possible. The units are the largest
    parts of the tree that fit a minibatch. In random order and from a random offset they fill a
    cycle of `len(sequences)` slots, which is cut into `count` equal intervals; a unit goes to the
    interval of its midpoint. Then minibatches that got too many give their last sequences to those
    that got too few. So every sequence is equally likely to be in every minibatch.
    """
    order = sort_by_prefix(sequences)
    minibatches: list[list[int]] = [[] for _ in range(count)]
    size = len(sequences)
    units = _units(order, size // count)
    offset = generator.random() * size
    for n in generator.permutation(len(units)):
        low, high = units[n]
        middle = (offset + (high - low) / 2) % size
        minibatches[min(int(middle * count / size), count - 1)] += order.ids[low:high]
        offset += high - low
    _level(minibatches, generator)
    return minibatches


def _level(minibatches: list[list[int]], generator: np.random.Generator) -> None:
    """Moves sequences until the sizes differ by at most one; the largest stay the larger ones."""
    least, extra = divmod(sum(map(len, minibatches)), len(minibatches))
    ranked = sorted(generator.permutation(len(minibatches)), key=lambda n: -len(minibatches[n]))
    spare: list[int] = []
    for rank, n in enumerate(ranked):
        room = least + (rank < extra)
        spare += minibatches[n][room:]
        del minibatches[n][room:]
    for rank, n in enumerate(ranked):
        missing = least + (rank < extra) - len(minibatches[n])
        minibatches[n] += spare[:missing]
        del spare[:missing]


def _units(order: Order, largest: int) -> list[tuple[int, int]]:
    """Returns ranges of the order with a common prefix and at most `largest` sequences."""
    parts, units = [(0, len(order.ids), 0)], []
    while parts:
        low, high, above = parts.pop()
        if high - low == 1:
            units.append((low, high))
            continue
        depth = int(order.shared[low + 1 : high].min())
        if order.pays and depth - above >= LEAST and high - low <= largest:
            units.append((low, high))
        else:
            parts += [(a, b, depth) for a, b in _split(order, low, high)]
    return units
