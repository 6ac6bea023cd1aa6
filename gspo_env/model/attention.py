"""Attention over ragged token rows: one attention function for the engine and the learner.

Both feed a model one row of tokens (1, T) that belong to many sequences. Only attention depends on
which tokens belong together, so it gets this information from a `Ragged`. The function is
registered with `transformers`, so it works for every model that uses the library's attention
interface. No T x T mask is built, but for small rows of a GPU that has no kernel for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from gspo_env.batch.packing import upload
from gspo_env.errors import ModelError, raised_as

RAGGED = "gspo_ragged"
_HALF = (torch.float16, torch.bfloat16)
_LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities whose kernels have a backward pass for heads above 192."""
MOST_SCORES = 1 << 22
"""Scores that a CPU holds at once."""
LONG = 128
"""Queries of a row that a CPU computes block by block."""
KEYS = 16
"""A product with a multiple of so many keys sums none of them apart."""
PART = 1024
"""Values that a product in half precision adds at once."""
SPARE = 1.5
"""Largest ratio of the values of a product to those that count. Above it, a copy of these costs
less."""
WASTE = 1.25
"""Largest ratio of a bucket's longest sequence to its shortest. Above it, another bucket costs
less than the padding."""


class Ragged(Protocol):
    """Defines which tokens of a row attend to which."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attends in a row; queries (T, H, D), keys and values (T, Hkv, D); returns (T, H, D)."""


def _ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragged: Ragged | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if ragged is None:
        raise ModelError(
            "the model does not pass the packed row on to its attention; outside gspo_env, call "
            "`model.set_attn_implementation('sdpa')` first"
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(
            "the model caps its attention scores or has attention sinks; expected plain scaled "
            "dot-product attention"
        )
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size, values = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    # keys and values of one size share a cache and a kernel; zeros change no score and no sum
    q, k, v = (pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size else t for t in (q, k, v))
    out = ragged.attend(module.layer_idx, q, k, v, scale, sliding_window)
    return out[None, ..., :values], None


def use_ragged_attention(model: Any) -> None:
    """Switches a `transformers` model to ragged attention.

    Raises:
        ModelError: The model does not use the library's attention interface.
    """
    AttentionInterface.register(RAGGED, _ragged_attention)
    name = type(model).__name__
    with raised_as(ModelError, f"{name} cannot take a custom attention function", Exception):
        model.set_attn_implementation(RAGGED)
    if model.config._attn_implementation != RAGGED:
        raise ModelError(f"{name} does not use the attention interface of transformers")


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """Runs `scaled_dot_product_attention` with grouped queries; (B, H, L, D) each.

    On a CPU it is float32 at least, because the kernel takes longer in half precision. On a GPU the
    keys and values of a group are repeated, because the kernels for masks and float32 take none.
    """
    grouped, dtype = query.shape[1] != key.shape[1], query.dtype
    if query.device.type == "cpu":
        query, key, value = map(widened, (query, key, value))
    elif grouped:
        groups, grouped = query.shape[1] // key.shape[1], False
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    ).to(dtype)


