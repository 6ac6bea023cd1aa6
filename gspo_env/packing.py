"""Episodes to samples to packed batches: no padding token is ever computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    """

    input_ids_T: Tensor
    positions_T: Tensor
    lengths_B: tuple[int, ...]
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
    turn's info, see `gspo_env.text_env.Action`.
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
    """Lays samples end to end; the first token of a sequence is never a model token."""
    sizes = np.array([len(s.token_ids) for s in samples])
    turns = np.concatenate([s.turn_ids for s in samples])
    tokens = np.concatenate([s.token_ids for s in samples])
    row_T = np.repeat(np.arange(len(samples)), sizes)
    model = np.flatnonzero(turns >= 0)

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedBatch(
        input_ids_T=tensor(tokens),
        positions_T=tensor(np.concatenate([np.arange(n) for n in sizes])),
        lengths_B=tuple(sizes.tolist()),
        source_N=tensor(model - 1),
        target_N=tensor(tokens[model]),
        sequence_N=tensor(row_T[model]),
        turn_N=tensor(turns[model]),
        advantages_N=tensor(np.concatenate([s.advantages for s in samples])).float(),
        engine_logprobs_N=tensor(np.concatenate([s.engine_logprobs for s in samples])).float(),
    )


def microbatches(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Splits samples, longest first, into rows of at most `max_tokens`, or of one sample."""
    rows: list[list[Sample]] = [[]]
    used = 0
    for sample in sorted(samples, key=lambda s: -len(s.token_ids)):
        if rows[-1] and used + len(sample.token_ids) > max_tokens:
            rows.append([])
            used = 0
        rows[-1].append(sample)
        used += len(sample.token_ids)
    return rows if rows[0] else []
