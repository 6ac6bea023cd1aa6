"""Products of models that are not small, on a CPU with AVX-512: oneDNN's in place of MKL's.

MKL uses half of the vector width of some of these processors. On an AMD EPYC oneDNN takes 0.4 to
0.6 of its time for the three products of a linear layer and its gradient in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gspo_env.types import IntArray

_BLOCK = 256
"""Queries that attend at once."""


def matmul(a_NI: Tensor, b_IO: Tensor) -> Tensor:
    """Returns `a_NI @ b_IO`; the second is contiguous, or its transpose is."""
    return _product(a_NI, b_IO.t()) if _is_wide(a_NI, b_IO) else a_NI @ b_IO


def attend_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor,
    row_B: IntArray,
    start_B: IntArray,
    size_B: IntArray,
) -> Tensor:
    """Attends with many queries per row, each block of them to the keys that it sees.

    The kernel of PyTorch takes three times as long on a processor with AVX-512, because it also
    multiplies with masked keys, by MKL. R is the number of rows, some of them idle.

    Args:
        q: (R, H, Q, D)
        k: (R, Hkv, L, D)
        v: See `k`.
        scale: The scale of the scores.
        mask: (R, 1, Q, L), added to the scores.
        row_B: (B,) the rows.
        start_B: (B,) how many keys each has before those of its queries.
        size_B: (B,) the numbers of queries.

    Returns:
        (R, H, Q, D); 0 for idle rows and padding.
    """
    out, shared = torch.zeros(q.shape), k.shape[1]
    q_rows, out_rows = (t.view(len(t), shared, -1, *t.shape[2:]) for t in (q, out))
    for row, start, size in zip(*(x.tolist() for x in (row_B, start_B, size_B)), strict=True):
        for head in range(shared):
            keys, values = k[row, head].contiguous(), v[row, head]
            for first in range(0, size, _BLOCK):
                last = min(size, first + _BLOCK)
                queries, target = (t[row, head, :, first:last] for t in (q_rows, out_rows))
                scores = matmul((queries * scale).flatten(0, 1), keys[: start + last].t())
                visible = mask[row, 0, first:last, : start + last]
                scores.view(-1, *visible.shape).add_(visible)
                weights = scores.softmax(-1)
                target.copy_(matmul(weights, values[: start + last]).view(target.shape))
    return out


def use_wide_products(model: nn.Module) -> None:
    """Lets the linear layers of a model use oneDNN where it is faster."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear


class WideLinear(nn.Linear):
    """A linear layer whose products are oneDNN's where it is faster."""

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear.forward`."""
        weight = self.weight
        plain = torch.is_autocast_enabled("cpu") or type(weight) is not nn.Parameter
        if plain or not (input.numel() and weight.is_contiguous() and _is_wide(input, weight)):
            return super().forward(input)
        apply: Any = _Product.apply
        rows = input.reshape(-1, self.in_features).contiguous()
        out: Tensor = apply(rows, weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return _product(x_NI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_NO,), (x_NI, weight_OI), needed = gradients, ctx.saved_tensors, ctx.needs_input_grad
        return (
            _product(d_NO, weight_OI.t()) if needed[0] else None,
            _product(d_NO.t(), x_NI.t()) if needed[1] else None,
            d_NO.sum(0) if needed[2] else None,
        )


def _is_wide(*tensors: Tensor) -> bool:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    return all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors)


def _product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    # oneDNN takes a thousand times as long if neither the weight nor its transpose is contiguous
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x_NI, weight_OI, bias_O, "none", [], ""
    )
    return out
