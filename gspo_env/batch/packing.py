"""Packs samples into rows without padding, each shared token once, and copies them to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.prefix import build_tree, sort_by_prefix
from gspo_env.batch.sample import PackedBatch, Sample

LEAST_TOKENS = 512
"""Tokens of a row for which it is worth a pass of its own."""


def pack(
    samples: Sequence[Sample], device: torch.device | str = "cpu", *, share: bool = True
) -> PackedBatch:
    """Packs samples end to end; the first token of a sequence is never a model token.

    If `share`, a prefix that samples share is packed once where that saves enough.
    """
    sequences = [s.token_ids for s in samples]
    sizes = np.array([len(row) for row in sequences])
    turns = np.concatenate([s.turn_ids for s in samples])
    tokens = np.concatenate(sequences)
    episodes, number_B = number_episodes(samples)
    order = sort_by_prefix(sequences)
    tree = build_tree(sequences, order) if share and order.pays else None
    positions = np.concatenate([np.arange(n) for n in sizes])
    place = np.concatenate(tree.places) if tree else np.arange(len(tokens))
    model = np.flatnonzero(turns >= 0)
    first, uses = np.unique(place, return_index=True, return_counts=True)[1:]
    source, target = place[model - 1], tokens[model]

    arrays = {
        "input_ids_T": tokens[first],
        "positions_T": positions[first],
        "uses_T": uses,
        "source_N": source,
        "target_N": target,
        "episode_N": np.repeat(number_B, sizes)[model],
        "turn_N": turns[model],
        "advantages_N": np.concatenate([s.advantages for s in samples]).astype(np.float32),
    }
    for name, dtype in (("engine_logprobs", np.float32), ("ages", np.int64)):
        values = [a for s in samples if (a := getattr(s, name)) is not None]
        if len(values) == len(samples):
            arrays[f"{name}_N"] = np.concatenate(values).astype(dtype)
    if tree:
        pairs = source * (int(tokens.max()) + 1) + target
        distinct, expand = np.unique(pairs, return_index=True, return_inverse=True)[1:]
        arrays |= {"distinct_M": distinct, "expand_N": expand}
    tensors = dict(zip(arrays, upload(list(arrays.values()), device), strict=True))
    return PackedBatch(
        **tensors,
        lengths_B=tuple(sizes.tolist()),
        counts_B=tuple(int(s.mask.sum()) for s in samples),
        episode_B=tuple(number_B),
        episodes=episodes,
        num_turns=int(turns.max()) + 1,
        runs=tree.runs if tree else (),
    )


def number_episodes(samples: Sequence[Sample]) -> tuple[tuple[int | None, ...], list[int]]:
    """Returns the number of each episode, and the index of each sample's episode among them."""
    places: dict[int | str, int] = {}
    keys = [f"alone {n}" if s.episode is None else s.episode for n, s in enumerate(samples)]
    index = [places.setdefault(key, len(places)) for key in keys]
    return tuple(None if isinstance(key, str) else key for key in places), index


def microbatches(
    samples: Sequence[Sample], max_tokens: int, *, share: bool = True, least: int = 1
) -> list[list[Sample]]:
    """Splits samples into rows of at most `max_tokens`, or of one sample.

    There are at least `least` rows, of similar size, if they can have `LEAST_TOKENS` each.

    If `share`, samples with a common prefix go together, and its tokens count once, where that
    saves enough. Otherwise the longest come first, so that the lengths of a row are alike. The
    sequences of an episode are in one row if they fit.
    """
    units: list[list[Sample]] = []
    sizes: list[int] = []
    for unit in by_episode(samples):
        size = _tokens(unit, share)
        fits = size <= max_tokens
        units += [unit] if fits else [[sample] for sample in unit]
        sizes += [size] if fits else [len(sample.token_ids) for sample in unit]
    order = sort_by_prefix([unit[0].token_ids for unit in units])
    by_size = sorted(range(len(units)), key=lambda n: -sizes[n])
    rows: list[list[Sample]] = [[]]
    used = 0
    shares = share and order.pays
    ids, saved = (order.ids, order.saved) if shares else (by_size, np.zeros_like(order.saved))
    tokens = sum(sizes) - int(saved.sum())
    fair = tokens / least if tokens >= least * LEAST_TOKENS else tokens
    for n, shared in zip(ids, saved.tolist(), strict=True):
        full = used >= fair and len(rows) < least
        if rows[-1] and (full or used + sizes[n] - shared > max_tokens):
            rows.append([])
            used = shared
        rows[-1] += units[n]
        used += sizes[n] - shared
    return rows if rows[0] else []


def by_episode(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Returns the samples of each episode."""
    episodes, index = number_episodes(samples)
    units: list[list[Sample]] = [[] for _ in episodes]
    for n, sample in zip(index, samples, strict=True):
        units[n].append(sample)
    return units


def _tokens(unit: Sequence[Sample], share: bool) -> int:
    """Returns the number of tokens that a row with these samples alone computes."""
    sequences = [sample.token_ids for sample in unit]
    total = sum(map(len, sequences))
    if not share or len(unit) == 1:
        return total
    order = sort_by_prefix(sequences)
    return total - int(order.saved.sum()) if order.pays else total


_ALIGNMENT = 8
"""Bytes of the widest dtype; each array of an upload starts at a multiple of them."""


def upload(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device | str) -> list[Tensor]:
    """Returns the arrays as tensors on a device; those for a CPU share the arrays' memory.

    A GPU gets all of them in one copy from pinned memory, for which the host does not wait.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return list(map(torch.from_numpy, arrays))
    if kind != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    starts = np.cumsum([0, *sizes]).tolist()
    host = np.zeros(starts[-1], dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    flat = torch.from_numpy(host).pin_memory().to(device, non_blocking=True)
    return [
        flat[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]
