"""The loss of training for padded sequences, as other libraries have them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gspo_env.errors import BatchError
from gspo_env.learner.losses import ObjectiveOutput, check_shapes, packed_policy_loss

if TYPE_CHECKING:
    from torch import Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    turn_ids: Tensor | None = None,
    episode_ids: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    ages: Tensor | None = None,
    **options: Any,
) -> ObjectiveOutput:
    """Computes the loss of `packed_policy_loss` for padded sequences.

    The options are the fields of `ClipSettings`. What a masked-out slot holds, NaN included,
    changes neither the loss nor its gradient. Sequences without a model token do not count. Rows
    with the same id in `episode_ids` are one sequence in these terms.

    Shapes:
        logprobs, old_logprobs, mask: (B, T); advantages: (B,) or (B, T); turn_ids,
        reference_logprobs, importance_weights, ages: (B, T) if given; episode_ids: (B,) in [0, B)
        if given.

    Raises:
        BatchError: Shapes do not fit together.
        ConfigError: An option is invalid.
    """
    import torch

    if logprobs.ndim != 2:
        raise BatchError(f"logprobs has shape {tuple(logprobs.shape)}; expected (B, T)")
    if mask.dtype != torch.bool:
        raise BatchError(f"mask has dtype {mask.dtype}; expected torch.bool")
    by_sequence = advantages.ndim == 1
    check_shapes(logprobs.shape[:1], episode_ids=episode_ids)
    check_shapes(logprobs.shape[: advantages.ndim], advantages=advantages)
    check_shapes(
        logprobs.shape,
        mask=mask,
        old_logprobs=old_logprobs,
        turn_ids=turn_ids,
        reference_logprobs=reference_logprobs,
        importance_weights=importance_weights,
        ages=ages,
    )
    rows_N = mask.nonzero()[:, 0]
    output = packed_policy_loss(
        logprobs[mask],
        old_logprobs[mask],
        advantages[rows_N] if by_sequence else advantages[mask],
        rows_N if episode_ids is None else episode_ids[rows_N],
        num_sequences=len(mask),
        turn_ids_N=None if turn_ids is None else turn_ids[mask],
        reference_logprobs_N=None if reference_logprobs is None else reference_logprobs[mask],
        importance_weights_N=None if importance_weights is None else importance_weights[mask],
        ages_N=None if ages is None else ages[mask],
        **options,
    )

    def padded(values_N: Tensor | None, elsewhere: float) -> Tensor | None:
        if values_N is None:
            return None
        full = torch.full(mask.shape, elsewhere, dtype=values_N.dtype, device=mask.device)
        return full.masked_scatter(mask, values_N)

    return replace(
        output,
        ratio=padded(output.ratio, 1.0),
        clipped=padded(output.clipped, False),
        kl=padded(output.kl, 0.0),
    )
