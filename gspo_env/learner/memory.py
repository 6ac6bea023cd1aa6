"""Out of memory: the row that did not fit is split in halves, without a change of the gradient."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.errors import TrainingError, first_line
from gspo_env.learner.masters import MasterWeights
from gspo_env.learner.minibatch import Microbatch, Minibatch

logger = logging.getLogger(__name__)

T = TypeVar("T")
Pack = Callable[[Sequence[Sample]], PackedBatch]

_SIGNS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of the messages of allocations that failed and raise a plain `RuntimeError`."""


class OutOfMemory(Exception):
    """A row of a minibatch did not fit into memory.

    Attributes:
        index: Index of the row.
        reason: The first line of the error.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


@contextmanager
def detect_out_of_memory(index: int) -> Iterator[None]:
    """Turns a failed allocation into `OutOfMemory`.

    Args:
        index: Index of the row that is computed.

    Raises:
        OutOfMemory: An allocation failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        allocation = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not allocation and not any(sign in str(error) for sign in _SIGNS):
            raise
        raise OutOfMemory(index, first_line(error)) from None


def split_until_it_fits(
    minibatch: Minibatch,
    compute: Callable[[Minibatch], T],
    masters: MasterWeights,
    losses: list[Tensor],
    pack: Pack,
) -> tuple[T, int]:
    """Computes with a minibatch; splits a row that does not fit into memory and starts over.

    A pass that failed may have added a part of its gradient, which is dropped with all that
    `compute` had added before.

    Args:
        minibatch: The minibatch.
        compute: The passes, each of them within `detect_out_of_memory`.
        masters: Where gradients are added.
        losses: Where the losses of passes are appended.
        pack: Packs samples into a row.

    Returns:
        The result, and how often a row was split.

    Raises:
        TrainingError: A sequence alone does not fit.
    """
    gradients, count, splits = masters.gradients(), len(losses), 0
    while True:
        try:
            return compute(minibatch), splits
        except OutOfMemory as error:
            failure = OutOfMemory(error.index, error.reason)
        # out of the block, because the error held the tensors of the pass
        minibatch, splits = _split(minibatch, failure, pack), splits + 1
        if splits == 1:
            logger.warning(
                "%s; the pass is repeated in halves, a lower learner.microbatch_tokens avoids this",
                failure.reason,
            )
        masters.restore(gradients)
        del losses[count:]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _split(minibatch: Minibatch, failure: OutOfMemory, pack: Pack) -> Minibatch:
    """Returns the minibatch with the row that did not fit as two rows.

    The loss divides by the episodes and tokens of the minibatch, so its gradient is the same; only
    the router balance of a mixture of experts is computed over other rows.

    Raises:
        TrainingError: The row is one sequence.
    """
    rows = list(minibatch.microbatches)
    whole = rows[failure.index]
    middle = len(whole.samples) // 2
    if not middle:
        raise TrainingError(
            f"one sequence of {sum(whole.row.lengths_B):,} tokens does not fit into memory "
            f"({failure.reason}); lower rollout.max_context, or set learner.checkpointing to true"
        )
    tokens = sum(whole.row.counts_B[:middle])

    def half(part: slice, part_N: slice) -> Microbatch:
        scored = (whole.trainer_logprobs_N, whole.reference_logprobs_N, whole.entropy_N)
        trainer_N, reference_N, entropy_N = (
            None if values_N is None else values_N[part_N] for values_N in scored
        )
        return Microbatch(
            row=pack(whole.samples[part]),
            samples=whole.samples[part],
            trainer_logprobs_N=trainer_N,
            reference_logprobs_N=reference_N,
            entropy_N=entropy_N,
        )

    rows[failure.index : failure.index + 1] = [
        half(slice(None, middle), slice(None, tokens)),
        half(slice(middle, None), slice(tokens, None)),
    ]
    return replace(minibatch, microbatches=tuple(rows))
