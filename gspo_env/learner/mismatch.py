"""Importance weights for the mismatch between the trainer's and the engine's policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from gspo_env.errors import BatchError
from gspo_env.learner.losses import (
    LOG_RATIO_LIMIT,
    Correction,
    check_ids,
    check_shapes,
    segment_mean,
    wide_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor


def importance_weights(
    trainer_logprobs_N: Tensor,
    engine_logprobs_N: Tensor,
    sequence_ids_N: Tensor,
    *,
    kind: Correction,
    cap: float = 2.0,
    num_sequences: int | None = None,
) -> Tensor:
    """Weights for the mismatch rho between the trainer's and the engine's sampling policy.

    `truncated` gives each token min(rho, cap). `mask` gives 0 to every token of a sequence whose
    geometric-mean rho leaves [1/cap, cap], 1 to the others. `none` gives 1. Do not use them if the
    engine's log-probabilities are pi_old: the ratio then already contains the mismatch.

    Shapes:
        Every tensor, and the result: (N,).

    Raises:
        BatchError: Shapes do not fit together, the kind is unknown, or the cap is below 1.

    Source:
        Truncated importance sampling as in arXiv 1802.01561 (rho-bar, eq. 1).
    """
    if kind not in get_args(Correction) or not cap >= 1:
        raise BatchError(
            f"kind is {kind!r} and cap is {cap!r}; expected one of {get_args(Correction)} and a "
            "number of at least 1"
        )
    check_shapes(
        trainer_logprobs_N.shape, engine_logprobs_N=engine_logprobs_N, sequence_ids_N=sequence_ids_N
    )
    dtype = wide_dtype(trainer_logprobs_N)
    log_rho_N = trainer_logprobs_N.detach().to(dtype) - engine_logprobs_N.detach().to(dtype)
    if kind == "none" or not len(log_rho_N):
        return log_rho_N.new_ones(log_rho_N.shape)
    if kind == "truncated":
        return log_rho_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    check_ids("sequence_ids_N", sequence_ids_N, num_sequences)
    count = int(sequence_ids_N.max()) + 1 if num_sequences is None else num_sequences
    mean_N = segment_mean(log_rho_N, sequence_ids_N, count)
    return (mean_N.abs() <= mean_N.new_full((), cap).log()).to(dtype)
