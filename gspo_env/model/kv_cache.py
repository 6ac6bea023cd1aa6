"""The key-value cache of the `transformers` engine, and the attention of one ragged step over it.

Axis letters: B rows (sequences of a step), T fed tokens, S slots, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.upload import upload
from gspo_env.errors import EngineError
from gspo_env.model.attention import Ragged, sdpa
from gspo_env.model.kv_shared import Behind, Shared, SharedPrompts

_FIRST_CAPACITY = 128
_PLACES = 16
"""The capacity of a slot grows by a multiple of it."""
_MAX_SPAN_RATIO = 2
"""Attend over a contiguous range of slots if it has at most this many slots per row."""
_MOST_SCORES = 1 << 22
"""Scores that are held at once; with more, the fused kernel holds blocks of them."""

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
Before = tuple[Tensor, Tensor]
"""Outputs and logarithms of normalisers; see `Behind.attend`."""
Forward = Callable[[Tensor, Tensor, Tensor, Ragged], Tensor]
"""A forward pass: takes ids (T,), positions (T,), the tokens to predict behind (B,) and the
attention; returns logits (B, V)."""


class KVCache:
    """Keys and values of each layer, (S, H, capacity, D); the capacity grows when needed.

    On a CPU, the numbers of a key have a distance of `capacity` in memory. A product of a few
    queries with such keys takes about half of the time.
    """

    def __init__(self, model: Any, slots: int, max_context: int) -> None:
        self._slots = slots
        self._max_context = max_context
        self._capacity = min(_FIRST_CAPACITY, max_context)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._shared = SharedPrompts()
        self._device = next(model.parameters()).device

    def drop(self) -> None:
        """Frees the memory."""
        self._layers.clear()
        self._shared.layers.clear()

    @property
    def shares(self) -> bool:
        """Whether slots can share a prompt: on a CPU in float32, where the kernels take it."""
        kinds = {held.dtype for pair in self._layers.values() for held in pair}
        return self._device.type == "cpu" and kinds <= {torch.float32}

    @torch.inference_mode()
    def share(self, slot: int, shared: Shared, held: int) -> None:
        """Moves the first keys and values of a slot to a shared prompt.

        Args:
            slot: The slot; those behind the prompt move to its start.
            shared: The place, which must be free.
            held: How many tokens the slot holds.
        """
        for number, layer in self._layers.items():
            own = [tensor[slot] for tensor in layer]
            self._shared.put(
                number, shared.index, torch.stack([t[:, : shared.length] for t in own])
            )
            for tensor in own:
                rest = tensor[:, shared.length : held].clone()
                tensor[:, : held - shared.length] = rest

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot to another."""
        with torch.inference_mode():
            for layer in self._layers.values():
                for held in layer:
                    held[target, :, :length] = held[source, :, :length]

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

    def layer(self, index: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values, allocated at its first use."""
        if index not in self._layers:
            self._layers[index] = self._allocate(key.shape[1], key)
        return self._layers[index]

    def _allocate(self, heads: int, like: Tensor) -> tuple[Tensor, Tensor]:
        size = like.shape[-1]
        values = like.new_zeros(self._slots, heads, self._capacity, size)
        if self._device.type != "cpu":
            return torch.zeros_like(values), values
        return like.new_zeros(self._slots, heads, size, self._capacity).transpose(2, 3), values

    def _reserve(self, length: int) -> None:
        """Lets slots hold this many tokens; little more, because idle places spread the keys."""
        before = self._capacity
        if length <= before:
            return
        more = max(length, before + before // 4)
        self._capacity = min(-(-more // _PLACES) * _PLACES, self._max_context)
        for index, layer in self._layers.items():
            self._layers[index] = self._allocate(layer[0].shape[1], layer[0])
            for held, old in zip(self._layers[index], layer, strict=True):
                held[:, :, :before] = old


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
        ids_T = np.fromiter(chain.from_iterable(feeds), dtype=np.int64, count=len(row_T))
        positions_T = (start_B - first_B)[row_T] + np.arange(len(row_T))
        self._behind = Behind(shared, row_T, positions_T) if before_B.any() else None
        start_B = start_B - before_B  # from here on, places in the slot
        places_T = positions_T - before_B[row_T]
        # Decoding rows and prompts form two groups, so that a long prompt pads no decoding row.
        members = [m for m in (size_B == 1, size_B > 1) if m.any()]
        self._groups = [_Rows(slot_B[m], start_B[m], size_B[m], first_B[m]) for m in members]
        restore_T, total = np.empty(len(row_T), dtype=np.int64), 0
        for group in self._groups:
            restore_T[group.tokens] = group.found + total
            total += group.total
        arrays = [ids_T, positions_T, first_B + size_B - 1, slot_B[row_T], places_T, restore_T]
        parts: list[_Rows | Behind] = [*self._groups, *([self._behind] if self._behind else [])]
        tensors = iter(upload([*arrays, *(a for p in parts for a in p.arrays)], cache._device))
        self.ids_T, self.positions_T, self.last_B = islice(tensors, 3)
        self._slot_T, self._places_T, restore = islice(tensors, 3)
        for part in parts:
            part.place(*islice(tensors, len(part.arrays)))
        in_order = total == len(row_T) and bool((restore_T == np.arange(total)).all())
        self._restore = None if in_order else restore

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
        for held, new in ((keys, key), (values, value)):
            held.transpose(1, 2).index_put_((self._slot_T, self._places_T), new)
        before = None
        if self._behind is not None:
            before = self._behind.attend(query, self._cache._shared.layers[layer], scale, window)
        outs = [group.attend(query, keys, values, scale, window, before) for group in self._groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self._restore is None else out.index_select(0, self._restore)


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
            far = self._places[:, None, :, None] - torch.arange(
                self._length, device=self._places.device
            )
            seen = far >= 0 if window is None else (far >= 0) & (far < window)
            hidden = torch.zeros(seen.shape, device=seen.device)
            self._masks[window] = hidden.masked_fill_(~seen, -torch.inf)
        return self._masks[window]


def _length(shared: Shared | None) -> int:
    return 0 if shared is None else shared.length


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
