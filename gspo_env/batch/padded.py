"""Converts padded tensors of rollouts from other code to samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.errors import BatchError


def from_padded(
    input_ids: Any,
    attention_mask: Any,
    response_mask: Any,
    advantages: Any,
    *,
    old_logprobs: Any = None,
) -> list[Sample]:
    """Makes samples for `Learner.update` from padded tensors, arrays or lists.

    Each row is an episode of one turn. Padding may be on either side. Rows without a response token
    are left out.

    Args:
        input_ids: (B, T)
        attention_mask: (B, T) true on tokens that are not padding.
        response_mask: (B, T) true on tokens that the policy sampled.
        advantages: (B,) of sequences, or (B, T), read where `response_mask` is true.
        old_logprobs: (B, T) of the sampled tokens, each at the position of its token; a loss with
            `old_logprobs="engine"` takes them as pi_old.

    Raises:
        BatchError: Shapes or masks do not fit together.

    Example:
        samples = from_padded(ids, attention, response, scores - scores.mean())
        metrics = learner.update(samples)
    """
    ids = _array("input_ids", input_ids, None, np.int64)
    if ids.ndim != 2:
        raise BatchError(f"input_ids has shape {ids.shape}; expected (B, T)")
    real = _array("attention_mask", attention_mask, ids.shape, bool)
    model = _array("response_mask", response_mask, ids.shape, bool)
    if (beyond := np.flatnonzero((model & ~real).any(axis=1))).size:
        raise BatchError(f"response_mask of sequence {beyond[0]} is true on padding")
    credit = _array("advantages", advantages, None, np.float64)
    credit = credit[:, None] if credit.ndim == 1 else credit
    if credit.shape not in ((len(ids), 1), ids.shape):
        raise BatchError(f"advantages has shape {credit.shape}; expected ({len(ids)},) or (B, T)")
    values = {"advantages": np.broadcast_to(credit, ids.shape)}
    if old_logprobs is not None:
        values["engine_logprobs"] = _array("old_logprobs", old_logprobs, ids.shape, np.float64)
    for name, array in values.items():
        if not np.isfinite(array[model]).all():
            raise BatchError(f"the {name} hold NaN or infinity; expected finite numbers")
    return [
        Sample(
            token_ids=ids[b][real[b]],
            turn_ids=np.where(model, 0, -1)[b][real[b]],
            episode=int(b),
            **{name: array[b][model[b]] for name, array in values.items()},
        )
        for b in np.flatnonzero(model.any(axis=1))
    ]


def _array(name: str, values: Any, shape: Sequence[int] | None, dtype: Any) -> Any:
    """Converts a list, an array or a tensor, with any device and gradient."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if dtype is np.int64 and array.dtype.kind not in "iu":
        raise BatchError(f"{name} has dtype {array.dtype}; expected integers")
    if shape is not None and array.shape != tuple(shape):
        raise BatchError(f"{name} has shape {array.shape}; expected {tuple(shape)}")
    if dtype is bool and not np.isin(array, (0, 1)).all():
        raise BatchError(f"{name} holds other values than 0 and 1")
    return array.astype(dtype)
