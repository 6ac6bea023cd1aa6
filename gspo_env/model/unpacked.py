"""Forward passes of a row whose sequences are taken apart, for the model's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gspo_env.batch.sample import PackedBatch
from gspo_env.model.attention import PackedAttention
from gspo_env.model.scorer import States


def run_alone(
    states_of: Callable[..., States], batch: PackedBatch, options: dict[str, Any]
) -> States:
    """Returns the states of the model tokens with a pass for each sequence.

    Args:
        states_of: `Scorer.states`.
        batch: The row.
        options: Keywords of the model.
    """
    states, routers, start = [], [], 0
    for length, source in zip(
        batch.lengths_B, torch.split(batch.source_N, list(batch.counts_B)), strict=True
    ):
        ids = batch.input_ids_T[None, start : start + length]
        state, router = states_of(source - start, input_ids=ids, **options)
        states.append(state[0])
        routers.append(router)
        start += length
    return torch.cat(states), [torch.cat(layer) for layer in zip(*routers, strict=True)]


def run_padded(
    states_of: Callable[..., States], batch: PackedBatch, options: dict[str, Any]
) -> States:
    """Does the same with a batch for sequences of similar length, padded on the right.

    No token sees what is to its right, so no mask is needed.
    """
    rows = PackedAttention(batch.lengths_B, batch.input_ids_T.device)
    states, routers = [], []
    for ids in rows.padded(batch.input_ids_T[:, None, None]):
        ids_BL = ids[:, 0, :, 0]
        state, layers = states_of(slice(None), input_ids=ids_BL, **options)
        states.append(state[:, None])
        routers.append([layer.view(len(ids_BL), 1, *ids_BL.shape[1:], -1) for layer in layers])
    router_logits = [rows.unpadded(layer)[:, 0] for layer in zip(*routers, strict=True)]
    return rows.unpadded(states)[batch.source_N, 0], router_logits