def attend_by_products(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, normaliser: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attends on a CPU by two batched products; (B, H, Q, D), keys and values are (B, Hkv, L, D).

    In half precision, scores and their softmax are float32, and the weights are rounded. If the
    number of keys is a `padded_length`, the output of a query is the same to the last bit for any
    number of queries and of masked keys, on the processors that were tried.

    Args:
        q: The queries.
        k: The keys, float32 at least.
        v: The values.
        scale: The scale of the scores.
        mask: (B, 1, Q, L), added to the scores.
        normaliser: Whether to return the logarithms of the normalisers too, (B, H, Q).
    """
    rows, heads, queries, size = q.shape
    shared, length = k.shape[1:3]
    if queries >= LONG and is_half(v):
        from gspo_env.model.products import attend_by_blocks

        return attend_by_blocks(q, k, v, scale, mask, normaliser)
    if rows > 1 and rows * heads * queries * length > MOST_SCORES:
        halves = zip(*(t.chunk(2) for t in (q, k, v, mask)), strict=True)
        parts = [attend_by_products(q, k, v, scale, m, normaliser) for q, k, v, m in halves]
        outs, norms = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(norms) if normaliser else None
    if is_half(v) and k.stride(-2) != 1:  # the other order has another order of sums
        k = k.transpose(2, 3).contiguous().transpose(2, 3)
    flat = q.to(k.dtype).mul_(scale).reshape(rows * shared, -1, size)
    scores = torch.bmm(flat, k.transpose(2, 3).flatten(0, 1))
    scores.view(rows, heads, queries, length).add_(mask)
    weights = scores.softmax(-1)
    out = weighted_sum(weights, v.flatten(0, 1)).view(q.shape)
    norm = (scores.amax(-1) - weights.amax(-1).log()).view(q.shape[:3]) if normaliser else None
    return out, norm


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Returns the sums of values, (N, Q, L) times (N, L, D), in the dtype of the values.

    In half precision there may be more values, whose weight is 0: oneDNN would copy a part of them
    first. More than `PART` are added in parts: how oneDNN divides a longer sum depends on its
    length, and sampling and training see different ones.
    """
    weights, length = weights.to(values.dtype), weights.shape[-1]
    if not is_half(values):
        return torch.matmul(weights, values)
    if length < values.shape[-2] <= SPARE * length:
        weights = pad(weights, (0, values.shape[-2] - length))
    values = values[..., : weights.shape[-1], :]
    if weights.shape[-1] <= PART:
        return torch.matmul(weights, values)
    if values.dim() == 3 and values.is_contiguous() and weights.shape[-1] % PART == 0:
        rows = weights.view(*weights.shape[:2], -1, PART).transpose(1, 2)
        product = rows @ values.view(len(values), -1, *values[0, :PART].shape)
        parts = product.unbind(1)  # of one product
    else:
        columns = torch.split(weights, PART, -1), torch.split(values, PART, -2)
        parts = tuple(torch.matmul(*pair) for pair in zip(*columns, strict=True))
    return torch.stack(parts).sum(0)


def value_places(length: int) -> int:
    """Returns for how many values a cache in half precision has places, so that no part is copied.

    Args:
        length: The number of keys.
    """
    return length if length <= PART else -(-length // PART) * PART


def padded_length(length: int) -> int:
    """Returns the next multiple of `KEYS`."""
    return -(-length // KEYS) * KEYS


def is_half(tensor: Tensor) -> bool:
    """Returns whether a tensor has less than float32's precision."""
    return torch.promote_types(tensor.dtype, torch.float32) is not tensor.dtype


def widened(tensor: Tensor) -> Tensor:
    """Converts to float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Returns whether the flash kernels take these tensors; queries and keys may be wider."""
    size = value.shape[-1]
    if value.device.type != "cuda" or value.dtype not in _HALF or size % 8:
        return False
    return query.shape[-1] == key.shape[-1] == size <= _largest_head(value.device)


def _largest_head(device: torch.device) -> int:
    """Returns the largest head size of the kernels for a device; 0 if it has none."""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return 0
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    return 256 if capability in _LARGE_SHARED_MEMORY else 192


class PackedAttention:
    """Causal attention within each sequence of a packed row.

    A GPU in half precision runs its flash kernels for sequences of any length. Elsewhere, sequences
    of similar length form a bucket and are padded on the right, for attention only. A causal query
    does not see what is to its right, so no mask is needed.

        lengths [3, 2]:  row a0 a1 a2 b0 b1  ->  bucket [[a0 a1 a2], [b0 b1 --]]  ->  row
    """

    has_kernel = staticmethod(has_kernel)

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths, self.device = tuple(lengths), device
        self.kept: dict[Any, Any] = {}
        """What kernels make of the lengths, for all layers."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `Ragged.attend`."""
        if self.has_kernel(q, k, v):
            from gspo_env.model.flash import attend_rows

            return attend_rows(self, q, k, v, scale, window)
        outputs = []
        for index in self._buckets:
            q_B, k_B, v_B = (take(tensor, index) for tensor in (q, k, v))
            band = _band(index.shape[1], window, q.device)
            outputs.append(sdpa(q_B, k_B, v_B, scale, band, causal=band is None))
        return self.unpadded(outputs)

    @cached_property
    def _padding(self) -> tuple[list[Tensor], Tensor]:
        """Returns the positions of each bucket in the row, and of the row in all buckets."""
        sizes = np.asarray(self.lengths, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        restore, indices = np.empty(int(sizes.sum()), dtype=np.int64), []
        offset = 0
        for bucket in buckets(sizes):
            column = np.arange(sizes[bucket].max())
            inside = column < sizes[bucket][:, None]
            indices.append(index := np.where(inside, starts[bucket][:, None] + column, 0))
            restore[index[inside]] = np.flatnonzero(inside) + offset
            offset += index.size
        *moved, moved_restore = upload([*indices, restore], self.device)
        return moved, moved_restore

    @property
    def _buckets(self) -> list[Tensor]:
        return self._padding[0]

    def padded(self, rows: Tensor) -> list[Tensor]:
        """Converts (T, H, D) to (B, H, L, D) for each bucket, with zeros as padding."""
        sizes = [index.numel() for index in self._buckets]
        whole = rows.new_zeros(sum(sizes), *rows.shape[1:]).index_copy_(0, self._padding[1], rows)
        return [
            part.view(*index.shape, *rows.shape[1:]).transpose(1, 2)
            for part, index in zip(torch.split(whole, sizes), self._buckets, strict=True)
        ]

    def unpadded(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverse of `padded`."""
        flat = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
        return flat.index_select(0, self._padding[1])


def buckets(sizes: np.ndarray[Any, Any], waste: float = WASTE) -> list[np.ndarray[Any, Any]]:
    """Returns indices by decreasing size, in buckets that are cheaper to pad than to split."""
    order = np.argsort(-sizes, kind="stable")
    cuts = [0]
    for n, place in enumerate(order):
        if sizes[order[cuts[-1]]] > waste * sizes[place]:
            cuts.append(n)
    return np.split(order, cuts[1:])


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Converts (T, H, D) and (B, L) to (B, H, L, D)."""
    picked = tensor.index_select(0, index.flatten())
    return picked.unflatten(0, index.shape).transpose(1, 2)  # type: ignore[no-untyped-call, no-any-return]


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)
