"""Attention over a tree of runs: a token sees its own run up to itself and the runs before it.

The softmax over several sets of keys follows from the softmax over each set and the logarithms of
the normalisers. So no mask is built and no key is copied: every run attends to itself causally, and
the runs that continue it attend to all of it, in one call for each fork. Windows on a CPU take
masks, as does a GPU that has no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.prefix import Run
from gspo_env.model.attention import (
    PackedAttention,
    is_half,
    widened,
)

if TYPE_CHECKING:
    from gspo_env.model import flash as varlen

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeAttention(PackedAttention):
    """Attention of a packed row whose sequences share their first tokens."""

    def __init__(self, runs: Sequence[Run], device: torch.device | str = "cpu") -> None:
        super().__init__([run.length for run in runs], device)
        self.runs = runs
        self.masks: dict[tuple[int | None, bool], list[Tensor]] = {}
        self.places: tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor] | None = None
        """See `gspo_env.model.masked_attention.path_buckets`."""
        self._longest = max(run.depth + run.length for run in runs)
        self._seen: dict[int, tuple[varlen.Spans, Tensor]] = {}
        self.forks = [
            (slice(run.stop, run.end), slice(run.start, run.stop))
            for run in runs
            if run.end > run.stop
        ]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `Ragged.attend`."""
        window = None if window is None or window >= self._longest else window
        if self.has_kernel(q, k, v):
            from gspo_env.model import flash as varlen

            if window is None:
                return varlen.attend_forks(q, k, v, self._spans, self._levels, scale)
            spans, seen = self._windows(window)
            k, v = (varlen.gathered(t, seen) for t in (k, v))
            return varlen.attend(q, k, v, spans, scale, window)
        if q.device.type == "cpu" and window is None:
            apply: Any = _Tree.apply
            # under autocast the norms leave queries and keys in a wider dtype than the values
            return apply(q.to(v.dtype), k.to(v.dtype), v, scale, self)  # type: ignore[no-any-return]
        from gspo_env.model.masked_attention import attend

        return attend(self, q, k, v, scale, window)

    @cached_property
    def _levels(self) -> list[varlen.Fork]:
        """The forks of each level; those of one level share no token, so one call takes them."""
        from gspo_env.model import flash as varlen

        levels = _forks(self.runs)
        pairs = [([f.end - f.stop for f in level], [f.length for f in level]) for level in levels]
        indices = []
        for level in levels:
            indices.append(np.concatenate([np.arange(f.stop, f.end) for f in level]))
            indices.append(np.concatenate([np.arange(f.start, f.stop) for f in level]))
        spans, moved = varlen.make_spans(pairs, indices, self.device)
        return [
            varlen.Fork(spans=each, queries=queries, keys=keys)
            for each, queries, keys in zip(spans, moved[::2], moved[1::2], strict=True)
        ]

    def _windows(self, window: int) -> tuple[varlen.Spans, Tensor]:
        """Returns the spans of runs and of what they see in a window, and its place in the row."""
        if window not in self._seen:
            from gspo_env.model import flash as varlen

            paths = zip(self.runs, token_paths(self.runs), strict=True)
            seen = [path[max(0, run.depth - window + 1) :] for run, path in paths]
            lengths = [run.length for run in self.runs], [len(path) for path in seen]
            (spans,), (index,) = varlen.make_spans([lengths], [np.concatenate(seen)], self.device)
            self._seen[window] = spans, index
        return self._seen[window]


def _ancestors(runs: Sequence[Run]) -> Iterator[tuple[int, ...]]:
    """Yields the indices of the runs before each run, the first one first."""
    above: list[int] = []
    for n, run in enumerate(runs):
        while above and runs[above[-1]].end <= run.start:
            above.pop()
        yield tuple(above)
        above.append(n)


def _forks(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the runs that others continue, by the number of runs before them."""
    levels: dict[int, list[Run]] = {}
    for run, above in zip(runs, _ancestors(runs), strict=True):
        if run.end > run.stop:
            levels.setdefault(len(above), []).append(run)
    return list(levels.values())


def token_paths(runs: Sequence[Run]) -> list[np.ndarray[Any, Any]]:
    """Returns the row positions that the last token of each run sees."""
    paths: list[np.ndarray[Any, Any]] = []
    for run, above in zip(runs, _ancestors(runs), strict=True):
        before = paths[above[-1]] if above else np.empty(0, dtype=np.int64)
        paths.append(np.concatenate([before, np.arange(run.start, run.stop)]))
    return paths


class _Tree(torch.autograd.Function):
    """Combines partial softmaxes; in the backward pass, each part gets the common normaliser.

    The kernel runs in float32 at least, because it takes longer in half precision.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, tree: TreeAttention
    ) -> Tensor:
        ctx.scale, ctx.tree = scale, tree
        if is_half(value):
            from gspo_env.model.masked_attention import by_products

            out, norm = by_products(tree, query, key, value, scale)
            ctx.save_for_backward(query, key, value, out, norm)
            return out
        groups = query.shape[1] // key.shape[1]
        q, k, v = map(widened, (query, key, value))
        k, v = _repeat(k, groups), _repeat(v, groups)
        parts = [
            _flash(*qkv, 0.0, True, scale=scale)
            for qkv in zip(*(tree.padded(t) for t in (q, k, v)), strict=True)
        ]
        out = tree.unpadded([part[0] for part in parts])
        norm = tree.unpadded([part[1][..., None] for part in parts])
        for later, run in tree.forks:
            part_out, part_norm = _flash(
                _heads(q[later]), _heads(k[run]), _heads(v[run]), 0.0, False, scale=scale
            )
            part_out, part_norm = _tokens(part_out), _tokens(part_norm[..., None])
            total = torch.logaddexp(norm[later], part_norm)
            weight = part_norm.sub_(total).exp_()
            out[later].mul_((norm[later] - total).exp_()).add_(part_out * weight)
            norm[later] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, norm)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = (gradients[0], *ctx.saved_tensors)
        grad, query, k, v, out, norm = map(widened, saved)
        tree, groups, dtype = ctx.tree, query.shape[1] // k.shape[1], gradients[0].dtype
        k, v = _repeat(k, groups), _repeat(v, groups)
        whole = (grad, query, k, v, out, norm)
        parts = [
            _flash_backward(*row[:5], row[5][..., 0], 0.0, True, scale=ctx.scale)
            for row in zip(*(tree.padded(t) for t in whole), strict=True)
        ]
        d_query, d_key, d_value = (tree.unpadded([p[n] for p in parts]) for n in range(3))
        for later, run in tree.forks:
            g, q, o, n = (_heads(t[later]) for t in (grad, query, out, norm))
            d_part = _flash_backward(
                g, q, _heads(k[run]), _heads(v[run]), o, n[..., 0], 0.0, False, scale=ctx.scale
            )
            d_query[later] += _tokens(d_part[0])
            d_key[run] += _tokens(d_part[1])
            d_value[run] += _tokens(d_part[2])
        d_key, d_value = _sum(d_key, groups), _sum(d_value, groups)
        return d_query.to(dtype), d_key.to(dtype), d_value.to(dtype), None, None


def _heads(rows: Tensor) -> Tensor:
    """Converts (L, H, D) to (1, H, L, D)."""
    return rows.transpose(0, 1)[None]


def _tokens(heads: Tensor) -> Tensor:
    """Converts (1, H, L, D) to (L, H, D)."""
    return heads[0].transpose(0, 1)


def _repeat(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _sum(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.unflatten(1, (-1, groups)).sum(2)  # type: ignore[no-untyped-call]
