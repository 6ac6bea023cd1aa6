"""Training sequences with their credit, alone and in a packed row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gspo_env.batch.prefix import Run
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
    engine_logprobs: FloatArray | None = None
    """(N,) as the engine reported them; None if they are not known."""

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

    The tokens of a shared prefix are in the row once. A model token in it has one place in N for
    each of the sequences: it is predicted once, but each sequence has its own loss.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    lengths_B: tuple[int, ...]
    counts_B: tuple[int, ...]
    """Model tokens of each sequence."""
    num_turns: int
    """One more than the largest turn."""
    runs: tuple[Run, ...]
    """How sequences share tokens; empty if they share none."""
    uses_T: Tensor
    """The number of sequences that each token of the row belongs to."""
    source_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    turn_N: Tensor
    advantages_N: Tensor
    engine_logprobs_N: Tensor | None = None
    """None if they are not known for every sample."""
    distinct_M: Tensor | None = None
    """Index of each unique (position, target) pair; None if all are unique."""
    expand_N: Tensor | None = None
    """Index into `distinct_M` of each model token."""


def to_sample(episode: Episode, advantages: FloatArray) -> Sample:
    """Makes the training sequence of an episode from its advantages.

    Per-turn advantages (K,) are given to each token of their turn; per-token ones (N,) stay as they
    are. The `token_advantages` and `token_mask` of a turn's `StepInfo` replace the estimator's.
    """
    turn_ids = episode.turn_ids
    turn_N = turn_ids[turn_ids >= 0]
    values_N = np.asarray(advantages, dtype=np.float64)
    values_N = values_N[turn_N] if len(values_N) == len(episode.turns) else values_N.copy()
    keep_N = np.ones(len(turn_N), dtype=bool)
    for k, turn in enumerate(episode.turns):
        if turn.info.token_advantages is not None:
            values_N[turn_N == k] = turn.info.token_advantages
        if turn.info.token_mask is not None:
            keep_N[turn_N == k] = turn.info.token_mask
    turn_ids[np.flatnonzero(turn_ids >= 0)[~keep_N]] = -1
    return Sample(
        token_ids=episode.token_ids,
        turn_ids=turn_ids,
        advantages=values_N[keep_N],
        engine_logprobs=episode.engine_logprobs[keep_N],
    )
