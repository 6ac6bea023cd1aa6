"""Keys and values of many sequences, and attention of one ragged step over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.errors import EngineError
from gspo_env.model.attention import sdpa

_FIRST_CAPACITY = 128
_IDLE = 2
"""A span of slots is attended whole where at most this many times its rows decode."""


class KVCache:
    """Keys and values: for each layer (S slots, Hkv, capacity, D), grown as sequences grow."""

    def __init__(self, model: Any, slots: int, max_context: int) -> None:
        self._shape = slots
        self._max_context = max_context
        self._capacity = min(_FIRST_CAPACITY, max_context)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._device = next(model.parameters()).device

    def drop(self) -> None:
        """Frees the memory."""
        self._layers.clear()

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot to another."""
        with torch.inference_mode():
            for layer in self._layers.values():
                for tensor in layer:
                    tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def forward(
        self, model: Any, slots: list[int], starts: list[int], feeds: list[list[int]]
    ) -> Tensor:
        """Feeds each slot its new tokens; returns the logits after the last of each, (B, V)."""
        sizes = [len(feed) for feed in feeds]
        self._reserve(max(a + n for a, n in zip(starts, sizes, strict=True)))
        plan = _Plan(self, slots, starts, sizes)
        ids = torch.tensor([[i for feed in feeds for i in feed]], device=self._device)
        if model.training:
            model.eval()
        output = model(
            input_ids=ids,
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=plan.last,
            ragged=plan,
        )
        logits: Tensor = output.logits[0]
        return logits

    def layer(self, index: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, made at its first use."""
        if index not in self._layers:
            shape = (self._shape, key.shape[1], self._capacity, key.shape[2])
            self._layers[index] = (key.new_zeros(shape), key.new_zeros(shape))
        return self._layers[index]

    def _reserve(self, length: int) -> None:
        if length > self._max_context:
            raise EngineError(f"{length} tokens do not fit a context of {self._max_context}")
        while self._capacity < length:
            more = min(self._capacity, self._max_context - self._capacity)
            self._capacity += more
            for index, layer in self._layers.items():
                padded = [torch.nn.functional.pad(t, (0, 0, 0, more)) for t in layer]
                self._layers[index] = (padded[0], padded[1])


class _Plan:
    """One step's `Ragged`: where each fed token is written and what it sees."""

    def __init__(
        self, cache: KVCache, slots: list[int], starts: list[int], sizes: list[int]
    ) -> None:
        self._cache = cache
        device = cache._device
        slot_B, start_B, size_B = (np.array(x, dtype=np.int64) for x in (slots, starts, sizes))
        first_B = np.cumsum(size_B) - size_B
        row_T = np.repeat(np.arange(len(slots)), size_B)
        offset_T = np.arange(len(row_T)) - first_B[row_T]
        self.positions = torch.from_numpy(start_B[row_T] + offset_T).to(device)
        self.last = torch.from_numpy(first_B + size_B - 1).to(device)
        self._slot_T = torch.from_numpy(slot_B[row_T]).to(device)
        # Decoding rows and prompts are attended apart, so that a long prompt pads no decoding row.
        members = [np.flatnonzero(size_B == 1), np.flatnonzero(size_B > 1)]
        self._groups = [
            _Rows(slot_B[m], start_B[m], size_B[m], first_B[m], device) for m in members if len(m)
        ]
        order = np.concatenate([m for m in members if len(m)])
        restore = np.empty(len(row_T), dtype=np.int64)
        restore[np.concatenate([np.arange(first_B[b], first_B[b] + size_B[b]) for b in order])] = (
            np.arange(len(row_T))
        )
        self._restore = torch.from_numpy(restore).to(device) if len(self._groups) > 1 else None

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
        keys[self._slot_T, :, self.positions] = key
        values[self._slot_T, :, self.positions] = value
        outs = [group.attend(query, keys, values, scale, window) for group in self._groups]
        return outs[0] if self._restore is None else torch.cat(outs).index_select(0, self._restore)


class _Rows:
    """Rows of one step that are attended together.

    Decoding rows that fill most of a span of slots are attended over the whole span, idle slots
    included: a view of the cache costs nothing, a copy of its rows more than the attention.
    """

    def __init__(self, slot_B: Any, start_B: Any, size_B: Any, first_B: Any, device: Any) -> None:
        self._length = int((start_B + size_B).max())
        self._decode = bool(size_B.max() == 1)
        low, high = int(slot_B.min()), int(slot_B.max()) + 1
        self._span = (low, high) if self._decode and high - low <= _IDLE * len(slot_B) else None
        column = np.arange(int(size_B.max()))
        inside = column < size_B[:, None]
        self._index = torch.from_numpy(first_B[:, None] + np.where(inside, column, 0)).to(device)
        everything = bool(inside.all())
        self._inside = None if everything else torch.from_numpy(np.flatnonzero(inside)).to(device)
        self._slots = torch.from_numpy(slot_B - low if self._span else slot_B).to(device)
        place = start_B[:, None] + column
        if self._span:
            every = np.zeros((high - low, 1), dtype=np.int64)
            every[slot_B - low] = place
            place = every
        # (B, 1, q, length): a token sees the positions up to its own
        position = torch.from_numpy(place).to(device)[:, None, :, None]
        self._distance = position - torch.arange(self._length, device=device)
        self._mask = self._distance >= 0

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        mask = self._mask if window is None else self._mask & (self._distance < window)
        if self._decode:
            return self._attend_one(query, keys, values, scale, mask)
        q = query[self._index].transpose(1, 2)
        k, v = (t[:, :, : self._length].index_select(0, self._slots) for t in (keys, values))
        out = sdpa(q, k, v, scale, mask, causal=False).transpose(1, 2).flatten(0, 1)
        return out if self._inside is None else out.index_select(0, self._inside)

    def _attend_one(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor
    ) -> Tensor:
        """One query a row; those that share a key head become the queries of one head."""
        q = query.index_select(0, self._index[:, 0]).view(
            len(self._index), keys.shape[1], -1, query.shape[-1]
        )
        k, v = (t[:, :, : self._length] for t in (keys, values))
        if self._span is None:
            k, v = (t.index_select(0, self._slots) for t in (k, v))
            return sdpa(q, k, v, scale, mask, causal=False).flatten(1, 2)
        low, high = self._span
        spread = q.new_zeros(high - low, *q.shape[1:]).index_copy_(0, self._slots, q)
        out = sdpa(spread, k[low:high], v[low:high], scale, mask, causal=False)
        return out.index_select(0, self._slots).flatten(1, 2)
