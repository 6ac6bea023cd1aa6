"""What one optimiser step works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gspo_env.batch.packing import by_episode
from gspo_env.batch.prefix import split_minibatches
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.errors import BatchError


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """A packed row, and its log-probabilities from before the first step."""

    row: PackedBatch
    samples: tuple[Sample, ...] = ()
    """What is packed in the row."""
    trainer_logprobs_N: Tensor | None = None
    """Of the policy before the first step; None if nothing needs them, and in the first minibatch,
    because its backward pass gives the same numbers."""
    reference_logprobs_N: Tensor | None = None
    """Of the reference; None if the policy still equals it, or if nothing needs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """The samples of one optimiser step, in packed rows.

    The numbers count those of all ranks; the rows are those of this one.
    """

    microbatches: tuple[Microbatch, ...]
    first: bool
    """Whether this is the first optimiser step of the update."""
    episodes: int
    tokens: int
    """Model tokens."""
    sequences: int


def split(
    samples: Sequence[Sample], minibatches: int, seed: int, *, engine: bool
) -> list[list[Sample]]:
    """Splits samples by whole episodes; those without a model token are left out.

    Args:
        samples: The samples of an update.
        minibatches: Their number, or that of the episodes if it is smaller.
        seed: Seed of the split.
        engine: Whether log-probabilities of the engine are needed.

    Raises:
        BatchError: No sample has a model token, or log-probabilities of the engine are needed and
            not known.
    """
    samples = with_model_tokens(samples)
    if engine and any(s.engine_logprobs is None for s in samples):
        raise BatchError(
            "the engine's log-probabilities of some samples are not known; expected them where "
            "they are pi_old or a mismatch is corrected"
        )
    episodes = by_episode(samples)
    parts = [list(range(len(episodes)))]
    count = min(minibatches, len(episodes))
    if count > 1:
        generator = np.random.default_rng(seed)
        parts = split_minibatches([e[0].token_ids for e in episodes], count, generator)
    return [[sample for i in part for sample in episodes[i]] for part in parts]


def with_model_tokens(samples: Sequence[Sample]) -> list[Sample]:
    """Leaves out samples without a model token.

    Raises:
        BatchError: None is left.
    """
    kept = [s for s in samples if s.mask.any()]
    if not kept:
        raise BatchError("no sample has a model token; expected at least one")
    return kept
