"""Attention of decoding rows whose sequences begin alike: the common keys are read once.

Axis letters: B rows, G groups of rows that begin alike, H heads, Hkv heads of keys, P common
tokens, L tokens after them, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gspo_env.types import IntArray

MAX_SPAN_RATIO = 2
"""Attend over a contiguous range of slots if it has at most this many slots per row."""
_LEAST_BYTES = 8 << 20
"""Bytes of a layer's keys and values that must be saved: fewer are in a processor's cache."""


def common_prefix(
    families: Sequence[tuple[int, int] | None], bytes_per_token: int
) -> tuple[int, list[IntArray]]:
    """Chooses which decoding rows read a common beginning once.

    All groups share a prefix of one length, that which saves most.

    Args:
        families: (B,) of each row, the family that it begins like and for how many tokens.
        bytes_per_token: Those of a layer's keys and values.

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
    if not sizes or sizes[length] * bytes_per_token < _LEAST_BYTES:
        return 0, []
    return length, [np.array(r) for k, r in rows.items() if k[1] >= length and len(r) > 1]


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
        self._length, self._end = length, int(start_B.max()) + 1
        self._anchors = [int(slot_B[group[0]]) for group in groups]
        self._sizes = [len(group) for group in groups]
        self.total = len(order)
        self.tokens, self.places_in_output = token_B[order], np.arange(self.total)
        slot_B = slot_B[order]
        low, high = int(slot_B.min()), int(slot_B.max()) + 1
        self._span = (low, high) if high - low <= MAX_SPAN_RATIO * self.total else None
        rows = np.arange(self.total) if self._span is None else slot_B - low
        of_span = np.zeros(rows.max() + 1, dtype=np.int64)
        of_span[rows] = np.arange(self.total)
        self.arrays = [self.tokens, start_B[order], slot_B, rows, of_span]

    def place(
        self, index: Tensor, places: Tensor, slots: Tensor, rows: Tensor, of_span: Tensor
    ) -> None:
        """Takes the arrays back, as tensors on the device."""
        self._index, self._places, self._slots = index, places, slots
        self._rows, self._of_span = rows, of_span
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Returns the outputs of the rows, (B, H, D); see `Queries.attend`."""
        shared, size = keys.shape[1], keys.shape[3]
        q = query.index_select(0, self._index).mul_(scale)
        q = q.view(self.total, shared, -1, size)
        suffix_keys, suffix_values = (self._after_prefix(t) for t in (keys, values))
        suffix = torch.bmm(
            q.index_select(0, self._of_span).flatten(0, 1), suffix_keys.transpose(1, 2)
        )
        suffix = suffix.view(-1, shared, q.shape[2], suffix.shape[-1]).index_select(0, self._rows)
        mask = self._mask(window)
        probs, outs, first = [], [], 0
        for slot, count in zip(self._anchors, self._sizes, strict=True):
            part = slice(first, first := first + count)
            heads = q[part].transpose(0, 1).reshape(shared, -1, size)
            scores = torch.cat(
                [
                    torch.bmm(heads, keys[slot, :, : self._length].transpose(1, 2)),
                    suffix[part].transpose(0, 1).reshape(shared, heads.shape[1], -1),
                ],
                2,
            )
            scores.view(shared, count, -1, scores.shape[-1]).add_(mask[None, part])
            p = scores.softmax(-1)
            out = torch.bmm(p[..., : self._length], values[slot, :, : self._length])
            outs.append(out.view(shared, count, -1, size).transpose(0, 1))
            probs.append(p[..., self._length :].view(shared, count, -1, suffix.shape[-1]))
        suffix_probs = torch.cat([p.transpose(0, 1) for p in probs])
        suffix_out = torch.bmm(
            suffix_probs.index_select(0, self._of_span).flatten(0, 1), suffix_values
        )
        suffix_out = suffix_out.view(-1, *q.shape[1:]).index_select(0, self._rows)
        return suffix_out.add_(torch.cat(outs)).view(self.total, *query.shape[1:])

    def _after_prefix(self, tensor: Tensor) -> Tensor:
        """Returns the keys or values after the common ones, (B * Hkv, L, D)."""
        part = tensor[:, :, self._length : self._end]
        if self._span is None:
            return part.index_select(0, self._slots).flatten(0, 1)
        return part[self._span[0] : self._span[1]].flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """Returns what is added to scores, (B, 1, P + L)."""
        if window not in self._masks:
            place = self._places[:, None, None]
            column = torch.arange(self._end, device=place.device)
            visible = column <= place
            if window is not None:
                visible &= column > place - window
            self._masks[window] = torch.where(visible, 0.0, -torch.inf)
        return self._masks[window]
