"""Products of models that are not small, on a CPU with AVX-512: oneDNN's in place of MKL's.

MKL uses half of the vector width of some of these processors. On an AMD EPYC oneDNN takes 0.4 to
0.6 of its time for the three products of a linear layer and its gradient in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

from gspo_env.model.attention import is_half, padded_length, weighted_sum

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
    normaliser: bool = False,
    sizes: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor | None]:
    """Attends with many queries per row, each block of them to the keys that it sees.

    The kernel of PyTorch takes three times as long on a processor with AVX-512, because it also
    multiplies with masked keys, by MKL. In half precision, scores are MKL's to the last bit: so are
    oneDNN's with heads of at most 128, on the processor that was tried.

    Args:
        q: See `attend_by_products`, as for the others.
        k: The keys.
        v: The values.
        scale: The scale of the scores.
        mask: Added to the scores.
        normaliser: Whether to return the logarithms of the normalisers too.
        sizes: The rows that have queries, and how many; the others are 0. By default all.
    """
    shared, groups = k.shape[1], q.shape[1] // k.shape[1]
    out, norm = torch.zeros_like(q), torch.zeros(q.shape[:3])
    score = torch.matmul if is_half(v) and q.shape[-1] > 128 else matmul
    add_up = weighted_sum if is_half(v) else matmul
    for row, size in sizes or [(row, q.shape[2]) for row in range(len(q))]:
        blocks = np.array_split(np.arange(size), -(-size // _BLOCK))
        for part in (slice(block[0], block[-1] + 1) for block in blocks):
            visible = mask[row, 0, part]
            end = int((visible.amax(0) > -torch.inf).nonzero()[-1]) + 1
            near = slice(padded_length(end))  # later keys are masked for all of these queries
            for head in range(shared):
                heads = slice(head * groups, (head + 1) * groups)
                queries = (q[row, heads, part].to(k.dtype) * scale).flatten(0, 1)
                scores = score(queries, k[row, head, near].contiguous().t())
                scores = scores.view(groups, *visible[:, near].shape).add_(visible[:, near])
                weights = scores.softmax(-1)
                rows = add_up(weights.flatten(0, 1), v[row, head, near])
                out[row, heads, part] = rows.view(groups, len(visible), -1)
                if normaliser:
                    norm[row, heads, part] = scores.amax(-1) - weights.amax(-1).log()
    return out, norm if normaliser else None


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
        if (
            plain
            or has_torch_function((input,))
            or not (input.numel() and weight.is_contiguous() and _is_wide(input, weight))
        ):
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
