"""Attention of decoding rows whose sequences begin alike: the common keys are read once.

Axis letters: B rows, G groups of rows that begin alike, H heads, Hkv heads of keys, P common
tokens, L tokens after them, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gspo_env.engines.embedded.kv_attention import MAX_SPAN_RATIO, causal_mask, places_to_read
from gspo_env.model.attention import padded_length, weighted_sum
from gspo_env.types import IntArray


class PrefixRows:
    """Decoding rows in groups; the rows of a group have their first tokens in common.

    Args:
        slot_B: (B,) the slots.
        start_B: (B,) how many tokens each sequence has before the one of this step.
        token_B: (B,) the places of the rows' tokens in the step.
        groups: The rows of each group, all of these rows.
        length: P.
    """

    def __init__(
        self,
        slot_B: IntArray,
        start_B: IntArray,
        token_B: IntArray,
        groups: Sequence[IntArray],
        length: int,
    ) -> None:
        order = np.concatenate(groups)
        self._length, self._end = length, padded_length(int(start_B.max()) + 1)
        self._anchors = [int(slot_B[group[0]]) for group in groups]
        self._sizes = [len(group) for group in groups]
        self.tokens, slots = token_B[order], slot_B[order]
        low, high = int(slots.min()), int(slots.max()) + 1
        self._span = (low, high) if high - low <= MAX_SPAN_RATIO * len(order) else None
        self.places_in_output = np.arange(len(order)) if self._span is None else slots - low
        self.total = int(self.places_in_output.max()) + 1
        """Places of the outputs, those of idle slots included."""
        of_place = np.zeros((3, self.total), dtype=np.int64)
        of_place[:, self.places_in_output] = self.tokens, start_B[order], np.arange(len(order))
        self.arrays = [*of_place, slots, self.places_in_output]

    def place(
        self, index: Tensor, starts: Tensor, nth: Tensor, slots: Tensor, order: Tensor
    ) -> None:
        """Takes the arrays back, as tensors on the device."""
        self._index, self._starts, self._nth = index, starts, nth
        self._slots, self._order = slots, order
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Returns the outputs of the places, (total, H, D); see `Queries.attend`.

        Scores are the same to the last bit as those of each row alone, and values are read row by
        row, because the sum of two parts would round otherwise.
        """
        shared, size = keys.shape[1], keys.shape[3]
        q = query.index_select(0, self._index).to(keys.dtype).mul_(scale)
        q = q.view(self.total, shared, -1, size)
        suffix_keys = self._of_rows(keys, self._length, self._end).transpose(1, 2)
        suffix = torch.bmm(q.flatten(0, 1), suffix_keys)
        heads = q.index_select(0, self._order).transpose(0, 1).reshape(shared, -1, size)
        parts = [
            torch.bmm(part, keys[slot, :, : self._length].transpose(1, 2))
            for slot, part in zip(
                self._anchors,
                torch.split(heads, [n * q.shape[2] for n in self._sizes], 1),
                strict=True,
            )
        ]
        prefix = torch.cat(parts, 1).view(shared, len(self._order), -1, self._length)
        prefix = prefix.transpose(0, 1).index_select(0, self._nth)
        if window not in self._masks:
            self._masks[window] = causal_mask(self._starts[:, None], self._end, window)
        scores = torch.cat([prefix, suffix.view(*q.shape[:3], -1)], 3).add_(self._masks[window])
        weights = scores.softmax(-1).to(values.dtype).flatten(0, 1)
        last = places_to_read(values, self._end, self._span)
        return weighted_sum(weights, self._of_rows(values, 0, last)).view(-1, *query.shape[1:])

    def _of_rows(self, tensor: Tensor, start: int, end: int) -> Tensor:
        """Returns the keys or values of the rows at some places, (B * Hkv, L, D)."""
        part = tensor[:, :, start:end]
        if self._span is None:
            return part.index_select(0, self._slots).flatten(0, 1)
        return part[self._span[0] : self._span[1]].flatten(0, 1)
