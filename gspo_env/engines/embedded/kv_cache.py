"""The key-value cache of the `transformers` engine, and one ragged step over it.

Axis letters: B rows (sequences of a step), T fed tokens, S slots, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.packing import upload
from gspo_env.engines.embedded.kv_attention import Queries, common_prefix
from gspo_env.errors import EngineError
from gspo_env.model.attention import is_half, padded_length, value_places
from gspo_env.model.threads import return_memory
from gspo_env.types import IntArray

if TYPE_CHECKING:
    from gspo_env.engines.embedded.direct import DirectForward

_FIRST_CAPACITY = 128
_LARGE = 1 << 28
"""Bytes of a cache on a CPU that the learner gets during an update."""


class KVCache:
    """Keys and values of each layer, (S, H, capacity, D); the capacity grows when needed.

    On a CPU the slots grow too: there are about as many as have been in use at once.

    On a CPU, the numbers of a key have a distance of `capacity` in memory. A product of a few
    queries with such keys takes about half of the time. Keys there are float32, because a product
    rounds scores to the dtype of the keys. Values in half precision may have more places than keys.
    """

    def __init__(self, model: Any, slots: int, max_context: int) -> None:
        self._max_context = max_context
        self.capacity = padded_length(min(_FIRST_CAPACITY, max_context))
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.device = next(model.parameters()).device
        self._most_slots, self._slots, self._graphs = slots, 0, None
        self._lent = False
        if self.device.type == "cuda":
            self._slots = slots + 1  # where the idle slots of a graph write
            from gspo_env.engines.embedded.graphs import DecodeGraphs

            self._graphs = DecodeGraphs(model, self, slots)

    def check_weights(self) -> None:
        """Takes note of weights that have moved; call it after an update."""
        if self._graphs is not None:
            self._graphs.check()

    def drop(self) -> None:
        """Frees the memory."""
        self._moved()
        self._layers.clear()
        if self._graphs is None:
            self._slots = 0

    def lend(self) -> None:
        """Frees the memory of a large cache on a CPU until the next step, which needs as much."""
        if self.device.type == "cpu" and self._bytes() >= _LARGE:
            self._layers.clear()
            self._lent = True

    def _bytes(self) -> int:
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def _moved(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    @torch.inference_mode()
    def copy(self, sources: list[int], targets: list[int], lengths: list[int]) -> None:
        """Copies the first positions of slots to others.

        A slot can be both: what it held before is copied.
        """
        order = np.argsort(lengths)[::-1]
        self._reserve(0, max(targets) + 1)
        slots = np.stack([sources, targets], 1)[order]
        parts = _of_similar_length(np.asarray(lengths)[order])
        places = iter(upload([slots[part].T.reshape(-1) for part, _ in parts], self.device))
        copies = [(*next(places).view(2, -1), length) for _, length in parts]
        for layer in self._layers.values():
            for tensor in layer:
                views = [tensor[:, :, :length] for _, _, length in copies]
                copied = [
                    view.index_select(0, source)
                    for view, (source, _, _) in zip(views, copies, strict=True)
                ]
                for view, new, (_, target, _) in zip(views, copied, copies, strict=True):
                    view.index_copy_(0, target, new)

    @torch.inference_mode()
    def forward(
        self,
        model: Any,
        slots: list[int],
        starts: list[int],
        feeds: list[list[int]],
        direct: DirectForward | None = None,
        families: Sequence[tuple[int, int] | None] | None = None,
    ) -> Tensor:
        """Feeds each slot its new tokens; returns the logits of the last one in each, (B, V).

        Args:
            model: The causal LM.
            slots: (B,) the slots.
            starts: (B,) how many tokens each slot holds before.
            feeds: (B,) the new tokens.
            direct: Computes the pass in place of the model.
            families: (B,) which slots begin alike; see `common_prefix`.
        """
        longest = max(start + len(feed) for start, feed in zip(starts, feeds, strict=True))
        if longest > self._max_context:
            raise EngineError(f"{longest} tokens do not fit a context of {self._max_context}")
        self._reserve(longest, max(slots) + 1)
        if model.training:
            model.eval()
        if self._graphs is not None:
            decoded: Tensor | None = self._graphs.forward(slots, starts, feeds)
            if decoded is not None:
                return decoded
        families = families or ()
        if direct is not None and direct.rows is not None:
            groups: dict[str, Any] = {"rows": partial(direct.rows, families)}
        else:
            groups = {"prefix": self._prefix(feeds, families)}
        step = _Step(self, slots, starts, feeds, self.device, groups)
        if direct is not None:
            return direct(step.ids_T, step.positions_T, step.last_B, step)
        output = model(
            input_ids=step.ids_T[None],
            position_ids=step.positions_T[None],
            use_cache=False,
            logits_to_keep=step.last_B,
            ragged=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _prefix(
        self, feeds: list[list[int]], families: Sequence[tuple[int, int] | None]
    ) -> tuple[int, list[IntArray]]:
        layer = next(iter(self._layers.values()), None)
        if layer is None or self.device.type != "cpu":
            return 0, []
        decoding = zip(feeds, families, strict=False)
        alike = [family if len(feed) == 1 else None for feed, family in decoding]
        return common_prefix(alike, layer[0][0, :, 0].nbytes)

    def layer(self, index: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values, allocated at its first use."""
        if index not in self._layers:
            if self._lent:
                return_memory()  # of the learner
                self._lent = False
            self._layers[index] = self._allocate(key.shape[1], key)
        return self._layers[index]

    def _allocate(self, heads: int, like: Tensor) -> tuple[Tensor, Tensor]:
        size = like.shape[-1]
        is_cpu = self.device.type == "cpu"
        places = value_places(self.capacity) if is_cpu and is_half(like) else self.capacity
        values = like.new_zeros(self._slots, heads, places, size)
        if not is_cpu:
            return torch.zeros_like(values), values
        wide = torch.promote_types(like.dtype, torch.float32)
        keys = like.new_zeros(self._slots, heads, size, self.capacity, dtype=wide)
        return keys.transpose(2, 3), values

    def _reserve(self, length: int, slots: int) -> None:
        """Makes room for so many tokens in so many slots; little more, which spreads the keys."""
        before, held = self.capacity, self._slots
        if length <= before and slots <= held:
            return
        if length > before:
            more = max(length, before + before // 4)
            self.capacity = padded_length(min(more, self._max_context))
        if slots > held:
            self._slots = min(max(slots, held + held // 4), self._most_slots)
        self._moved()
        for index, layer in self._layers.items():
            self._layers[index] = self._allocate(layer[1].shape[1], layer[1])
            for new, old in zip(self._layers[index], layer, strict=True):
                new[:held, :, :before] = old[:, :, :before]
        if self.device.type == "cpu" and self._bytes() >= _LARGE:
            return_memory()  # of the smaller tensors, whose places are too small for later ones


class _Step:
    """`Ragged` attention of one step: where each token is written and which positions it sees."""

    def __init__(
        self,
        cache: KVCache,
        slots: Sequence[int],
        starts: Sequence[int],
        feeds: Sequence[Sequence[int]],
        device: torch.device,
        groups: dict[str, Any],
    ) -> None:
        self._cache = cache
        slot_B, start_B, size_B = (
            np.array(x, dtype=np.int64) for x in (slots, starts, list(map(len, feeds)))
        )
        end_B = np.cumsum(size_B)
        row_T = np.repeat(np.arange(len(size_B)), size_B)
        positions_T = (start_B - end_B + size_B)[row_T] + np.arange(len(row_T))
        ids_T = np.fromiter(chain.from_iterable(feeds), dtype=np.int64, count=len(row_T))
        self._queries = Queries(slot_B, start_B, size_B, **groups)
        arrays = [ids_T, positions_T, end_B - 1, slot_B[row_T], *self._queries.arrays]
        tensors = iter(upload(arrays, device))
        self.ids_T, self.positions_T, self.last_B, self._slot_T = islice(tensors, 4)
        self._queries.place(tensors)

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
        if not self._queries.store(key, value):
            for cached, new in ((keys, key), (values, value)):
                new = new.to(cached.dtype)
                cached.transpose(1, 2).index_put_((self._slot_T, self.positions_T), new)
        return self._queries.attend(query, keys, values, scale, window)


def _of_similar_length(lengths: Any) -> list[tuple[slice, int]]:
    """Splits falling lengths where they fall below half of the first; returns it for each part."""
    parts, first = [], 0
    while first < len(lengths):
        longest = int(lengths[first])
        count = int((2 * lengths[first:] >= longest).sum())
        parts.append((slice(first, first + count), longest))
        first += count
    return parts
