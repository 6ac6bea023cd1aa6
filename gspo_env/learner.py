"""The learner: packed samples in, one optimiser step for each minibatch out."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import get_scheduler

from gspo_env.attention import PackedAttention, use_ragged_attention
from gspo_env.errors import BatchError, ConfigError
from gspo_env.head import Predictions, linear_head, predict, predict_from_logits, without_head
from gspo_env.objectives import ObjectiveOutput, importance_weights, packed_policy_loss
from gspo_env.packing import PackedBatch, Sample, microbatches, pack
from gspo_env.prefix import deal
from gspo_env.tree_attention import TreeAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """The objective; see `gspo_env.objectives.policy_loss`."""

    ratio_level: Literal["sequence", "turn", "token"] = "sequence"
    """One importance ratio for each episode (GSPO), turn, or token (GRPO)."""
    clip_low: float = 3e-4
    """The ratio's lower bound is 1 - clip_low. The paper's setting for a large model; its GRPO
    baseline has 0.2, and the embedded recipe 0.03, since a tiny model's ratios move further."""
    clip_high: float = 4e-4
    """The ratio's upper bound is 1 + clip_high. The paper's setting for a large model; its GRPO
    baseline has 0.27, and the embedded recipe 0.05."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Whose log-probabilities are pi_old. The engine's save a pass, but a mismatch counts as a
    ratio."""
    correction: Literal["none", "truncated", "mask"] = "none"
    """Weight for the train/inference mismatch; only with the trainer's pi_old."""
    correction_cap: float = 2.0
    """The largest correction weight C."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        if not 0 <= self.clip_low < 1:
            raise ConfigError(f"clip_low is {self.clip_low!r}; expected a number in [0, 1)")
        if not (self.clip_high >= 0 and math.isfinite(self.clip_high)):
            raise ConfigError(f"clip_high is {self.clip_high!r}; expected a number of at least 0")
        if not self.correction_cap >= 1:
            raise ConfigError(f"correction_cap is {self.correction_cap!r}; expected at least 1")
        if self.correction != "none" and self.old_logprobs == "engine":
            raise ConfigError(
                f"correction is {self.correction!r} with old_logprobs 'engine'; expected 'none', "
                "because the ratio already holds the mismatch"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """The optimiser and how a rollout batch is cut."""

    learning_rate: float = 1e-6
    """AdamW's. The embedded recipe has 1e-3; a LoRA adapter wants about ten times a model's."""
    warmup_steps: int = 5
    """Optimiser steps of linear learning-rate warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after it."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    minibatches: int = 4
    """Optimiser steps for each rollout batch."""
    microbatch_tokens: int = 16384
    """The most tokens of one forward and backward pass."""
    lora_rank: int = 0
    """Rank of a LoRA adapter; 0 trains every weight."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ConfigError(f"learning_rate is {self.learning_rate!r}; expected a number above 0")
        for name, least in (("minibatches", 1), ("microbatch_tokens", 1), ("warmup_steps", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected at least {least}")
        for name in ("weight_decay", "max_grad_norm", "lora_rank"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected at least 0")


class Learner:
    """Trains a causal LM on packed samples.

    Args:
        model: A `transformers` causal LM, or one wrapped by PEFT.
        objective: The objective's settings.
        config: The optimiser's settings.
        total_steps: Optimiser steps of the whole run, for the schedule.
        temperature: The sampling temperature that the logits are divided by.

    Raises:
        ConfigError: More than one process was launched.
    """

    def __init__(
        self,
        model: Any,
        objective: ObjectiveConfig,
        config: LearnerConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
    ) -> None:
        self.objective, self.config, self.temperature = objective, config, temperature
        use_ragged_attention(model)
        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            raise ConfigError(
                f"{self.accelerator.num_processes} processes were launched; expected 1, since "
                "episodes are not yet shared out among processes"
            )
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            weights, lr=config.learning_rate, weight_decay=config.weight_decay
        )
        schedule = "constant_with_warmup" if config.schedule == "constant" else config.schedule
        scheduler = get_scheduler(schedule, optimizer, config.warmup_steps, total_steps)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler = scheduler
        self._head = linear_head(self.policy)

    @property
    def policy(self) -> Any:
        """The model without Accelerate's wrapping."""
        return self.accelerator.unwrap_model(self.model)

    def update(
        self,
        samples: Sequence[Sample],
        seed: int = 0,
        old_logprobs: Literal["trainer", "engine"] | None = None,
    ) -> dict[str, float]:
        """Takes one optimiser step for each minibatch; returns the step's metrics.

        Args:
            samples: At least one.
            seed: Decides how they are dealt into minibatches.
            old_logprobs: Whose are pi_old; the objective's choice by default.

        Raises:
            BatchError: The engine's log-probabilities are needed and not known.
        """
        started = time.perf_counter()
        log = _Log()
        engine_is_old = (old_logprobs or self.objective.old_logprobs) == "engine"
        if engine_is_old or self.objective.correction != "none":
            _need_engine_logprobs(samples)
        chunks = self._minibatches(samples, seed)
        batches = [[self._pack(row) for row in self._rows(chunk)] for chunk in chunks]
        # Before the first step pi_old is the policy itself: its own detached log-probabilities
        # serve.
        old = [[self._old(b, engine_is_old, n) for b in row] for n, row in enumerate(batches)]
        for n, (chunk, rows, olds) in enumerate(zip(chunks, batches, old, strict=True)):
            for batch, old_N in zip(rows, olds, strict=True):
                own_N = self._accumulate(batch, old_N, len(chunk), log)
                if n == 0 or old_N is None:
                    self._record_mismatch(batch, own_N, log)
                elif not engine_is_old:
                    self._record_mismatch(batch, old_N, log)
            log.add("train/grad_norm", float(self._step()), 1)
        seconds = time.perf_counter() - started
        tokens = sum(len(s.token_ids) for s in samples)
        metrics = log.metrics()
        return {
            **metrics,
            "train/loss": metrics["train/loss"] / len(chunks),
            "train/learning_rate": float(self.scheduler.get_last_lr()[0]),
            "train/tokens_per_second": tokens / seconds,
            "time/update": seconds,
        }

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities of the model tokens without gradient, (N,)."""
        with torch.no_grad():
            return self._forward(batch).logprobs_N

    def imitate(self, samples: Sequence[Sample]) -> float:
        """One step of maximum likelihood on the model tokens; returns the mean loss."""
        total = sum(int(s.mask.sum()) for s in samples)
        loss_sum = 0.0
        for row in self._rows(samples):
            logprobs_N = self._forward(self._pack(row)).logprobs_N
            loss = -logprobs_N.sum() / total
            self.accelerator.backward(loss)
            loss_sum += float(loss.detach())
        self._step()
        return loss_sum

    def _minibatches(self, samples: Sequence[Sample], seed: int) -> list[list[Sample]]:
        count = min(self.config.minibatches, len(samples))
        if count <= 1:
            return [list(samples)]
        hands = deal([s.token_ids for s in samples], count, np.random.default_rng(seed))
        return [[samples[n] for n in hand] for hand in hands]

    def _rows(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        return microbatches(samples, self.config.microbatch_tokens)

    def _pack(self, samples: Sequence[Sample]) -> PackedBatch:
        return pack(samples, self.accelerator.device)

    def _old(self, batch: PackedBatch, engine_is_old: bool, steps_taken: int) -> Tensor | None:
        """pi_old of the model tokens, (N,); None where it is the policy itself."""
        if engine_is_old:
            return batch.engine_logprobs_N
        return self.logprobs(batch) if steps_taken else None

    def _accumulate(
        self, batch: PackedBatch, old_N: Tensor | None, sequences: int, log: _Log
    ) -> Tensor:
        """Adds a microbatch's gradient; returns the policy's own log-probabilities, (N,)."""
        predicted = self._forward(batch)
        own_N = predicted.logprobs_N.detach()
        old_N = own_N if old_N is None else old_N
        output = packed_policy_loss(
            predicted.logprobs_N,
            old_N,
            batch.advantages_N,
            batch.sequence_N,
            num_sequences=len(batch.lengths_B),
            ratio_level=self.objective.ratio_level,
            turn_ids_N=batch.turn_N,
            clip_low=self.objective.clip_low,
            clip_high=self.objective.clip_high,
            importance_weights_N=self._correction(old_N, batch),
            normaliser=sequences,
        )
        self.accelerator.backward(output.loss)
        self._record(batch, output, predicted, log)
        return own_N

    def _correction(self, old_N: Tensor, batch: PackedBatch) -> Tensor | None:
        if self.objective.correction == "none":
            return None
        return importance_weights(
            old_N,
            batch.engine_logprobs_N,
            batch.sequence_N,
            kind=self.objective.correction,
            cap=self.objective.correction_cap,
        )

    def _record(
        self,
        batch: PackedBatch,
        output: ObjectiveOutput,
        predicted: Predictions,
        log: _Log,
    ) -> None:
        count = len(batch.target_N)
        log.add("train/loss", float(output.loss.detach()), None)
        log.add("train/ratio", float(output.ratio.mean()), count)
        log.extreme("train/ratio_min", float(output.ratio.min()), min)
        log.extreme("train/ratio_max", float(output.ratio.max()), max)
        log.add("train/clipped_fraction", float(output.clipped.float().mean()), count)
        log.add("train/entropy", float(predicted.entropy_N.mean()), count)
        log.add("train/top1", float(predicted.top1_N.float().mean()), count)

    def _record_mismatch(self, batch: PackedBatch, old_N: Tensor, log: _Log) -> None:
        """How far the engine's log-probabilities are from the trainer's, before any update."""
        difference_N = old_N - batch.engine_logprobs_N
        if difference_N.isnan().any():  # a batch from elsewhere, without an engine's
            return
        log.differences.append(difference_N.abs().float().cpu())
        log.extreme("rollout/logprob_diff_max", float(difference_N.abs().max()), max)
        rows = len(batch.lengths_B)
        sum_B = difference_N.new_zeros(rows).index_add_(0, batch.sequence_N, difference_N)
        ratio_B = (sum_B / torch.bincount(batch.sequence_N, minlength=rows).clamp(min=1)).exp()
        low, high = 1 - self.objective.clip_low, 1 + self.objective.clip_high
        outside = ((ratio_B < low) | (ratio_B > high)).float().mean()
        log.add("rollout/ratio_outside_clip", float(outside), rows)

    def _forward(self, batch: PackedBatch) -> Predictions:
        """What the policy says of the batch's model tokens."""
        self.model.train()
        source_M, target_M = batch.source_N, batch.target_N
        if batch.distinct_M is not None:
            source_M, target_M = source_M[batch.distinct_M], target_M[batch.distinct_M]
        with nullcontext() if self._head is None else without_head(self._head):
            output = self.model(
                input_ids=batch.input_ids_T[None],
                position_ids=batch.positions_T[None],
                use_cache=False,
                logits_to_keep=source_M,
                ragged=_attention(batch),
            )
        if self._head is None:
            said = predict_from_logits(output.logits[0], target_M, self.temperature)
        else:
            weight, bias = self._head.weight, self._head.bias
            said = predict(output.logits[0], weight, bias, target_M, self.temperature)
        return said if batch.expand_N is None else said.at(batch.expand_N)

    def _step(self) -> Tensor:
        limit = self.config.max_grad_norm or math.inf
        norm: Tensor = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return norm


