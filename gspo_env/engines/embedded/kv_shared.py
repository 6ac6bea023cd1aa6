"""Attention to prompts that several slots of the key-value cache share.

The keys and values of a shared prompt are kept once. The tokens of all sequences behind it attend
to it in one product, so a step reads it once and not once for each sequence. What a token attends
to in its own slot is added through the logarithms of the normalisers.

    slots    [question] a b c     ->    shared [question]    slots  a b c
             [question] d e                                         d e

Axis letters: T fed tokens, P shared prompts, R tokens behind each (padded), L prompt tokens,
H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

HIDDEN = -1e30
"""Score of what a token does not see; finite, so that a token which sees nothing gives no NaN."""
_FIRST_PROMPTS = 8
_WASTE = 2
"""Largest ratio of the numbers of tokens behind the prompts of one product, unless the padding
is small."""
_FEW = 256
"""Padded tokens that cost less than another product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Where the keys and values of a shared prompt are."""

    index: int
    length: int


class SharedPrompts:
    """Keys and values of shared prompts: of each layer, (2, P, H, L, D)."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def put(self, layer: int, index: int, held: Tensor) -> None:
        """Keeps the keys and values of a prompt, (2, H, L, D)."""
        own = self.layers.get(layer)
        _, heads, length, size = held.shape
        if own is None:
            own = held.new_zeros(2, _FIRST_PROMPTS, heads, length, size)
        prompts, capacity = own.shape[1], own.shape[3]
        if index >= prompts or length > capacity:
            more = max(2 * prompts, index + 1) if index >= prompts else prompts
            grown = own.new_zeros(2, more, heads, max(length, capacity), size)
            grown[:, :prompts, :, :capacity] = own
            own = grown
        own[:, index, :, :length] = held
        self.layers[layer] = own


class Behind:
    """The tokens of one step that are behind shared prompts.

    Args:
        shared: (B,) the shared prompt of each row; None if it has none.
        row_T: (T,) the row of each token.
        positions_T: (T,) positions in the sequence.
    """

    def __init__(self, shared: list[Shared | None], row_T: Any, positions_T: Any) -> None:
        index_T = np.array([-1 if s is None else s.index for s in shared])[row_T]
        lengths = {s.index: s.length for s in shared if s is not None}
        chosen = np.flatnonzero(index_T >= 0)
        order = chosen[np.argsort(index_T[chosen], kind="stable")]
        prompts, first, counts = np.unique(index_T[order], return_index=True, return_counts=True)
        length_P = np.array([lengths[int(p)] for p in prompts])
        start_P, total = np.empty(len(prompts), dtype=np.int64), 0
        self._shapes: list[tuple[int, int, int, int]] = []
        self._even: list[bool] = []
        self.arrays = []
        for bucket in _buckets(counts):
            width, longest = int(counts[bucket].max()), int(length_P[bucket].max())
            start_P[bucket] = total + width * np.arange(len(bucket))
            self._shapes.append((total, len(bucket), width, longest))
            self._even.append(bool((length_P[bucket] == longest).all()))
            self.arrays += [prompts[bucket], length_P[bucket]]
            total += width * len(bucket)
        place = np.repeat(start_P, counts) + np.arange(len(order)) - np.repeat(first, counts)
        take, back = np.zeros(total, dtype=np.int64), np.full(len(row_T), total)
        take[place], back[order] = order, place
        self._all = len(order) == len(row_T)
        self.arrays += [take, back, positions_T[take]]

    def place(self, *arrays: Tensor) -> None:
        """Takes the arrays back, as tensors on the device."""
        *parts, self._take, self._back, self._positions = arrays
        self._parts = list(zip(self._shapes, parts[::2], parts[1::2], strict=True))
        self._far = [
            None if self._even[n] else torch.arange(longest) >= lengths[:, None]
            for n, ((_, _, _, longest), _, lengths) in enumerate(self._parts)
        ]

    def attend(
        self, query: Tensor, held: Tensor, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs (T, H, D) and the logarithms of the normalisers (T, H).

        A token without a shared prompt has zeros, with a normaliser of about 0.

        Args:
            query: (T, H, D)
            held: (2, P, Hkv, L, D) the keys and values of a layer.
            scale: The scale of the scores.
            window: The number of last tokens that a token sees.
        """
        taken = query.index_select(0, self._take).mul_(scale)
        _, heads, size = query.shape
        outs: list[Tensor] = []
        norms: list[Tensor] = []
        for number, ((start, prompts, width, longest), index, _) in enumerate(self._parts):
            k, v = (t[:, :, :longest].index_select(0, index).flatten(0, 1) for t in held)
            q = taken[start : start + prompts * width].view(prompts, width, held.shape[2], -1, size)
            scores = torch.bmm(q.transpose(1, 2).reshape(len(k), -1, size), k.transpose(1, 2))
            shape = prompts, held.shape[2], width, -1
            self._hide(scores.view(*shape, longest), number, window)
            most = scores.amax(-1, keepdim=True)
            total = scores.sub_(most).exp_().sum(-1, keepdim=True)
            out, norm = torch.bmm(scores, v).div_(total), total.log_().add_(most)
            for found, part in ((outs, out), (norms, norm)):
                part = part.view(*shape, part.shape[-1]).transpose(1, 2)
                found.append(part.reshape(prompts * width, heads, -1))
        if not self._all:
            outs.append(query.new_zeros(1, heads, size))
            norms.append(query.new_full((1, heads, 1), HIDDEN))
        out, norm = (torch.cat(found).index_select(0, self._back) for found in (outs, norms))
        return out, norm[..., 0]

    def _hide(self, scores: Tensor, part: int, window: int | None) -> None:
        """Lowers the scores, (P, Hkv, R, G, L), of what a token does not see."""
        prompts, _, width, _, longest = scores.shape
        if (far := self._far[part]) is not None:
            scores.masked_fill_(far[:, None, None, None], HIDDEN)
        if window is not None:
            start = self._shapes[part][0]
            places = self._positions[start : start + prompts * width].view(prompts, width, 1)
            far = places - torch.arange(longest) >= window
            scores.masked_fill_(far[:, None, :, None], HIDDEN)


def _buckets(counts: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Returns indices by decreasing count; another bucket costs as much as some padding."""
    order = np.argsort(-counts, kind="stable")
    cuts = [0]
    for n, place in enumerate(order):
        most, count = counts[order[cuts[-1]]], counts[place]
        if most > _WASTE * count and (most - count) * (len(order) - n) > _FEW:
            cuts.append(n)
    return np.split(order, cuts[1:])
