"""Attention over rows of sequences by the flash kernels of a GPU: no mask and no padding.

Axis letters: T tokens of a row, H heads, D head size, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from gspo_env.batch.packing import upload
from gspo_env.batch.prefix import Run
from gspo_env.model.attention import PackedAttention
from gspo_env.model.masked_attention import ancestors, token_paths
from gspo_env.model.tree_attention import TreeAttention

_flash: Any = torch.ops.aten._flash_attention_forward
_flash_backward: Any = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The queries and keys of S sequences, end to end; their last tokens are aligned."""

    queries: Tensor
    """(S + 1,) int32, where the queries of each sequence start, and their number."""
    keys: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Queries of a row that also see earlier keys of it, in a call of their own."""

    spans: Spans
    queries: Tensor
    """Positions in the row; no position twice."""
    keys: Tensor


def make_spans(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    indices: Sequence[np.ndarray[Any, Any]],
    device: torch.device | str,
) -> tuple[list[Spans], list[Tensor]]:
    """Uploads the (lengths of queries, lengths of keys) of several calls, and indices."""
    starts = [np.cumsum([0, *sizes], dtype=np.int32) for pair in pairs for sizes in pair]
    tensors = upload([*starts, *indices], device)
    spans = [
        Spans(
            queries=tensors[2 * n],
            keys=tensors[2 * n + 1],
            longest_query=max(queries),
            longest_key=max(keys),
        )
        for n, (queries, keys) in enumerate(pairs)
    ]
    return spans, tensors[len(starts) :]


def attend_rows(
    rows: PackedAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `Ragged.attend`."""
    return attend(query, key, value, _spans_of(rows), scale, window)


