"""Attention over a tree of runs with masks: for windows, and for a GPU without a flash kernel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.packing import upload
from gspo_env.model.attention import sdpa, take
from gspo_env.model.tree_attention import TreeAttention, token_paths

_WHOLE = 1 << 24
"""Scores of all heads up to which a GPU computes those of every pair of a row's tokens: it takes
less time for them than a host for the launches of buckets."""


def attend(
    tree: TreeAttention, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """See `Ragged.attend`; each run attends to its whole path."""
    whole = query.device.type == "cuda" and query.shape[1] * len(query) ** 2 <= _WHOLE
    masks = tree.masks.get((window, whole))
    if masks is None:
        masks = [_visible(tree, window, query.device)] if whole else _bands(tree, window)
        tree.masks[window, whole] = masks
    if whole:
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out = sdpa(q, k, v, scale, masks[0].to(q.dtype), causal=False)
        return out.squeeze(0).transpose(0, 1)
    parts, (path_buckets, restore) = [], tree.path_buckets
    for (index, path, _), mask in zip(path_buckets, masks, strict=True):
        q, k, v = take(query, index), take(key, path), take(value, path)
        out = sdpa(q, k, v, scale, mask, causal=False)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, restore)


def _visible(tree: TreeAttention, window: int | None, device: torch.device) -> Tensor:
    """Returns (T, T), added to the scores of a row: 0 for the tokens that a token sees."""
    mask = np.full((tree.runs[-1].stop,) * 2, -np.inf, dtype=np.float32)
    for run, path in zip(tree.runs, token_paths(tree.runs), strict=True):
        distance = np.arange(run.depth, run.depth + run.length)[:, None] - np.arange(len(path))
        seen = (distance >= 0) & (distance < (window or len(path)))
        mask[run.start : run.stop, path] = np.where(seen, 0, -np.inf)
    (moved,) = upload([mask], device)
    return moved


def _bands(tree: TreeAttention, window: int | None) -> list[Tensor]:
    """Returns for each bucket which keys of its path each query sees."""
    masks = []
    for _, path, position in tree.path_buckets[0]:
        distance = position[:, None, :, None] - torch.arange(path.shape[1], device=path.device)
        masks.append((distance >= 0) & (distance < (window or path.shape[1])))
    return masks
