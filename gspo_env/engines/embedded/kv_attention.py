"""Attention of the tokens of one step to the keys and values of a cache.

Axis letters: B rows (sequences of a step), T tokens, S slots, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.engines.embedded.kv_shared import Behind, Shared
from gspo_env.model.attention import sdpa

_MAX_SPAN_RATIO = 2
"""Attend over a contiguous range of slots if it has at most this many slots per row."""
_MOST_SCORES = 1 << 22
"""Scores that are held at once; with more, the fused kernel holds blocks of them."""
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
Before = tuple[Tensor, Tensor]
"""Outputs and logarithms of normalisers; see `Behind.attend`."""


class Queries:
    """The tokens of a step that attend to the rows' keys.

    Args:
        slot_B: (B,) the slots.
        start_B: (B,) how many tokens each sequence has before these.
        size_B: (B,) the numbers of tokens.
        before_B: (B,) the lengths of the shared prompts.
        shared: (B,) the shared prompts.
    """

    def __init__(
        self, slot_B: Any, start_B: Any, size_B: Any, before_B: Any, shared: list[Shared | None]
    ) -> None:
        first_B, row_T, positions_T = tokens(start_B, size_B)
        self._behind = Behind(shared, row_T, positions_T) if before_B.any() else None
        start_B = start_B - before_B  # from here on, places in the slot
        # Decoding rows and prompts form two groups, so that a long prompt pads no decoding row.
        members = [m for m in (size_B == 1, size_B > 1) if m.any()]
        self._groups = [_Rows(slot_B[m], start_B[m], size_B[m], first_B[m]) for m in members]
        restore_T, total = np.empty(len(row_T), dtype=np.int64), 0
        for group in self._groups:
            restore_T[group.tokens] = group.found + total
            total += group.total
        self._in_order = total == len(row_T) and bool((restore_T == np.arange(total)).all())
        self._parts: list[_Rows | Behind] = [*self._groups]
        self._parts += [self._behind] if self._behind is not None else []
        self.arrays = [restore_T, *(array for part in self._parts for array in part.arrays)]

    def place(self, tensors: Iterator[Tensor]) -> None:
        """Takes the arrays back, as tensors on the device."""
        self._restore = next(tensors)
        for part in self._parts:
            part.place(*islice(tensors, len(part.arrays)))

    def attend(
        self,
        query: Tensor,
        held: tuple[Tensor, Tensor],
        shared: Tensor | None,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Returns the outputs of the tokens, (T, H, D).

        Args:
            query: (T, H, D)
            held: The keys and values of the layer, (S, Hkv, capacity, D).
            shared: Those of the shared prompts; see `Behind.attend`.
            scale: The scale of the scores.
            window: The number of last tokens that a token sees.
        """
        before = None
        if self._behind is not None and shared is not None:
            before = self._behind.attend(query, shared, scale, window)
        outs = [group.attend(query, *held, scale, window, before) for group in self._groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._in_order else out.index_select(0, self._restore)


def tokens(start_B: Any, size_B: Any) -> tuple[Any, Any, Any]:
    """Returns the place of the first token of each row, and row and position of each token."""
    first_B = np.cumsum(size_B) - size_B
    row_T = np.repeat(np.arange(len(size_B)), size_B)
    return first_B, row_T, (start_B - first_B)[row_T] + np.arange(len(row_T))


class _Rows:
    """The rows of one step that share an attention call.

    If the rows fill most of a contiguous range of slots, attention runs over the whole range, idle
    slots included. A view of the cache is free, and copying rows costs more than attention.
    """

    def __init__(self, slot_B: Any, start_B: Any, size_B: Any, first_B: Any) -> None:
        self._length = int((start_B + size_B).max())
        self._width = int(size_B.max())
        low, high = int(slot_B.min()), int(slot_B.max()) + 1
        contiguous = high - low <= _MAX_SPAN_RATIO * len(slot_B)
        self._span = (low, high) if contiguous else None
        rows = slot_B - low if contiguous else np.arange(len(slot_B))
        count = high - low if contiguous else len(slot_B)
        self.total = count * self._width
        """Tokens of the outputs, padding included."""
        column = np.arange(self._width)
        inside = column < size_B[:, None]
        self.tokens = (first_B[:, None] + column)[inside]
        """The rows' tokens."""
        self.found = (rows[:, None] * self._width + column)[inside]
        """Where they are in the outputs."""
        index, places = np.zeros((2, count, self._width), dtype=np.int64)
        index[rows] = first_B[:, None] + np.where(inside, column, 0)
        places[rows] = start_B[:, None] + column
        self.arrays = [index.reshape(-1), places, slot_B]

    def place(self, index: Tensor, places: Tensor, slots: Tensor) -> None:
        """Takes the arrays back, as tensors on the device."""
        self._index, self._places, self._slots = index, places, slots
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        before: Before | None,
    ) -> Tensor:
        """Returns the outputs of the rows' tokens and of padding, (total, H, D).

        Args:
            query: (T, H, D) of all tokens.
            keys: Of the layer, as are the values.
            values: See `keys`.
            scale: The scale of the scores.
            window: The number of last tokens that a token sees.
            before: What `Behind.attend` returned; None if no row has a shared prompt.
        """
        q = self._taken(query)
        if before is not None:
            before = self._taken(before[0]), self._taken(before[1][..., None])[..., 0]
        k, v = (self._held(tensor) for tensor in (keys, values))
        out = _few_queries(q, k, v, scale, self._hidden(window), before)
        return out.transpose(1, 2).reshape(-1, *query.shape[1:])

    def _held(self, tensor: Tensor) -> Tensor:
        """Returns the keys or values of the rows, (B, H, L, D)."""
        if self._span is None:
            return tensor[:, :, : self._length].index_select(0, self._slots)
        return tensor[self._span[0] : self._span[1], :, : self._length]

    def _taken(self, tensor: Tensor) -> Tensor:
        """Converts (T, H, D) to (B, H, Q, D), of the whole span if there is one."""
        taken = tensor.index_select(0, self._index)
        return taken.view(-1, self._width, *tensor.shape[1:]).transpose(1, 2)

    def _hidden(self, window: int | None) -> Tensor:
        """Returns what is added to scores, (B, 1, Q, L): a token sees places up to its own."""
        if window not in self._masks:
            own = self._places[:, None, :, None]
            place_L = torch.arange(self._length, device=own.device)
            seen = place_L <= own
            if window is not None:
                seen &= place_L > own - window
            self._masks[window] = torch.where(seen, 0.0, -torch.inf)
        return self._masks[window]


