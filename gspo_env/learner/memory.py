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
from gspo_env.errors import TrainingError
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
        place: Index of the row.
        reason: The first line of the error.
        alone: No other row was in memory, so this one has to be split.
    """

    def __init__(self, place: int, reason: str, alone: bool = True) -> None:
        super().__init__(reason)
        self.place, self.reason, self.alone = place, reason, alone


@contextmanager
def watch(place: int) -> Iterator[None]:
    """Turns a failed allocation into `OutOfMemory`.

    Args:
        place: Index of the row that is computed.

    Raises:
        OutOfMemory: An allocation failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and not any(sign in str(error) for sign in _SIGNS):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OutOfMemory(place, reason) from None


def in_memory(
    minibatch: Minibatch,
    compute: Callable[[Minibatch], T],
    masters: MasterWeights,
    losses: list[Tensor],
    pack: Pack,
) -> tuple[T, int]:
    """Computes with a minibatch; where a row does not fit into memory, splits it and begins again.

    A row that was computed beside another one is first tried alone. A pass that failed may have
    added a part of its gradient, which is dropped with all that `compute` had added before.

    Args:
        minibatch: The minibatch.
        compute: The passes, each of them within `watch`.
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
            failed = OutOfMemory(error.place, error.reason, error.alone)
        # out of the block, because the error held the tensors of the pass
        if failed.alone:
            minibatch, splits = _split(minibatch, failed, pack), splits + 1
        else:
            logger.warning("%s; from here on, one row is computed at a time", failed.reason)
        if splits == 1:
            logger.warning(
                "%s; the pass is repeated in halves, a lower learner.microbatch_tokens avoids this",
                failed.reason,
            )
        masters.restore(gradients)
        del losses[count:]
        _free()


def _split(
    minibatch: Minibatch,
    failed: OutOfMemory,
    pack: Pack,
) -> Minibatch:
    """Returns the minibatch with the row that did not fit as two rows.

    The loss divides by the episodes and tokens of the minibatch, so its gradient is the same; only
    the router balance of a mixture of experts is computed over other rows.

    Raises:
        TrainingError: The row is one sequence.
    """
    rows = list(minibatch.microbatches)
    row = rows[failed.place]
    if len(row.samples) < 2:
        raise TrainingError(
            f"one sequence of {sum(row.row.lengths_B):,} tokens does not fit into memory "
            f"({failed.reason}); lower rollout.max_context, or set learner.checkpointing to true"
        )
    rows[failed.place : failed.place + 1] = _halves(row, pack)
    return replace(minibatch, microbatches=tuple(rows))


def _free() -> None:
    """Frees what a failed pass has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _halves(microbatch: Microbatch, pack: Pack) -> list[Microbatch]:
    middle = len(microbatch.samples) // 2
    tokens = sum(microbatch.row.counts_B[:middle])

    def part(chosen: slice, tokens_N: slice) -> Microbatch:
        def cut(values_N: Tensor | None) -> Tensor | None:
            return None if values_N is None else values_N[tokens_N]

        samples = microbatch.samples[chosen]
        return Microbatch(
            row=pack(samples),
            samples=samples,
            trainer_logprobs_N=cut(microbatch.trainer_logprobs_N),
            reference_logprobs_N=cut(microbatch.reference_logprobs_N),
        )

    return [
        part(slice(None, middle), slice(None, tokens)),
        part(slice(middle, None), slice(tokens, None)),
    ]
