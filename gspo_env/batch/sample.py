"""Training sequences with their credit, alone and in a packed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gspo_env.batch.prefix import Run
from gspo_env.errors import BatchError
from gspo_env.types import BoolArray, Episode, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training sequence with its credit."""

    token_ids: IntArray
    """(T,)"""
    turn_ids: IntArray
    """(T,) turn of each model token, -1 elsewhere."""
    advantages: FloatArray
    """(N,) of each model token."""
    engine_logprobs: FloatArray | None = None
    """(N,) as the engine reported them; None if unknown."""
    ages: IntArray | None = None
    """(N,) updates of the weights since each was sampled; None if unknown."""
    episode: int | None = None
    """Samples with the same number are sequences of one episode, which has one ratio and one
    weight; None is an episode of its own."""
    observed: BoolArray | None = None
    """(T,) true on the environment's tokens after the first model token; None if unknown."""
    sampled: IntArray | None = None
    """(N,) index of each model token in all that were sampled for the episode; None if unknown."""

    def __post_init__(self) -> None:
        """Rejects arrays that do not fit together, and a model token that nothing predicts."""
        tokens, count = len(self.token_ids), int(self.mask.sum())
        if self.mask[:1].any():
            raise BatchError("the first token of a sample is sampled; expected a prompt before it")
        arrays = {name: getattr(self, name) for name in ("advantages", "engine_logprobs", "ages")}
        sizes = {name: (len(a), count) for name, a in arrays.items() if a is not None}
        for name, (size, length) in {"turn_ids": (len(self.turn_ids), tokens), **sizes}.items():
            if size != length:
                raise BatchError(f"{name} of a sample has {size} values; expected {length}")

    @property
    def mask(self) -> BoolArray:
        """(T,) true on model tokens."""
        return self.turn_ids >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Sequences laid end to end. B sequences, T tokens, N model tokens.

    `source_N` is the row position whose logits predict each model token:

        tokens   p p a a p a      turn_ids  -1 -1 0 0 -1 1
        source_N [1, 2, 4]        target_N  [a, a, a]

    The tokens of a shared prefix are in the row once. A model token in it has one place in N for
    each of the sequences: it is predicted once, but each sequence has its own loss.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    lengths_B: tuple[int, ...]
    counts_B: tuple[int, ...]
    """Model tokens of each sequence."""
    episode_B: tuple[int, ...]
    """Index into `episodes` of each sequence."""
    episodes: tuple[int | None, ...]
    """The number of each episode, see `Sample.episode`."""
    num_turns: int
    """One more than the largest turn."""
    runs: tuple[Run, ...]
    """How sequences share tokens; empty if they share none."""
    uses_T: Tensor
    """The number of sequences that each token of the row belongs to."""
    source_N: Tensor
    target_N: Tensor
    episode_N: Tensor
    """Index into `episodes` of each model token."""
    turn_N: Tensor
    advantages_N: Tensor
    engine_logprobs_N: Tensor | None = None
    """None unless every sample has them."""
    ages_N: Tensor | None = None
    """None unless every sample has them."""
    distinct_M: Tensor | None = None
    """Index of each unique (position, target) pair; None if all are unique."""
    expand_N: Tensor | None = None
    """Index into `distinct_M` of each model token."""


def to_samples(
    episodes: Sequence[Episode], advantages: Sequence[FloatArray], version: int | None = None
) -> list[Sample]:
    """Makes the training sequences of episodes; the samples of the i-th episode have the number i.

    The `token_advantages` and `token_mask` of a turn's `StepInfo` replace the estimator's.

    Args:
        episodes: The episodes of an update.
        advantages: For each episode (K,), which every token of a turn gets, or (N,), of each
            sampled token by turn. If an episode has as many tokens as turns, the others decide.
        version: The version of the weights that train, for `Sample.ages`.
    """
    pairs = list(zip(episodes, advantages, strict=True))
    by_token = any(len(values) == e.model_tokens != len(e.turns) for e, values in pairs)
    return [
        sample
        for number, (episode, values) in enumerate(pairs)
        for sample in _samples(episode, values, by_token, number, version)
    ]


def _samples(
    episode: Episode, advantages: FloatArray, by_token: bool, number: int, version: int | None
) -> list[Sample]:
    turns = episode.turns
    turn_N = np.repeat(np.arange(len(turns)), [len(turn.action_ids) for turn in turns])
    values_N = np.array(advantages, dtype=np.float64)
    if len(values_N) != len(turn_N) or not by_token:
        values_N = values_N[turn_N]
    keep_N = np.ones(len(turn_N), dtype=bool)
    for k, turn in enumerate(turns):
        if turn.info.token_advantages is not None:
            values_N[turn_N == k] = turn.info.token_advantages
        if turn.info.token_mask is not None:
            keep_N[turn_N == k] = turn.info.token_mask
    engine_N = episode.engine_logprobs
    age_N = None if version is None else version - episode.token_versions
    samples = []
    for sequence in episode.sequences:
        model_places = np.flatnonzero(sequence.turn_ids >= 0)
        # a sequence has its turns in order too
        in_order = np.isin(turn_N, sequence.turn_ids[model_places])
        keep = keep_N[in_order]
        observed = (sequence.turn_ids < 0) & (sequence.turn_ids >= 0).cumsum().astype(bool)
        sequence.turn_ids[model_places[~keep]] = -1
        samples.append(
            Sample(
                token_ids=sequence.token_ids,
                turn_ids=sequence.turn_ids,
                advantages=values_N[in_order][keep],
                engine_logprobs=engine_N[in_order][keep],
                ages=None if age_N is None else age_N[in_order][keep],
                episode=number,
                observed=observed,
                sampled=np.flatnonzero(in_order)[keep],
            )
        )
    return samples
