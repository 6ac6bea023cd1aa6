"""Attention of the tokens of one step to the keys and values of a cache.

Axis letters: B rows (sequences of a step), T tokens, S slots, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.model.attention import (
    KEYS,
    LONG,
    MOST_SCORES,
    attend_by_products,
    is_half,
    padded_length,
    sdpa,
    value_places,
)
from gspo_env.types import IntArray

MAX_SPAN_RATIO = 2
"""Attend over a contiguous range of slots if it has at most this many slots per row."""
_LEAST_BYTES = 1 << 20
"""Bytes of a layer's keys that must be saved: fewer take no longer than the added operations."""


def common_prefix(
    families: Sequence[tuple[int, int] | None], bytes_per_token: int
) -> tuple[int, list[IntArray]]:
    """Chooses which decoding rows read a common beginning once.

    All groups share a prefix of one length, that which saves most, in whole multiples of `KEYS`.

    Args:
        families: (B,) of each row, the family that it begins like and for how many tokens.
        bytes_per_token: Those of a layer's keys.

    Returns:
        The length and the rows of each group; 0 and no group if it does not pay.
    """
    rows: dict[tuple[int, int], list[int]] = {}
    for n, family in enumerate(families):
        if family is not None:
            rows.setdefault(family, []).append(n)
    sizes = {key[1]: 0 for key in rows}
    for length in sizes:
        sizes[length] = length * sum(len(r) - 1 for k, r in rows.items() if k[1] >= length)
    length = max(sizes, key=sizes.__getitem__, default=0)
    groups = [np.array(r) for k, r in rows.items() if k[1] >= length and len(r) > 1]
    if not groups or length < KEYS or sizes[length] * bytes_per_token < _LEAST_BYTES:
        return 0, []
    return length // KEYS * KEYS, groups


class Queries:
    """The tokens of a step that attend to the rows' keys.

    Args:
        slot_B: (B,) the slots.
        start_B: (B,) how many tokens each sequence has before these.
        size_B: (B,) the numbers of tokens.
        prefix: See `common_prefix`.
        rows: What makes the decoding rows; see `CompiledRows`.
    """

    def __init__(
        self,
        slot_B: IntArray,
        start_B: IntArray,
        size_B: IntArray,
        prefix: tuple[int, Sequence[IntArray]] = (0, ()),
        rows: Callable[..., Any] | None = None,
    ) -> None:
        first_B, single = np.cumsum(size_B) - size_B, size_B == 1
        length, alike = prefix
        others = single.copy()
        for group in alike:
            others[group] = False
        self._groups: list[Any] = []
        if rows is not None and single.any():
            self._groups.append(rows(slot_B, start_B, first_B, single))
            others[:] = False
        elif alike:
            from gspo_env.engines.embedded.prefix_attention import PrefixRows

            self._groups.append(PrefixRows(slot_B, start_B, first_B, alike, length))
        # Decoding rows and prompts form two groups, so that a long prompt pads no decoding row.
        self._groups += [
            _Rows(slot_B[m], start_B[m], size_B[m], first_B[m])
            for m in (others, ~single)
            if m.any()
        ]
        self._stores = rows is not None and bool(single.all())
        restore_T, total = np.empty(int(size_B.sum()), dtype=np.int64), 0
        for group in self._groups:
            restore_T[group.tokens] = group.places_in_output + total
            total += group.total
        self._in_order = total == len(restore_T) and bool((restore_T == np.arange(total)).all())
        self.arrays = [restore_T, *(array for group in self._groups for array in group.arrays)]

    def place(self, tensors: Iterator[Tensor]) -> None:
        """Takes the arrays back, as tensors on the device."""
        self._restore = next(tensors)
        for group in self._groups:
            group.place(*islice(tensors, len(group.arrays)))

    def store(self, key: Tensor, value: Tensor) -> bool:
        """Lets attention store the tokens' keys and values; returns whether it will."""
        if self._stores:
            self._groups[0].new = key, value
        return self._stores

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Returns the outputs of the tokens, (T, H, D).

        Args:
            query: (T, H, D)
            keys: (S, Hkv, capacity, D) of the layer.
            values: See `keys`.
            scale: The scale of the scores.
            window: The number of last tokens that a token sees.
        """
        outs = [group.attend(query, keys, values, scale, window) for group in self._groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._in_order else out.index_select(0, self._restore)


class _Rows:
    """The rows of one step that share an attention call.

    If the rows fill most of a contiguous range of slots, attention runs over the whole range, idle
    slots included. A view of the cache is free, and copying rows costs more than attention.
    """

    def __init__(
        self, slot_B: IntArray, start_B: IntArray, size_B: IntArray, first_B: IntArray
    ) -> None:
        self._length = int((start_B + size_B).max())
        self._width = int(size_B.max())
        low, high = int(slot_B.min()), int(slot_B.max()) + 1
        contiguous = high - low <= MAX_SPAN_RATIO * len(slot_B)
        self._span = (low, high) if contiguous else None
        rows = slot_B - low if contiguous else np.arange(len(slot_B))
        count = high - low if contiguous else len(slot_B)
        self.total = count * self._width
        """Tokens of the outputs, padding included."""
        column = np.arange(self._width)
        inside = column < size_B[:, None]
        self.tokens = (first_B[:, None] + column)[inside]
        """The rows' tokens."""
        self.places_in_output = (rows[:, None] * self._width + column)[inside]
        index, places = np.zeros((2, count, self._width), dtype=np.int64)
        index[rows] = first_B[:, None] + np.where(inside, column, 0)
        places[rows] = start_B[:, None] + column
        self._sizes = list(zip(rows.tolist(), size_B.tolist(), strict=True))
        self.arrays = [index.reshape(-1), places, slot_B]

    def place(self, index: Tensor, places: Tensor, slots: Tensor) -> None:
        """Takes the arrays back, as tensors on the device."""
        self._index, self._places, self._slots = index, places, slots
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Returns the outputs of the rows' tokens and of padding, (total, H, D)."""
        query_rows = query.index_select(0, self._index)
        q = query_rows.view(-1, self._width, *query.shape[1:]).transpose(1, 2)
        length = padded_length(self._length) if is_half(values) else self._length
        k = self._of_rows(keys, length)
        v = self._of_rows(values, places_to_read(values, length, self._span))
        if window not in self._masks:
            self._masks[window] = causal_mask(self._places, length, window)
        mask = self._masks[window]
        long = k.device.type == "cpu" and self._width >= LONG
        if long and q.dtype is not torch.float64:
            from gspo_env.model.products import attend_by_blocks

            out = attend_by_blocks(q, k, v, scale, mask, sizes=self._sizes)[0]
        else:
            out = attend_rows(q, k, v, scale, mask)
        return out.transpose(1, 2).reshape(-1, *query.shape[1:])

    def _of_rows(self, tensor: Tensor, length: int) -> Tensor:
        """Returns the keys or values of the rows, (B, H, L, D)."""
        if self._span is None:
            return tensor[:, :, :length].index_select(0, self._slots)
        return tensor[self._span[0] : self._span[1], :, :length]


def attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Attends with a few queries per row, (B, H, Q, D); keys and values are (B, Hkv, L, D).

    On a CPU two batched products take about half of the time of the fused kernel in float32, and a
    tenth in bfloat16: its blocks are made for many queries. The queries of a group share their keys
    in one product; on a GPU too, since its fused kernel takes no groups with a mask. In half
    precision, scores and their softmax are float32, as in the kernel.
    """
    if q.device.type == "cuda":
        if q.shape[2] > 1:
            mask = mask.repeat(1, 1, q.shape[1] // k.shape[1], 1)
        rows = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        return sdpa(rows, k, v, scale, mask.to(k.dtype), causal=False).reshape(q.shape)
    few = q.shape[:3].numel() * k.shape[2] <= MOST_SCORES
    if q.device.type != "cpu" or q.dtype is torch.float64 or not (few or is_half(v)):
        k = k if k.stride(-1) == 1 else k.contiguous()
        return sdpa(q, k, v, scale, mask.to(k.dtype), causal=False)
    return attend_by_products(q, k, v, scale, mask)[0]


def places_to_read(values: Tensor, length: int, span: tuple[int, int] | None) -> int:
    """Returns how many values of each row a step reads: all, where a part would be copied.

    Args:
        values: The values of all slots.
        length: The number of keys that the step reads.
        span: The range of slots that is read; None copies single slots.
    """
    if values.device.type != "cpu" or not is_half(values):
        return length
    return values.shape[2] if span else min(values.shape[2], value_places(length))


def causal_mask(place_BQ: Tensor, length: int, window: int | None) -> Tensor:
    """Returns what is added to scores, (B, 1, Q, length): a token sees places up to its own.

    Args:
        place_BQ: (B, Q) the tokens' places.
        length: The number of keys.
        window: The number of last tokens that a token sees.
    """
    place = place_BQ[:, None, :, None]
    place_L = torch.arange(length, device=place.device)
    visible = place_L <= place
    if window is not None:
        visible &= place_L > place - window
    return torch.where(visible, 0.0, -torch.inf)
