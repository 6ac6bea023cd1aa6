"""Episodes in several rows: the loss of a row reads their tokens in the others, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.sample import PackedBatch
from gspo_env.learner.losses import LossInput


def with_tokens_of_other_rows(
    inputs: LossInput, row: PackedBatch, others: Sequence[tuple[PackedBatch, LossInput]]
) -> LossInput:
    """Appends the tokens of the row's episodes that are in other rows.

    They have no gradient, the advantage 0 and no KL, so they add nothing to the loss. But the ratio
    and the length of their episode are those of the whole episode.

    Args:
        inputs: What the loss reads of the row.
        row: The row.
        others: The other rows of the minibatch with split episodes, and what the loss reads there.
    """
    parts = [part for other in others if (part := _tokens_of_episodes(row, *other)) is not None]
    if not parts:
        return inputs
    tensors: dict[str, Any] = {
        f.name: torch.cat([values, *(getattr(part, f.name) for part in parts)])
        for f in fields(LossInput)
        if isinstance(values := getattr(inputs, f.name), Tensor)
    }
    turns = max(inputs.num_turns, *(part.num_turns for part in parts))
    return replace(inputs, **tensors, num_turns=turns)


def _tokens_of_episodes(
    row: PackedBatch, other: PackedBatch, inputs: LossInput
) -> LossInput | None:
    """Returns the tokens of another row that belong to episodes of this row."""
    index = {number: n for n, number in enumerate(row.episodes) if number is not None}
    episode_E = np.array([-1 if k is None else index.get(k, -1) for k in other.episodes])
    # the model tokens of a row are in the order of its sequences
    episode_N = np.repeat(episode_E[list(other.episode_B)], other.counts_B)
    places = np.flatnonzero(episode_N >= 0)
    if not len(places):
        return None
    device = inputs.logprobs_N.device
    places_N = torch.from_numpy(places).to(device)
    logprobs_N = inputs.logprobs_N[places_N].detach()
    engine_N, reference_N = inputs.engine_logprobs_N, inputs.reference_logprobs_N
    ages_N = inputs.ages_N
    return replace(
        inputs,
        logprobs_N=logprobs_N,
        old_logprobs_N=inputs.old_logprobs_N[places_N],
        advantages_N=torch.zeros_like(inputs.advantages_N[places_N]),
        episode_N=torch.from_numpy(episode_N[places]).to(device),
        turn_N=inputs.turn_N[places_N],
        reference_logprobs_N=None if reference_N is None else logprobs_N,
        engine_logprobs_N=None if engine_N is None else engine_N[places_N],
        ages_N=None if ages_N is None else ages_N[places_N],
    )
