"""Episodes to samples to packed batches: no padding is computed, and no shared token twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.prefix import Run, grow, order, sure
from gspo_env.types import BoolArray, Episode, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training sequence with its credit."""

    token_ids: IntArray
    """(T,)"""
    turn_ids: IntArray
    """(T,) turn of each model token, -1 elsewhere."""
    advantages: FloatArray
    """(N,) of each model token."""
    engine_logprobs: FloatArray
    """(N,); NaN where they are not known."""

    @property
    def mask(self) -> BoolArray:
        """(T,) true on model tokens."""
        return self.turn_ids >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Sequences laid end to end. B sequences, T tokens, N model tokens.

    `source_N` is the row position whose logits predict each model token:

        tokens   p p a a p a      turn_ids  -1 -1 0 0 -1 1
        source_N [1, 2, 4]        target_N  [a, a, a]

    Where sequences share a prefix its tokens stand in the row once, and a model token in it has one
    place in N for each of the sequences: its prediction is made once, each sequence has a loss of
    its own.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    lengths_B: tuple[int, ...]
    runs: tuple[Run, ...]
    """How sequences share tokens; empty where none are."""
    uses_T: Tensor
    """The number of sequences that each token of the row belongs to."""
    distinct_M: Tensor | None
    """Where in N the predictions stand that differ from each other; None where all do."""
    expand_N: Tensor | None
    """Which of them each model token is."""
    source_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    turn_N: Tensor
    advantages_N: Tensor
    engine_logprobs_N: Tensor


def to_sample(episode: Episode, advantages: FloatArray) -> Sample:
    """One training sequence of an episode and its advantages.

    Per-turn advantages (K,) are given to each token of their turn; per-token ones (N,) stay as they
    are. What the environment said of single tokens wins: `token_advantages` and `token_mask` in a
    turn's info, see `gspo_env.env.base.Action`.
    """
    turn_ids = episode.turn_ids
    turn_N = turn_ids[turn_ids >= 0]
    values_N = np.asarray(advantages, dtype=np.float64)
    values_N = values_N[turn_N] if len(values_N) == len(episode.turns) else values_N.copy()
    keep_N = np.ones(len(turn_N), dtype=bool)
    for k, turn in enumerate(episode.turns):
        if "token_advantages" in turn.info:
            values_N[turn_N == k] = turn.info["token_advantages"]
        if "token_mask" in turn.info:
            keep_N[turn_N == k] = np.asarray(turn.info["token_mask"], dtype=bool)
    turn_ids[np.flatnonzero(turn_ids >= 0)[~keep_N]] = -1
    return Sample(
        token_ids=episode.token_ids,
        turn_ids=turn_ids,
        advantages=values_N[keep_N],
        engine_logprobs=episode.engine_logprobs[keep_N],
    )


def pack(samples: Sequence[Sample], device: torch.device | str = "cpu") -> PackedBatch:
    """Lays samples end to end; the first token of a sequence is never a model token.

    A prefix that samples share is laid once if that saves enough.
    """
    sequences = [s.token_ids for s in samples]
    sizes = np.array([len(row) for row in sequences])
    turns = np.concatenate([s.turn_ids for s in samples])
    tokens = np.concatenate(sequences)
    sorted_ = order(sequences)
    tree = grow(sequences, sorted_) if sorted_.pays else None
    positions = np.concatenate([np.arange(n) for n in sizes])
    place = np.concatenate(tree.places) if tree else np.arange(len(tokens))
    model = np.flatnonzero(turns >= 0)
    row = np.unique(place, return_index=True, return_counts=True)[1:] if tree else None
    source, target = place[model - 1], tokens[model]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    distinct = expand = None
    if tree:
        pairs = source * (int(tokens.max()) + 1) + target
        _, first, back = np.unique(pairs, return_index=True, return_inverse=True)
        distinct, expand = tensor(first), tensor(back)
    return PackedBatch(
        input_ids_T=tensor(tokens if row is None else tokens[row[0]]),
        positions_T=tensor(positions if row is None else positions[row[0]]),
        lengths_B=tuple(sizes.tolist()),
        runs=tree.runs if tree else (),
        uses_T=tensor(np.ones(len(tokens), dtype=np.int64) if row is None else row[1]),
        distinct_M=distinct,
        expand_N=expand,
        source_N=tensor(source),
        target_N=tensor(target),
        sequence_N=tensor(np.repeat(np.arange(len(samples)), sizes)[model]),
        turn_N=tensor(turns[model]),
        advantages_N=tensor(np.concatenate([s.advantages for s in samples])).float(),
        engine_logprobs_N=tensor(np.concatenate([s.engine_logprobs for s in samples])).float(),
    )


def microbatches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Splits samples into rows of at most `max_tokens`, or of one sample.

    Longest first, so that a row's lengths are alike; or, where that saves enough, those that share
    a prefix together, whose tokens count once.
    """
    sorted_ = order([s.token_ids for s in samples])
    by_size = sorted(range(len(samples)), key=lambda n: -len(samples[n].token_ids))
    new = sure(sorted_.shared) if sorted_.pays else np.zeros(len(samples), dtype=np.int64)
    rows: list[list[Sample]] = [[]]
    used = 0
    for n, shared in zip(sorted_.ids if sorted_.pays else by_size, new.tolist(), strict=True):
        length = len(samples[n].token_ids)
        if rows[-1] and used + length - shared > max_tokens:
            rows.append([])
            used = shared
        rows[-1].append(samples[n])
        used += length - shared
    return rows if rows[0] else []
