"""Attention over a tree of runs: a token sees its own run up to itself and the runs before it.

The softmax over several sets of keys follows from the softmax over each set and the logarithms of
the normalisers. So no mask is built and no key is copied: every run attends to itself causally, and
the runs that continue it attend to all of it, in one call for each fork. Windows on a CPU take
masks, as does a GPU that has no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gspo_env.batch.prefix import Run
from gspo_env.model.attention import PackedAttention, is_half, widened

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeAttention(PackedAttention):
    """Attention of a packed row whose sequences share their first tokens."""

    def __init__(self, runs: Sequence[Run], device: torch.device | str = "cpu") -> None:
        super().__init__([run.length for run in runs], device)
        self.runs = runs
        self._longest = max(run.depth + run.length for run in runs)
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
            from gspo_env.model.flash import attend_tree

            return attend_tree(self, q, k, v, scale, window)
        if q.device.type == "cpu" and window is None:
            apply: Any = _Tree.apply
            # under autocast the norms leave queries and keys in a wider dtype than the values
            return apply(q.to(v.dtype), k.to(v.dtype), v, scale, self)  # type: ignore[no-any-return]
        from gspo_env.model.masked_attention import attend

        return attend(self, q, k, v, scale, window)


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
