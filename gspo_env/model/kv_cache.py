"""The key-value cache of the `transformers` engine, and the attention of one ragged step over it.

Axis letters: B rows (sequences of a step), T fed tokens, S slots, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.upload import upload
from gspo_env.errors import EngineError
from gspo_env.model.attention import Ragged, sdpa
from gspo_env.model.kv_shared import Behind, Shared, SharedPrompts

_FIRST_CAPACITY = 128
_MAX_SPAN_RATIO = 2
"""Attend over a contiguous range of slots if it has at most this many slots per decoding row."""
_MOST_SCORES = 1 << 22
"""Scores that are held at once; with more, the fused kernel holds blocks of them."""

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
Before = tuple[Tensor, Tensor]
"""Outputs and logarithms of normalisers; see `Behind.attend`."""
Forward = Callable[[Tensor, Tensor, Tensor, Ragged], Tensor]
"""A forward pass: takes ids (T,), positions (T,), the tokens to predict behind (B,) and the
attention; returns logits (B, V)."""


class KVCache:
    """Keys and values of each layer, (2, S, H, capacity, D); the capacity grows when needed."""

    def __init__(self, model: Any, slots: int, max_context: int) -> None:
        self._slots = slots
        self._max_context = max_context
        self._capacity = min(_FIRST_CAPACITY, max_context)
        self._layers: dict[int, Tensor] = {}
        self._shared = SharedPrompts()
        self._device = next(model.parameters()).device

    def drop(self) -> None:
        """Frees the memory."""
        self._layers.clear()
        self._shared.layers.clear()

    @property
    def shares(self) -> bool:
        """Whether slots can share a prompt: on a CPU in float32, where the kernels take it."""
        held = self._layers.values()
        return self._device.type == "cpu" and all(t.dtype is torch.float32 for t in held)

    @torch.inference_mode()
    def share(self, slot: int, shared: Shared, held: int) -> None:
        """Moves the first keys and values of a slot to a shared prompt.

        Args:
            slot: The slot; those behind the prompt move to its start.
            shared: The place, which must be free.
            held: How many tokens the slot holds.
        """
        for number, layer in self._layers.items():
            own = layer[:, slot]
            self._shared.put(number, shared.index, own[:, :, : shared.length])
            rest = own[:, :, shared.length : held].clone()
            own[:, :, : held - shared.length] = rest

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot to another."""
        with torch.inference_mode():
            for layer in self._layers.values():
                layer[:, target, :, :length] = layer[:, source, :, :length]

    @torch.inference_mode()
    def forward(
        self,
        model: Any,
        slots: list[int],
        starts: list[int],
        feeds: list[list[int]],
        direct: Forward | None = None,
        shared: list[Shared | None] | None = None,
    ) -> Tensor:
        """Feeds each slot its new tokens; returns the logits of the last one in each, (B, V).

        Args:
            model: The causal LM.
            slots: (B,) the slots.
            starts: (B,) how many tokens each slot holds before, those of a shared prompt included.
            feeds: (B,) the new tokens.
            direct: Runs the forward pass in place of the model.
            shared: (B,) the shared prompts that the slots begin with; None if none does.
        """
        shared = shared or [None] * len(slots)
        ends = [start + len(feed) for start, feed in zip(starts, feeds, strict=True)]
        if (longest := max(ends)) > self._max_context:
            raise EngineError(f"{longest} tokens do not fit a context of {self._max_context}")
        self._reserve(max(end - _length(s) for end, s in zip(ends, shared, strict=True)))
        step = _Step(self, slots, starts, feeds, shared)
        if direct is not None:
            return direct(step.ids_T, step.positions_T, step.last_B, step)
        if model.training:
            model.eval()
        output = model(
            input_ids=step.ids_T[None],
            position_ids=step.positions_T[None],
            use_cache=False,
            logits_to_keep=step.last_B,
            ragged=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def layer(self, index: int, key: Tensor) -> Tensor:
        """Returns a layer's keys and values, allocated at its first use."""
        if index not in self._layers:
            shape = (2, self._slots, key.shape[1], self._capacity, key.shape[2])
            self._layers[index] = key.new_zeros(shape)
        return self._layers[index]

    def _reserve(self, length: int) -> None:
        while self._capacity < length:
            more = min(self._capacity, self._max_context - self._capacity)
            self._capacity += more
            for index, layer in self._layers.items():
                self._layers[index] = torch.nn.functional.pad(layer, (0, 0, 0, more))


class _Step:
    """`Ragged` attention of one step: where each token is written and which positions it sees."""

    def __init__(
        self,
        cache: KVCache,
        slots: list[int],
        starts: list[int],
        feeds: list[list[int]],
        shared: list[Shared | None],
    ) -> None:
        self._cache = cache
        sizes, before = [len(feed) for feed in feeds], [_length(s) for s in shared]
        slot_B, start_B, size_B, before_B = (
            np.array(x, dtype=np.int64) for x in (slots, starts, sizes, before)
        )
        first_B = np.cumsum(size_B) - size_B
        row_T = np.repeat(np.arange(len(slots)), size_B)
        offset_T = np.arange(len(row_T)) - first_B[row_T]
        ids_T = np.array([i for feed in feeds for i in feed], dtype=np.int64)
        positions_T = start_B[row_T] + offset_T
        start_B = start_B - before_B  # from here on, places in the slot
        places_T = start_B[row_T] + offset_T
        arrays = [ids_T, positions_T, first_B + size_B - 1, slot_B[row_T], places_T]
        self._behind = Behind(shared, row_T, positions_T) if before_B.any() else None
        # Decoding rows and prompts form two groups, so that a long prompt pads no decoding row.
        members = [m for m in (size_B == 1, size_B > 1) if m.any()]
        groups = [_Rows(slot_B[m], start_B[m], size_B[m], first_B[m]) for m in members]
        order_T = np.argsort(size_B[row_T] > 1, kind="stable")  # the groups one after the other
        arrays.append(np.argsort(order_T))
        parts: list[_Rows | Behind] = [*groups, *([self._behind] if self._behind else [])]
        tensors = iter(upload([*arrays, *(a for p in parts for a in p.arrays)], cache._device))
        self.ids_T, self.positions_T, self.last_B = islice(tensors, 3)
        self._slot_T, self._places_T, restore_T = islice(tensors, 3)
        for part in parts:
            part.place(*islice(tensors, len(part.arrays)))
        self._written: dict[int, Tensor] = {}
        self._groups, self._restore = groups, restore_T if len(groups) > 1 else None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """See `Ragged.attend`."""
        keys, values = self._cache.layer(layer, key)
        rows = self._rows(keys)
        for held, new in ((keys, key), (values, value)):
            held.view(-1, held.shape[-1]).index_copy_(0, rows, new.reshape(-1, new.shape[-1]))
        before = None
        if self._behind is not None:
            before = self._behind.attend(query, self._cache._shared.layers[layer], scale, window)
        outs = [group.attend(query, keys, values, scale, window, before) for group in self._groups]
        return outs[0] if self._restore is None else torch.cat(outs).index_select(0, self._restore)

    def _rows(self, keys: Tensor) -> Tensor:
        """Returns where keys are written, as rows of all slots, heads and positions, (T * H,)."""
        _, heads, capacity, _ = keys.shape
        if heads not in self._written:
            head = torch.arange(heads, device=keys.device)
            row_TH = (self._slot_T[:, None] * heads + head) * capacity + self._places_T[:, None]
            self._written[heads] = row_TH.flatten()
        return self._written[heads]


class _Rows:
    """The rows of one step that share an attention call.

    If decoding rows fill most of a contiguous range of slots, attention runs over the whole range,
    idle slots included. A view of the cache is free, and copying rows costs more than attention.
    """

    def __init__(self, slot_B: Any, start_B: Any, size_B: Any, first_B: Any) -> None:
        self._length = int((start_B + size_B).max())
        self._decode = bool(size_B.max() == 1)
        low, high = int(slot_B.min()), int(slot_B.max()) + 1
        contiguous = self._decode and high - low <= _MAX_SPAN_RATIO * len(slot_B)
        self._span = (low, high) if contiguous else None
        column = np.arange(int(size_B.max()))
        inside = column < size_B[:, None]
        positions = start_B[:, None] + column
        if self._span:
            self._dense = bool((np.diff(slot_B) == 1).all())
            span = np.zeros((high - low, 1), dtype=np.int64)
            span[slot_B - low] = positions
            positions = span
        self._whole = bool(inside.all())
        self.arrays = [
            first_B[:, None] + np.where(inside, column, 0),
            np.flatnonzero(inside),
            slot_B - low if self._span else slot_B,
            positions,
        ]

    def place(self, index: Tensor, real: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Takes the arrays back, as tensors on the device."""
        self._index, self._slots = index, slots
        self._real = None if self._whole else real
        # (B, 1, queries, length); a token sees the positions up to its own
        seen = torch.arange(self._length, device=index.device)
        self._distance = positions[:, None, :, None] - seen
        self._mask = self._distance >= 0

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        window: int | None,
        before: Before | None,
    ) -> Tensor:
        """Returns the outputs of the rows' tokens, (T, H, D).

        Args:
            query: (T, H, D) of all tokens.
            keys: Of the layer, as are the values.
            values: See `keys`.
            scale: The scale of the scores.
            window: The number of last tokens that a token sees.
            before: What `Behind.attend` returned; None if no row has a shared prompt.
        """
        mask = self._mask if window is None else self._mask & (self._distance < window)
        if self._decode:
            return self._attend_one(query, keys, values, scale, mask, before)
        q = query[self._index].transpose(1, 2)
        if before is not None:
            before = before[0][self._index].transpose(1, 2), before[1][self._index].transpose(1, 2)
        k, v = (t[:, :, : self._length].index_select(0, self._slots) for t in (keys, values))
        out = _few_queries(q, k, v, scale, mask, before).transpose(1, 2).flatten(0, 1)
        return out if self._real is None else out.index_select(0, self._real)

    def _attend_one(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        mask: Tensor,
        before: Before | None,
    ) -> Tensor:
        """Attends with one query per row; the heads of a group become the queries of one head."""
        q = self._one_each(query, keys.shape[1])
        norm = None if before is None else self._one_each(before[1][..., None], keys.shape[1])
        if before is not None and norm is not None:
            before = self._one_each(before[0], keys.shape[1]), norm[..., 0]
        if self._span is None:
            k, v = (t[:, :, : self._length].index_select(0, self._slots) for t in (keys, values))
            return _few_queries(q, k, v, scale, mask, before).flatten(1, 2)
        low, high = self._span
        k, v = (t[low:high, :, : self._length] for t in (keys, values))
        out = _few_queries(q, k, v, scale, mask, before)
        return (out if self._dense else out.index_select(0, self._slots)).flatten(1, 2)

    def _one_each(self, tensor: Tensor, heads: int) -> Tensor:
        """Converts (T, H, D) to (B, Hkv, G, D), of the whole span if there is one."""
        taken = tensor.index_select(0, self._index[:, 0])
        taken = taken.view(len(taken), heads, -1, tensor.shape[-1])
        if self._span is None or self._dense:
            return taken
        low, high = self._span
        return taken.new_zeros(high - low, *taken.shape[1:]).index_copy_(0, self._slots, taken)


def _length(shared: Shared | None) -> int:
    return 0 if shared is None else shared.length


def _few_queries(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, before: Before | None = None
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
        return _fused(q, k, v, scale, mask, before)
    hidden = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    hidden = hidden.expand(-1, heads, queries, -1).reshape(rows * shared, -1, length)
    flat = q.reshape(rows * shared, -1, size)
    scores = torch.baddbmm(hidden, flat, k.flatten(0, 1).transpose(1, 2), alpha=scale)
    if before is None:
        return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(q.shape)
    # the other keys are one more column
    column = before[1].reshape(rows * shared, -1, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)
    out = torch.bmm(weights[..., :-1], v.flatten(0, 1)).view(q.shape)
    return torch.addcmul(out, weights[..., -1].reshape(*q.shape[:3], 1), before[0])


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, before: Before | None
) -> Tensor:
    if before is None:
        return sdpa(q, k, v, scale, mask, causal=False)
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    hidden = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    out, norm = _flash(q, k, v, attn_mask=hidden, scale=scale)
    return torch.lerp(before[0], out, torch.sigmoid(norm - before[1])[..., None])
