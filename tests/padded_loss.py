"""The loss of training for padded sequences, as the reference and other libraries have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gspo_env.learner import ObjectiveOutput, packed_policy_loss


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    turn_ids: Tensor | None = None,
    **options: Any,
) -> ObjectiveOutput:
    """`packed_policy_loss` of the tokens under the mask; its values as padded tensors.

    Shapes:
        logprobs, old_logprobs, mask, turn_ids: (B, T); advantages: (B,) or (B, T).
    """
    rows_N = mask.nonzero()[:, 0]
    names = ("reference_logprobs", "importance_weights")
    given = {f"{n}_N": options.pop(n)[mask] for n in names if options.get(n) is not None}
    output = packed_policy_loss(
        logprobs[mask],
        old_logprobs[mask],
        advantages[rows_N] if advantages.ndim == 1 else advantages[mask],
        rows_N,
        num_sequences=len(mask),
        turn_ids_N=None if turn_ids is None else turn_ids[mask],
        **given,
        **options,
    )

    def padded(values_N: Tensor | None, elsewhere: float) -> Tensor | None:
        if values_N is None:
            return None
        full = torch.full(mask.shape, elsewhere, dtype=values_N.dtype)
        return full.masked_scatter(mask, values_N)

    ratio, clipped = padded(output.ratio, 1.0), padded(output.clipped, False)
    assert ratio is not None
    assert clipped is not None
    return replace(output, ratio=ratio, clipped=clipped, kl=padded(output.kl, 0.0))