def _attention(batch: PackedBatch) -> PackedAttention:
    device = batch.input_ids_T.device
    if batch.runs:
        return TreeAttention(batch.runs, device)
    return PackedAttention(batch.lengths_B, device)


def _need_engine_logprobs(samples: Sequence[Sample]) -> None:
    if any(np.isnan(s.engine_logprobs).any() for s in samples):
        raise BatchError(
            "the engine's log-probabilities of some samples are not known; expected them where "
            "they are pi_old or a mismatch is corrected"
        )


class _Log:
    """Token-weighted means and extremes over the microbatches of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)
        self._extremes: dict[str, float] = {}
        self.differences: list[Tensor] = []

    def add(self, name: str, value: float, weight: float | None) -> None:
        """Adds to a mean; without a weight the values add up."""
        self._sums[name] += value * (1.0 if weight is None else weight)
        self._weights[name] = 1.0 if weight is None else self._weights[name] + weight

    def extreme(self, name: str, value: float, pick: Any) -> None:
        """Keeps the smallest or largest value."""
        self._extremes[name] = pick(self._extremes.get(name, value), value)

    def metrics(self) -> dict[str, float]:
        """Everything, by metric name."""
        means = {name: total / max(self._weights[name], 1.0) for name, total in self._sums.items()}
        extra = {}
        if self.differences:
            every = torch.cat(self.differences)
            extra["rollout/logprob_diff_mean"] = float(every.mean())
            extra["rollout/logprob_diff_p99"] = float(np.quantile(every.numpy(), 0.99))
        return {**means, **self._extremes, **extra}
