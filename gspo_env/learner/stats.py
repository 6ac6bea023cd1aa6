"""What an update computed for single tokens, for the episodes that a run keeps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from gspo_env.learner.log import read
from gspo_env.types import FloatArray

if TYPE_CHECKING:
    from gspo_env.learner.log import PassStats


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenValues:
    """The values of the trained tokens of one turn, (N,) each; None where they are not known."""

    advantage: FloatArray | None = None
    trainer_logprobs: FloatArray | None = None
    """By the policy before the first step."""
    ratio: FloatArray | None = None
    clipped: FloatArray | None = None
    """1 where the clip blocks the policy gradient, else 0."""
    entropy: FloatArray | None = None


def token_values(
    passes: Sequence[PassStats], episodes: Collection[int]
) -> dict[tuple[int, int], TokenValues]:
    """Returns the values of each turn of some episodes, by the episode's number and the turn.

    Waits for a GPU once. Turns whose step was skipped are missing.

    Args:
        passes: The passes of the steps that were not skipped.
        episodes: Numbers of the episodes; see `gspo_env.batch.sample.Sample.episode`.
    """
    rows, owners = [], []
    for part in passes:
        row, output = part.row, part.output
        # the model tokens of a row are in the order of its sequences
        numbers = [row.episodes[place] for place in row.episode_B]
        owner_N = np.repeat([-1 if n is None else n for n in numbers], row.counts_B)
        chosen = np.flatnonzero(np.isin(owner_N, list(episodes)))
        if not len(chosen):
            continue
        index = torch.from_numpy(chosen).to(row.turn_N.device)
        known = {
            "turn": row.turn_N,
            "advantage": row.advantages_N,
            "trainer_logprobs": part.before_N,
            "ratio": output.ratio,
            "clipped": output.clipped,
            "entropy": part.entropy_N,
        }
        rows.append(
            {name: v.detach()[index].double() for name, v in known.items() if v is not None}
        )
        owners.append(owner_N[chosen])
    found = {}
    for owner_N, values in zip(owners, read(rows) if rows else [], strict=True):
        arrays = {name: value.numpy() for name, value in values.items()}
        turn_N = arrays.pop("turn").astype(np.int64)
        # the trained tokens of a turn are in one sequence, so they are neighbours
        starts = np.flatnonzero((np.diff(owner_N) != 0) | (np.diff(turn_N) != 0)) + 1
        edges = [0, *starts.tolist(), len(owner_N)]
        for a, b in pairwise(edges):
            parts = {name: value[a:b] for name, value in arrays.items()}
            found[int(owner_N[a]), int(turn_N[a])] = TokenValues(**parts)
    return found
