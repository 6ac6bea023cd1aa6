"""Packs samples into rows, without padding and with each shared token once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gspo_env.batch.prefix import build_tree, sort_by_prefix
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.batch.upload import upload


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
        "sequence_N": np.repeat(np.arange(len(samples)), sizes)[model],
        "turn_N": turns[model],
        "advantages_N": np.concatenate([s.advantages for s in samples]).astype(np.float32),
    }
    engine = [s.engine_logprobs for s in samples if s.engine_logprobs is not None]
    if len(engine) == len(samples):
        arrays["engine_logprobs_N"] = np.concatenate(engine).astype(np.float32)
    if tree:
        pairs = source * (int(tokens.max()) + 1) + target
        distinct, expand = np.unique(pairs, return_index=True, return_inverse=True)[1:]
        arrays |= {"distinct_M": distinct, "expand_N": expand}
    tensors = dict(zip(arrays, upload(list(arrays.values()), device), strict=True))
    return PackedBatch(
        **tensors,
        lengths_B=tuple(sizes.tolist()),
        counts_B=tuple(int(s.mask.sum()) for s in samples),
        num_turns=int(turns.max()) + 1,
        runs=tree.runs if tree else (),
    )


def microbatches(
    samples: Sequence[Sample], max_tokens: int, *, share: bool = True
) -> list[list[Sample]]:
    """Splits samples into rows of at most `max_tokens`, or of one sample.

    If `share`, samples with a common prefix go together, and its tokens count once, where that
    saves enough. Otherwise the longest come first, so that the lengths of a row are alike.
    """
    order = sort_by_prefix([s.token_ids for s in samples])
    by_size = sorted(range(len(samples)), key=lambda n: -len(samples[n].token_ids))
    rows: list[list[Sample]] = [[]]
    used = 0
    shares = share and order.pays
    ids, saved = (order.ids, order.saved) if shares else (by_size, np.zeros_like(order.saved))
    for n, shared in zip(ids, saved.tolist(), strict=True):
        length = len(samples[n].token_ids)
        if rows[-1] and used + length - shared > max_tokens:
            rows.append([])
            used = shared
        rows[-1].append(samples[n])
        used += length - shared
    return rows if rows[0] else []
