"""Deals the samples of a minibatch to ranks, and their form on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.packing import by_episode
from gspo_env.batch.prefix import sort_by_prefix
from gspo_env.batch.sample import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank gets of a minibatch, and the numbers of the whole minibatch."""

    samples: tuple[Sample, ...]
    episodes: int
    tokens: int
    """Model tokens."""
    sequences: int


def split_over_ranks(samples: Sequence[Sample], ranks: int) -> list[Share]:
    """Deals whole episodes in shares of about as many tokens; a share may be empty.

    Episodes with a common prefix are neighbours, so that they can share it in one row.
    """
    units = by_episode(samples)
    order = sort_by_prefix([unit[0].token_ids for unit in units]).ids
    sizes = np.array([sum(len(s.token_ids) for s in units[n]) for n in order])
    middle = np.cumsum(sizes) - sizes / 2
    owners = np.minimum((middle * ranks / sizes.sum()).astype(int), ranks - 1)
    chosen: list[list[Sample]] = [[] for _ in range(ranks)]
    for n, owner in zip(order, owners.tolist(), strict=True):
        chosen[owner] += units[n]
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    return [
        Share(samples=tuple(own), episodes=len(units), tokens=tokens, sequences=len(samples))
        for own in chosen
    ]


def pack_shares(shares: Sequence[Share]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the shares of one rank as JSON and tensors."""
    samples = [sample for share in shares for sample in share.samples]
    known = [s.engine_logprobs for s in samples if s.engine_logprobs is not None]
    arrays: dict[str, list[Any]] = {
        "token_ids": [s.token_ids for s in samples],
        "turn_ids": [s.turn_ids for s in samples],
        "advantages": [s.advantages for s in samples],
        "engine_logprobs": known,
    }
    tensors = {
        name: torch.from_numpy(np.concatenate(parts)) for name, parts in arrays.items() if parts
    }
    header = {
        "shares": [[len(s.samples), s.episodes, s.tokens, s.sequences] for s in shares],
        "samples": [
            [len(s.token_ids), len(s.advantages), s.episode, s.engine_logprobs is not None]
            for s in samples
        ],
    }
    return header, tensors


def unpack_shares(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Share]:
    """Inverse of `pack_shares`."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    used = dict.fromkeys(arrays, 0)

    def take(name: str, count: int) -> Any:
        start = used[name]
        used[name] += count
        return arrays[name][start : start + count].copy()

    samples = [
        Sample(
            token_ids=take("token_ids", tokens),
            turn_ids=take("turn_ids", tokens),
            advantages=take("advantages", own),
            engine_logprobs=take("engine_logprobs", own) if known else None,
            episode=episode,
        )
        for tokens, own, episode, known in header["samples"]
    ]
    shares, start = [], 0
    for count, episodes, own, sequences in header["shares"]:
        part = tuple(samples[start : start + count])
        shares.append(Share(samples=part, episodes=episodes, tokens=own, sequences=sequences))
        start += count
    return shares
