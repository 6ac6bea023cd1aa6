"""Episodes whose sequences are in several rows: the loss of each row needs all of their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.sample import PackedBatch
from gspo_env.errors import BatchError
from gspo_env.learner.loss import Loss, LossInput
from gspo_env.learner.losses import ObjectiveOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A row, and what a loss reads of it, without a gradient."""

    row: PackedBatch
    inputs: LossInput


def spread_rows(rows: Sequence[PackedBatch]) -> list[int]:
    """Returns the indices of the rows with an episode that has tokens in another row too."""
    numbers = [set(row.episodes) - {None} for row in rows]
    counts = Counter(number for found in numbers for number in found)
    return [n for n, found in enumerate(numbers) if any(counts[number] > 1 for number in found)]


def complete(inputs: LossInput, row: PackedBatch, others: Sequence[Scored]) -> LossInput:
    """Adds the tokens of the row's episodes that are in other rows.

    They have no gradient, the advantage 0 and no KL, so they add nothing to the loss. But the
    episode's ratio and its length, to which they belong, are those of the whole episode.

    Args:
        inputs: Of the row.
        row: The row.
        others: The other rows of the minibatch that have tokens of its episodes.
    """
    parts = [part for other in others if (part := _shared(row, other)) is not None]
    if not parts:
        return inputs

    tensors: dict[str, Any] = {
        f.name: torch.cat([own, *(getattr(part, f.name) for part in parts)])
        for f in fields(LossInput)
        if isinstance(own := getattr(inputs, f.name), Tensor)
    }
    turns = max(inputs.num_turns, *(part.num_turns for part in parts))
    return replace(inputs, **tensors, num_turns=turns)


def _shared(row: PackedBatch, other: Scored) -> LossInput | None:
    """Returns the tokens of another row that belong to episodes of this row."""
    place = {number: n for n, number in enumerate(row.episodes)}
    place.pop(None, None)
    theirs = other.row
    owner_E = np.array([place.get(number, -1) for number in theirs.episodes])
    # the model tokens of a row are in the order of its sequences
    owner_N = np.repeat(owner_E[list(theirs.episode_B)], theirs.counts_B)
    chosen = np.flatnonzero(owner_N >= 0)
    if not len(chosen):
        return None
    values = other.inputs
    device = values.logprobs_N.device
    index = torch.from_numpy(chosen).to(device)
    logprobs_N = values.logprobs_N[index].detach()
    engine_N, reference_N = values.engine_logprobs_N, values.reference_logprobs_N
    return replace(
        values,
        logprobs_N=logprobs_N,
        old_logprobs_N=values.old_logprobs_N[index],
        advantages_N=torch.zeros_like(values.advantages_N[index]),
        episode_N=torch.from_numpy(owner_N[chosen]).to(device),
        turn_N=values.turn_N[index],
        reference_logprobs_N=None if reference_N is None else logprobs_N,
        engine_logprobs_N=None if engine_N is None else engine_N[index],
    )


def own_part(output: ObjectiveOutput, tokens: int) -> ObjectiveOutput:
    """Returns the output without the tokens that `complete` added."""
    parts = {name: getattr(output, name) for name in ("ratio", "clipped", "kl")}
    return replace(output, **{k: v[:tokens] for k, v in parts.items() if v is not None})


def check_output(output: ObjectiveOutput, loss: Loss, tokens: int) -> ObjectiveOutput:
    """Checks the output of a loss, which a user may have written; only its loss keeps a gradient.

    Raises:
        BatchError: The loss is not a scalar with a gradient, or a part has another shape.
    """
    name = type(loss).__name__
    if not isinstance(output, ObjectiveOutput):
        got = type(output).__name__
        raise BatchError(f"compute of {name} returned {got}; expected ObjectiveOutput")
    parts = {part: getattr(output, part) for part in ("ratio", "clipped", "kl")}
    known = {part: values for part, values in parts.items() if values is not None}
    for part, values in {"loss": output.loss, **known}.items():
        shape = () if part == "loss" else (tokens,)
        if not isinstance(values, Tensor) or values.shape != shape:
            got = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
            raise BatchError(f"the {part} of {name} is {got}; expected a tensor of shape {shape}")
    if not output.loss.requires_grad:
        raise BatchError(f"the loss of {name} is {output.loss}; expected a number with a gradient")
    return replace(output, **{part: values.detach() for part, values in known.items()})
