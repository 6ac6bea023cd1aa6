"""What the training loop asks of a learner, in one process or on several ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.learner.stats import TokenValues


class Trainer(Protocol):
    """Trains a model; see `Learner`."""

    @property
    def policy(self) -> Any:
        """The model with its whole weights, as they are after the last update."""
        ...

    @property
    def tokens(self) -> Mapping[tuple[int, int], TokenValues]:
        """The values of the tokens of the last update, for the episodes to keep."""
        ...

    def update(
        self, samples: Sequence[Sample], seed: int = 0, keep: Collection[int] = ()
    ) -> dict[str, float]:
        """Takes one optimiser step for each minibatch; returns the metrics."""
        ...

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """Packs samples into one row on the device of `policy`."""
        ...

    def logprobs(self, row: PackedBatch) -> Tensor:
        """Computes the log-probabilities of the model tokens without gradient, (N,)."""
        ...

    def state(self) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
        """Returns all that the next step depends on: what JSON can hold, and whole tensors."""
        ...

    def restore(self, named: Iterable[tuple[str, Tensor]], saved: Mapping[str, Any]) -> None:
        """Takes over the `state` of another learner."""
        ...
