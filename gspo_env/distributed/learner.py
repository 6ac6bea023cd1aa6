"""A learner whose model is in shards on several ranks, which take each step together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from gspo_env.batch.packing import microbatches
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.distributed.messages import Share
from gspo_env.distributed.ranks import OneRankFailed, Ranks
from gspo_env.distributed.shards import full_tensor, reshard
from gspo_env.errors import ConfigError
from gspo_env.learner.learner import Learner
from gspo_env.learner.losses import Loss, LossInput
from gspo_env.learner.memory import OutOfMemory
from gspo_env.learner.minibatch import Microbatch, Minibatch, rows_with_split_episodes
from gspo_env.learner.settings import LearnerConfig
from gspo_env.learner.stats import PassStats, UpdateStats
from gspo_env.model.head import usable_ids

T = TypeVar("T")

_CHECK_TOKENS = 24
"""Tokens of the row on which the whole model and the one in shards are compared."""


class ShardedLearner(Learner):
    """One rank's part of a learner.

    All ranks call the same methods in the same order, since each forward and backward pass gathers
    weights from all of them. A rank with fewer rows than another one makes up for them with passes
    over a row of its own that add nothing.

    Args:
        ranks: The ranks.
        model: The model in shards.
        reference: Makes a frozen copy of the model in shards.
        loss: See `Learner`.
        config: See `Learner`.
        total_steps: See `Learner`.
        temperature: See `Learner`.

    Raises:
        ConfigError: The optimiser cannot work on shards.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: Any,
        reference: Callable[[], Any],
        loss: Loss,
        config: LearnerConfig,
        *,
        total_steps: int,
        temperature: float,
    ) -> None:
        if "8bit" in config.optimizer:
            raise ConfigError(
                f"optimizer is {config.optimizer!r}, which cannot train a model in shards; "
                "expected adamw, or one process"
            )
        self.ranks, self._make_reference = ranks, reference
        super().__init__(model, loss, config, total_steps=total_steps, temperature=temperature)
        idle = Sample(
            token_ids=np.zeros(2, dtype=np.int64),
            turn_ids=np.array([-1, 0]),
            advantages=np.zeros(1),
            engine_logprobs=np.zeros(1),
            ages=np.zeros(1, dtype=np.int64),
        )
        self._idle = Microbatch(row=self.pack([idle]), samples=(idle,))

    def _frozen_copy(self, model: Any) -> Any:
        return self._make_reference()

    def _make_parallel(self) -> None:
        """Computes one row at a time, since the ranks take each pass together."""

    def take_shares(self, shares: Sequence[Share]) -> UpdateStats:
        """Takes one optimiser step for each share; its numbers are those of this rank's passes."""
        started = time.perf_counter()
        prepared = [self._share(share, n == 0) for n, share in enumerate(shares)]
        return self._take_steps(prepared, started)

    def _share(self, share: Share, first: bool) -> Minibatch:
        rows = [[sample] for sample in share.samples]
        if self._packed:
            rows = microbatches(share.samples, self._row_tokens, share=self._share_prefixes)
        return Minibatch(
            microbatches=tuple(Microbatch(row=self.pack(row), samples=tuple(row)) for row in rows),
            first=first,
            episodes=share.episodes,
            tokens=share.tokens,
            sequences=share.sequences,
        )

    def _in_memory(self, minibatch: Minibatch, compute: Callable[[Minibatch], T]) -> T:
        """Computes; a row that does not fit ends the run, since the ranks take each pass together.

        Raises:
            OneRankFailed: It did not fit.
        """
        try:
            return compute(minibatch)
        except OutOfMemory as error:
            tokens = sum(minibatch.microbatches[error.index].row.lengths_B)
            raise OneRankFailed(
                f"a row of {tokens:,} tokens does not fit into the memory of rank "
                f"{self.ranks.rank} ({error.reason}); several ranks do not split it: lower "
                "learner.microbatch_tokens"
            ) from None

    def check_row(self) -> PackedBatch:
        """Returns a row on which the model in shards is compared with the whole one."""
        vocabulary = usable_ids(self.policy)
        ids = np.random.default_rng(0).integers(0, vocabulary, _CHECK_TOKENS)
        turns = np.r_[-1, np.zeros(_CHECK_TOKENS - 1, dtype=np.int64)]
        return self.pack(
            [Sample(token_ids=ids, turn_ids=turns, advantages=np.zeros(_CHECK_TOKENS - 1))]
        )

    def score_check_row(self) -> Tensor:
        """Scores `check_row`; all ranks call this together."""
        logprobs_N = self.logprobs(self.check_row())
        reshard(self.policy)
        return logprobs_N

    def _missing(self, count: int) -> range:
        """Returns one number for each pass that another rank has beyond `count`.

        Call it before the passes, which wait for each other.
        """
        return range(self.ranks.max(count) - count)

    def _score_rows(self, minibatch: Minibatch) -> Minibatch:
        missing = self._missing(len(minibatch.microbatches))
        scored = super()._score_rows(minibatch)
        for _ in missing:
            self._scored(self._idle, minibatch)
        return scored

    def _score_split_episodes(
        self, minibatch: Minibatch
    ) -> dict[int, tuple[PackedBatch, LossInput]]:
        rows = rows_with_split_episodes([m.row for m in minibatch.microbatches])
        missing = self._missing(0 if self._ratios_are_one(minibatch) else len(rows))
        scored = super()._score_split_episodes(minibatch)
        for _ in missing:
            self.logprobs(self._idle.row)
        return scored

    def _backward_rows(self, minibatch: Minibatch) -> list[PassStats]:
        missing = self._missing(len(minibatch.microbatches))
        passes = super()._backward_rows(minibatch)
        for _ in missing:
            predictions, _ = self.scorer(self._idle.row)
            super()._add_gradient(predictions.logprobs_N.sum() * 0)
            self._losses.pop()
        return passes

    def _add_gradient(self, loss: Tensor) -> None:
        super()._add_gradient(loss * self.ranks.size)  # FSDP takes the mean over the ranks
        self._losses[-1] = loss.detach()

    def step(self) -> float:
        """See `Learner.step`; all ranks decide alike, by the norm over all shards."""
        reshard(self.policy)
        return super().step()

    def _clip(self, limit: float) -> float:
        masters = list(self.masters.tensors.values())
        gradients = [master.grad for master in masters if master.grad is not None]
        norm = full_tensor(nn.utils.get_total_norm(gradients))
        nn.utils.clip_grads_with_norm_(masters, limit, norm)
        return float(norm)

    def _total(self, losses: Sequence[Tensor]) -> float:
        return self.ranks.sum(super()._total(losses))
