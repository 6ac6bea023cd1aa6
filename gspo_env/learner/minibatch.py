"""What one optimiser step works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gspo_env.batch.sample import PackedBatch, Sample


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
