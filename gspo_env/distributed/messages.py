"""What rank 0 and the others send each other, as JSON and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.packing import by_episode
from gspo_env.batch.prefix import sort_by_prefix
from gspo_env.batch.sample import Sample
from gspo_env.learner.stats import PassStats

Message = tuple[dict[str, Any], dict[str, Tensor]]
"""A header in JSON, and tensors by name."""
_ARRAYS = ("token_ids", "turn_ids", "advantages", "engine_logprobs", "ages", "observed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank gets of a minibatch, and the numbers of the whole minibatch."""

    samples: tuple[Sample, ...]
    episodes: int
    tokens: int
    """Model tokens."""
    sequences: int


def split_over_ranks(samples: Sequence[Sample], ranks: int) -> list[Share]:
    """Splits samples by whole episodes in shares of about as many tokens; a share may be empty.

    Episodes with a common prefix are neighbours, so that they can share it in one row.
    """
    episodes = by_episode(samples)
    order = sort_by_prefix([episode[0].token_ids for episode in episodes]).ids
    sizes = np.array([sum(len(s.token_ids) for s in episodes[n]) for n in order])
    middle = np.cumsum(sizes) - sizes / 2
    ranks_of_episodes = np.minimum((middle * ranks / sizes.sum()).astype(int), ranks - 1)
    parts: list[list[Sample]] = [[] for _ in range(ranks)]
    for n, rank in zip(order, ranks_of_episodes.tolist(), strict=True):
        parts[rank] += episodes[n]
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    return [
        Share(samples=tuple(p), episodes=len(episodes), tokens=tokens, sequences=len(samples))
        for p in parts
    ]


def pack_shares(shares: Sequence[Share]) -> Message:
    """Returns the shares of one rank, one for each minibatch, as a message."""
    samples = [sample for share in shares for sample in share.samples]
    header = {
        "shares": [[len(s.samples), s.episodes, s.tokens, s.sequences] for s in shares],
        "episodes": [sample.episode for sample in samples],
    }
    rows = [
        {name: torch.from_numpy(v) for name in _ARRAYS if (v := getattr(s, name)) is not None}
        for s in samples
    ]
    return header, _flatten(rows)


def unpack_shares(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Share]:
    """Inverse of `pack_shares`."""
    numbers = header["episodes"]
    samples = iter(
        Sample(**{name: t.numpy() for name, t in row.items()}, episode=number)
        for row, number in zip(_by_row(tensors, len(numbers)), numbers, strict=True)
    )
    return [
        Share(
            samples=tuple(islice(samples, count)),
            episodes=episodes,
            tokens=tokens,
            sequences=sequences,
        )
        for count, episodes, tokens, sequences in header["shares"]
    ]


def pack_passes(passes: Sequence[PassStats]) -> Message:
    """Returns the results of passes as a message."""
    rows = [[list(p.episodes), p.computed_tokens, p.sequence_tokens] for p in passes]
    return {"passes": rows}, _flatten([p.values for p in passes])


def unpack_passes(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[PassStats]:
    """Inverse of `pack_passes`."""
    rows = header["passes"]
    return [
        PassStats(
            values=values,
            episodes=tuple(episodes),
            computed_tokens=computed,
            sequence_tokens=tokens,
        )
        for (episodes, computed, tokens), values in zip(
            rows, _by_row(tensors, len(rows)), strict=True
        )
    ]


def _flatten(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns copies of the tensors of all rows, under names that begin with the row's number."""
    return {f"{n}.{k}": v.clone() for n, row in enumerate(rows) for k, v in row.items()}


def _by_row(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Inverse of `_flatten`."""
    rows: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        n, _, name = key.partition(".")
        rows[int(n)][name] = tensor
    return rows
