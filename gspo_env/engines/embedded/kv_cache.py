"""The key-value cache of the `transformers` engine, and one ragged step over it.

Axis letters: B rows (sequences of a step), T fed tokens, S slots, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.engines.embedded.kv_attention import Queries, tokens
from gspo_env.engines.embedded.kv_shared import Shared, SharedPrompts
from gspo_env.errors import EngineError
from gspo_env.model.upload import upload

_FIRST_CAPACITY = 128
_PLACES = 16
"""The capacity of a slot grows by a multiple of it."""

Forward = Callable[["Step"], Tensor]
"""A forward pass: takes a step; returns the logits behind the last token of each row, (B, V)."""


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

    @torch.inference_mode()
    def unshare(self, slot: int, shared: Shared, length: int) -> None:
        """Copies the first keys and values of a shared prompt to the start of a slot."""
        for number, layer in self._layers.items():
            held = self._shared.layers[number][:, shared.index, :, :length]
            for own, part in zip(layer, held, strict=True):
                own[slot, :, :length] = part

    @torch.inference_mode()
    def copy(self, sources: list[int], targets: list[int], lengths: list[int]) -> None:
        """Copies the first positions of slots to others.

        A slot can be both: what it held before is copied.
        """
        order = np.argsort(lengths)[::-1]
        slots = np.stack([sources, targets], 1)[order]
        parts = _of_similar_length(np.asarray(lengths)[order])
        places = iter(upload([slots[part].T.reshape(-1) for part, _ in parts], self._device))
        copies = [(*next(places).view(2, -1), length) for _, length in parts]
        for layer in self._layers.values():
            for held in layer:
                views = [held[:, :, :length] for _, _, length in copies]
                taken = [
                    view.index_select(0, source)
                    for view, (source, _, _) in zip(views, copies, strict=True)
                ]
                for view, new, (_, target, _) in zip(views, taken, copies, strict=True):
                    view.index_copy_(0, target, new)

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
        step = Step(self, slots, starts, feeds, shared)
        if direct is not None:
            return direct(step)
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


class Step:
    """`Ragged` attention of one step: where each token is written and which positions it sees."""

    def __init__(
        self,
        cache: KVCache,
        slots: list[int],
        starts: list[int],
        feeds: list[list[int]],
        shared: list[Shared | None],
    ) -> None:
        self._cache, self._shared = cache, shared
        before = [_length(s) for s in shared]
        self._slot_B, self._start_B, self._size_B, self._before_B = (
            np.array(x, dtype=np.int64) for x in (slots, starts, list(map(len, feeds)), before)
        )
        first_B, row_T, positions_T = tokens(self._start_B, self._size_B)
        ids_T = np.fromiter(chain.from_iterable(feeds), dtype=np.int64, count=len(row_T))
        places_T = positions_T - self._before_B[row_T]
        own = [ids_T, positions_T, first_B + self._size_B - 1, self._slot_B[row_T], places_T]
        self._queries = self._queries_of(self._start_B, self._size_B)
        tensors = iter(upload([*own, *self._queries.arrays], cache._device))
        self.ids_T, self.positions_T, self.last_B = islice(tensors, 3)
        self._slot_T, self._places_T = islice(tensors, 2)
        self._queries.place(tensors)
        self._last: Queries | None = None

    def _queries_of(self, start_B: Any, size_B: Any) -> Queries:
        return Queries(self._slot_B, start_B, size_B, self._before_B, self._shared)

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
        return self._attend(self._queries, layer, query, key, value, scale, window)

    def attend_last(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attends only with the last token of each row, (B, H, D); keys and values are of all."""
        if self._last is None:
            ends_B = self._start_B + self._size_B - 1
            self._last = self._queries_of(ends_B, np.ones_like(ends_B))
            self._last.place(iter(upload(self._last.arrays, self._cache._device)))
        return self._attend(self._last, layer, query, key, value, scale, window)

    def _attend(
        self,
        queries: Queries,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        held = self._cache.layer(layer, key)
        for old, new in zip(held, (key, value), strict=True):
            old.transpose(1, 2).index_put_((self._slot_T, self._places_T), new)
        shared = self._cache._shared.layers.get(layer)
        return queries.attend(query, held, shared, scale, window)


def _of_similar_length(lengths: Any) -> list[tuple[slice, int]]:
    """Splits falling lengths where they fall below half of the first; returns it for each part."""
    parts, first = [], 0
    while first < len(lengths):
        longest = int(lengths[first])
        count = int((2 * lengths[first:] >= longest).sum())
        parts.append((slice(first, first + count), longest))
        first += count
    return parts


def _length(shared: Shared | None) -> int:
    return 0 if shared is None else shared.length
