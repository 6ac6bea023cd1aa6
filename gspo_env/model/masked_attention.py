"""Attention over a tree with masks: windows, half precision, and a GPU without flash kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gspo_env.batch.packing import upload
from gspo_env.batch.prefix import Run
from gspo_env.model.attention import (
    WASTE,
    attend_by_products,
    buckets,
    padded_length,
    sdpa,
    take,
    widened,
)
from gspo_env.model.tree_attention import TreeAttention

_WHOLE = 1 << 24
"""Scores of all heads up to which a GPU computes those of every pair of a row's tokens: it takes
less time for them than a host for the launches of buckets."""


def attend(
    tree: TreeAttention, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """See `Ragged.attend`; each run attends to its whole path."""
    whole = query.device.type == "cuda" and query.shape[1] * len(query) ** 2 <= _WHOLE
    if (window, whole) not in tree.kept:
        masks = [_visible(tree, window, query.device)] if whole else _bands(tree, window)
        tree.kept[window, whole] = masks
    masks = tree.kept[window, whole]
    if whole:
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out = sdpa(q, k, v, scale, masks[0].to(q.dtype), causal=False)
        return out.squeeze(0).transpose(0, 1)
    parts, (places, restore) = [], path_buckets(tree)
    for (index, path, _), mask in zip(places, masks, strict=True):
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
    for _, path, position in path_buckets(tree)[0]:
        distance = position[:, None, :, None] - torch.arange(path.shape[1], device=path.device)
        masks.append((distance >= 0) & (distance < (window or path.shape[1])))
    return masks


def by_products(
    tree: TreeAttention, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attends as an engine does that has a cache; returns the logarithms of normalisers too."""
    parts = []
    places, restore = path_buckets(tree)
    for index, path, position in places:
        path = pad(path, (0, padded_length(path.shape[1]) - path.shape[1]))
        q, k, v = (t.transpose(1, 2) for t in (query[index], widened(key[path]), value[path]))
        visible = torch.arange(path.shape[1]) <= position[:, None, :, None]
        mask = torch.where(visible, 0.0, -torch.inf)
        out, norm = attend_by_products(q, k, v, scale, mask, normaliser=True)
        assert norm is not None  # it was asked for
        parts.append((out, norm[..., None]))
    out, norm = (
        torch.cat([t.transpose(1, 2).flatten(0, 1) for t in column]).index_select(0, restore)
        for column in zip(*parts, strict=True)
    )
    return out, norm


def path_buckets(tree: TreeAttention) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
    """Sorts runs into buckets of similar size; returns indices into the row.

    Each bucket has the row positions of its runs and of their paths, and positions in the
    sequence. The last index restores the row from all buckets. Padding goes at the end, where
    the causal mask hides it.
    """
    if "places" in tree.kept:
        places: tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor] = tree.kept["places"]
        return places
    # a GPU pads faster than a host launches the kernels of more buckets
    waste = 2.0 if torch.device(tree.device).type == "cuda" else WASTE
    runs = tree.runs
    paths = token_paths(runs)
    sizes = np.array([len(path) for path in paths])
    indices, offset = [], 0
    restore = np.empty(sum(run.length for run in runs), dtype=np.int64)
    for bucket in buckets(sizes, waste):
        widths = np.array([runs[n].length for n in bucket])
        for part in buckets(widths, waste):
            members, width = bucket[part], widths[part].max()
            index = np.zeros((len(members), width), dtype=np.int64)
            path = np.zeros((len(members), sizes[members].max()), dtype=np.int64)
            for row, n in enumerate(members):
                run = runs[n]
                path[row, : sizes[n]] = paths[n]
                index[row, : run.length] = paths[n][run.depth :]
                restore[run.start : run.stop] = offset + row * width + np.arange(run.length)
            position = np.array([[runs[n].depth] for n in members]) + np.arange(width)
            # padding sees what the last token of its run sees, so that every query sees a key
            indices += [index, path, np.minimum(position, sizes[members][:, None] - 1)]
            offset += index.size
    *moved, moved_restore = upload([*indices, restore], tree.device)
    places = [*zip(moved[::3], moved[1::3], moved[2::3], strict=True)], moved_restore
    tree.kept["places"] = places
    return places


def ancestors(runs: Sequence[Run]) -> Iterator[tuple[int, ...]]:
    """Yields the indices of the runs before each run, the first one first."""
    above: list[int] = []
    for n, run in enumerate(runs):
        while above and runs[above[-1]].end <= run.start:
            above.pop()
        yield tuple(above)
        above.append(n)


def token_paths(runs: Sequence[Run]) -> list[np.ndarray[Any, Any]]:
    """Returns the row positions that the last token of each run sees."""
    paths: list[np.ndarray[Any, Any]] = []
    for run, above in zip(runs, ancestors(runs), strict=True):
        before = paths[above[-1]] if above else np.empty(0, dtype=np.int64)
        paths.append(np.concatenate([before, np.arange(run.start, run.stop)]))
    return paths
