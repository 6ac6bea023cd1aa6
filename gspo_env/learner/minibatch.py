"""What one optimiser step works on: minibatches of packed rows, and what a loss reads of a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from gspo_env.batch.packing import by_episode
from gspo_env.batch.prefix import split_minibatches
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.errors import BatchError
from gspo_env.learner.losses import Loss, ObjectiveOutput
from gspo_env.registry import name_of

TOKEN_PARTS = ("ratio", "clipped", "kl")
"""The fields of `ObjectiveOutput` with a value for each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """A packed row, and its log-probabilities from before the first step."""

    row: PackedBatch
    samples: tuple[Sample, ...] = ()
    """What is packed in the row."""
    trainer_logprobs_N: Tensor | None = None
    """Of the policy before the first step; None if nothing needs them, and in the first minibatch,
    because its backward pass gives the same numbers."""
    reference_logprobs_N: Tensor | None = None
    """Of the reference; None if the policy still equals it, or if nothing needs them."""
    entropy_N: Tensor | None = None
    """Of the policy before the first step; None unless tokens are chosen by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """The samples of one optimiser step, in packed rows.

    The numbers count those of all ranks; the rows are those of this one.
    """

    microbatches: tuple[Microbatch, ...]
    first: bool
    """Whether this is the first optimiser step of the update."""
    episodes: int
    tokens: int
    """Model tokens."""
    sequences: int
    entropy_floor: float | None = None
    """The least entropy of a token that is trained; None trains all."""
    chosen_tokens: int | None = None
    """Model tokens that are trained; None if all are."""


def split(
    samples: Sequence[Sample], minibatches: int, seed: int, *, needs_engine_logprobs: bool
) -> list[list[Sample]]:
    """Splits samples by whole episodes; those without a model token are left out.

    Args:
        samples: The samples of an update.
        minibatches: Their number, or that of the episodes if it is smaller.
        seed: Seed of the split.
        needs_engine_logprobs: Whether every sample needs the engine's log-probabilities.

    Raises:
        BatchError: No sample has a model token, or the engine's log-probabilities are missing.
    """
    samples = with_model_tokens(samples)
    if needs_engine_logprobs and any(s.engine_logprobs is None for s in samples):
        raise BatchError(
            "some samples have no engine_logprobs; the loss needs them as pi_old or to correct a "
            "mismatch"
        )
    episodes = by_episode(samples)
    parts = [list(range(len(episodes)))]
    count = min(minibatches, len(episodes))
    if count > 1:
        generator = np.random.default_rng(seed)
        parts = split_minibatches([e[0].token_ids for e in episodes], count, generator)
    return [[sample for i in part for sample in episodes[i]] for part in parts]


def advantage_metrics(parts: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Returns the smallest share of a minibatch's episodes that have an advantage."""
    sizes = [[_largest_advantage(episode) for episode in by_episode(part)] for part in parts]
    return {"train/advantage_share_min": min(float(np.mean(np.array(s) > 0)) for s in sizes)}


def _largest_advantage(episode: Sequence[Sample]) -> float:
    return max(float(np.abs(sample.advantages).max(initial=0)) for sample in episode)


def with_model_tokens(samples: Sequence[Sample]) -> list[Sample]:
    """Leaves out samples without a model token.

    Raises:
        BatchError: No sample has one.
    """
    trained = [s for s in samples if s.mask.any()]
    if not trained:
        raise BatchError("no sample has a model token; expected at least one")
    return trained


def rows_with_split_episodes(rows: Sequence[PackedBatch]) -> list[int]:
    """Returns the indices of the rows with an episode that has tokens in another row too."""
    numbers = [set(row.episodes) - {None} for row in rows]
    counts = Counter(number for row_numbers in numbers for number in row_numbers)
    return [n for n, row_numbers in enumerate(numbers) if any(counts[k] > 1 for k in row_numbers)]


def check_output(output: ObjectiveOutput, loss: Loss, tokens: int) -> ObjectiveOutput:
    """Checks the output of a loss, which a user may have written; only its loss keeps a gradient.

    Raises:
        BatchError: The loss is not a scalar with a gradient, or a part has another shape.
    """
    name = repr(name_of("loss", loss))
    if not isinstance(output, ObjectiveOutput):
        kind = type(output).__name__
        raise BatchError(f"compute of {name} returned {kind}; expected ObjectiveOutput")
    parts = {part: values for part in TOKEN_PARTS if (values := getattr(output, part)) is not None}
    for part, values in {"loss": output.loss, **parts}.items():
        shape = () if part == "loss" else (tokens,)
        if not isinstance(values, Tensor) or values.shape != shape:
            got = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
            raise BatchError(f"the {part} of {name} is {got}; expected a tensor of shape {shape}")
    if not output.loss.requires_grad:
        raise BatchError(f"the loss of {name} is {output.loss}; expected a number with a gradient")
    return replace(output, **{part: values.detach() for part, values in parts.items()})