def attend_tree(
    tree: TreeAttention, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """See `Ragged.attend`; each run attends to its whole path."""
    if window is None:
        if "forks" not in tree.kept:
            tree.kept["forks"] = _forks(tree)
        return attend_forks(query, key, value, _spans_of(tree), tree.kept["forks"], scale)
    if ("seen", window) not in tree.kept:
        tree.kept["seen", window] = _seen(tree, window)
    spans, seen = tree.kept["seen", window]
    key, value = (gathered(t, seen) for t in (key, value))
    return attend(query, key, value, spans, scale, window)


def _spans_of(rows: PackedAttention) -> Spans:
    if "spans" not in rows.kept:
        (rows.kept["spans"],), _ = make_spans([(rows.lengths, rows.lengths)], [], rows.device)
    spans: Spans = rows.kept["spans"]
    return spans


def _forks(tree: TreeAttention) -> list[Fork]:
    """Returns the forks of each level; those of one level share no token, so one call does."""
    levels: dict[int, list[Run]] = {}
    for run, above in zip(tree.runs, ancestors(tree.runs), strict=True):
        if run.end > run.stop:  # others continue it
            levels.setdefault(len(above), []).append(run)
    pairs, indices = [], []
    for level in levels.values():
        pairs.append(([f.end - f.stop for f in level], [f.length for f in level]))
        indices.append(np.concatenate([np.arange(f.stop, f.end) for f in level]))
        indices.append(np.concatenate([np.arange(f.start, f.stop) for f in level]))
    spans, moved = make_spans(pairs, indices, tree.device)
    return [
        Fork(spans=each, queries=queries, keys=keys)
        for each, queries, keys in zip(spans, moved[::2], moved[1::2], strict=True)
    ]


def _seen(tree: TreeAttention, window: int) -> tuple[Spans, Tensor]:
    """Returns the spans of runs and of what they see in a window, and its place in the row."""
    paths = zip(tree.runs, token_paths(tree.runs), strict=True)
    seen = [path[max(0, run.depth - window + 1) :] for run, path in paths]
    lengths = tree.lengths, [len(path) for path in seen]
    (spans,), (index,) = make_spans([lengths], [np.concatenate(seen)], tree.device)
    return spans, index


def attend(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, window: int | None
) -> Tensor:
    """Runs causal attention in each sequence; (T, H, D), and fewer heads in keys and values."""
    query, key, value = (_prepared(t, value.dtype) for t in (query, key, value))
    run: Any = varlen_attn
    return run(  # type: ignore[no-any-return]
        query,
        key,
        value,
        spans.queries,
        spans.keys,
        spans.longest_query,
        spans.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend_forks(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, forks: Sequence[Fork], scale: float
) -> Tensor:
    """Runs causal attention in each sequence, whose queries also see the keys of their forks."""
    query, key, value = (_prepared(t, value.dtype) for t in (query, key, value))
    apply: Any = _Forks.apply
    return apply(query, key, value, spans, forks, scale)  # type: ignore[no-any-return]


def _prepared(rows: Tensor, dtype: torch.dtype) -> Tensor:
    rows = rows.to(dtype)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _Forks(torch.autograd.Function):
    """Combines the softmaxes of all calls; their backward passes get the common normaliser.

    Flash attention has no gradient for its log-sum-exp. It needs none: with the combined output and
    log-sum-exp, the backward pass of a call gives exactly the call's share of each gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Spans,
        forks: Sequence[Fork],
        scale: float,
    ) -> Tensor:
        out, norm = _forward((query, key, value), spans, True, scale)
        out = out.to(norm.dtype)
        for fork in forks:
            rows = _rows(fork, query, key, value)
            part, part_norm = _forward(rows, fork.spans, False, scale)
            before = norm.index_select(1, fork.queries)
            total = torch.logaddexp(before, part_norm)
            weight, part_weight = ((n - total).exp().T[..., None] for n in (before, part_norm))
            combined = out.index_select(0, fork.queries) * weight + part * part_weight
            out.index_copy_(0, fork.queries, combined)
            norm.index_copy_(1, fork.queries, total)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.spans, ctx.forks, ctx.scale = spans, forks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norm = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        gradients_QKV = _backward(
            (query, key, value), gradient, out, norm, ctx.spans, True, ctx.scale
        )
        sums = [d.to(norm.dtype) for d in gradients_QKV]  # float32 at least
        for fork in ctx.forks:
            rows = _rows(fork, query, key, value)
            g, o = (t.index_select(0, fork.queries) for t in (gradient, out))
            n = norm.index_select(1, fork.queries)
            parts = _backward(rows, g, o, n, fork.spans, False, ctx.scale)
            places = fork.queries, fork.keys, fork.keys
            for total, place, part in zip(sums, places, parts, strict=True):
                total.index_add_(0, place, part.to(total.dtype))
        d_query, d_key, d_value = (d.to(query.dtype) for d in sums)
        return d_query, d_key, d_value, None, None, None


_Rows = tuple[Tensor, Tensor, Tensor]


def _rows(fork: Fork, query: Tensor, key: Tensor, value: Tensor) -> _Rows:
    k, v = (t.index_select(0, fork.keys) for t in (key, value))
    return query.index_select(0, fork.queries), k, v


def _forward(rows: _Rows, spans: Spans, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output (T, H, D) and the log-sum-exp (H, T)."""
    out, norm, *_ = _flash(*rows, *_call(spans, causal), False, scale=scale)
    return out, norm


def _backward(
    rows: _Rows,
    gradient: Tensor,
    out: Tensor,
    norm: Tensor,
    spans: Spans,
    causal: bool,
    scale: float,
) -> _Rows:
    dropout = torch.zeros(2, dtype=torch.uint64, device=out.device)  # which is off
    call = _call(spans, causal)
    d_query, d_key, d_value = _flash_backward(
        gradient, *rows, out, norm, *call, dropout, dropout.new_empty(0), scale=scale
    )
    return d_query, d_key, d_value


def _call(spans: Spans, causal: bool) -> tuple[Tensor, Tensor, int, int, float, bool]:
    return spans.queries, spans.keys, spans.longest_query, spans.longest_key, 0.0, causal


def gathered(rows: Tensor, index: Tensor) -> Tensor:
    """Selects rows, which may repeat; their gradients are added in float32 at least."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide).index_select(0, index).to(rows.dtype)