def _few_queries(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor, before: Before | None = None
) -> Tensor:
    """Attends with a few queries per row, (B, H, Q, D); keys and values are (B, Hkv, L, D).

    On a CPU in float32 two batched products take about half of the time of the fused kernel, whose
    blocks are made for many queries. The queries of a group share their keys in one product.
    `before` has outputs (B, H, Q, D) and logarithms of normalisers (B, H, Q) over other keys.
    """
    rows, heads, queries, size = q.shape
    shared, length = k.shape[1:3]
    few = rows * heads * queries * length <= _MOST_SCORES
    if q.device.type != "cpu" or q.dtype is not torch.float32 or not few:
        return _fused(q, k, v, scale, hidden.to(q.dtype), before)
    flat = q.mul_(scale).reshape(rows * shared, -1, size)
    scores = torch.bmm(flat, k.transpose(2, 3).flatten(0, 1))
    scores.view(rows, heads, queries, length).add_(hidden)
    if before is None:
        return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(q.shape)
    # the other keys are one more column
    column = before[1].reshape(rows * shared, -1, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)
    out = torch.bmm(weights[..., :-1], v.flatten(0, 1)).view(q.shape)
    return torch.addcmul(out, weights[..., -1].reshape(*q.shape[:3], 1), before[0])


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor, before: Before | None
) -> Tensor:
    if k.stride(-1) != 1:
        k = k.contiguous()
    if before is None:
        return sdpa(q, k, v, scale, hidden, causal=False)
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    out, norm = _flash(q, k, v, attn_mask=hidden, scale=scale)
    return torch.lerp(before[0], out, torch.sigmoid(norm - before[1])[..., None])
