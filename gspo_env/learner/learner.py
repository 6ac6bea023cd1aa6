"""The learner: packed samples in, one optimiser step for each minibatch out."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import get_scheduler

from gspo_env.batch.packing import microbatches, pack
from gspo_env.batch.prefix import deal
from gspo_env.batch.sample import PackedBatch, Sample
from gspo_env.errors import BatchError, ConfigError, MissingExtraError
from gspo_env.learner.log import UpdateLog
from gspo_env.learner.loss import GSPO as ObjectiveConfig
from gspo_env.learner.objectives import importance_weights, packed_policy_loss
from gspo_env.learner.settings import LearnerConfig
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.head import linear_head
from gspo_env.model.scorer import Scorer


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
        self.objective, self.config = objective, config
        use_ragged_attention(model)
        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            raise ConfigError(
                f"{self.accelerator.num_processes} processes were launched; expected 1, since "
                "episodes are not yet shared out among processes"
            )
        reference = copy.deepcopy(model) if objective.kl_coef and not _adapted(model) else None
        if config.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        bf16 = config.precision == "bfloat16"
        weights = [p for p in model.parameters() if p.requires_grad]
        for parameter in weights if bf16 else ():
            parameter.data = parameter.data.float()
        optimizer = make_optimizer(config, weights)
        schedule = "constant_with_warmup" if config.schedule == "constant" else config.schedule
        scheduler = get_scheduler(schedule, optimizer, config.warmup_steps, total_steps)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler = scheduler
        head = linear_head(self.policy)
        self.scorer = Scorer(self.model, self.policy, temperature, bf16, head)
        self._at_reference = _adapter_is_zero(self.policy)
        self._reference: Scorer | None = None
        if reference is not None:
            reference.to(self.accelerator.device).requires_grad_(False).eval()
            self._reference = Scorer(
                reference, reference, temperature, bf16, linear_head(reference)
            )

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
        log = UpdateLog()
        engine_is_old = (old_logprobs or self.objective.old_logprobs) == "engine"
        if engine_is_old or self.objective.correction != "none":
            _need_engine_logprobs(samples)
        chunks = self._minibatches(samples, seed)
        batches = [[self._pack(row) for row in self._rows(chunk)] for chunk in chunks]
        before = [[self._before(b, engine_is_old, n) for b in row] for n, row in enumerate(batches)]
        low, high = 1 - self.objective.clip_low, 1 + self.objective.clip_high
        for n, (chunk, rows, known) in enumerate(zip(chunks, batches, before, strict=True)):
            for batch, (old_N, reference_N) in zip(rows, known, strict=True):
                own_N = self._accumulate(batch, old_N, reference_N, len(chunk), log)
                if n == 0 or old_N is None:
                    log.mismatch(batch, own_N, low, high)
                elif not engine_is_old:
                    log.mismatch(batch, old_N, low, high)
            log.add("train/grad_norm", float(self._step()), 1)
        seconds = time.perf_counter() - started
        tokens = sum(len(s.token_ids) for s in samples)
        computed = sum(len(batch.input_ids_T) for row in batches for batch in row)
        metrics = log.metrics()
        return {
            **metrics,
            "train/loss": metrics["train/loss"] / len(chunks),
            "train/learning_rate": float(self.scheduler.get_last_lr()[0]),
            "train/shared_fraction": 1 - computed / tokens,
            "train/tokens_per_second": tokens / seconds,
            "time/update": seconds,
        }

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities of the model tokens without gradient, (N,)."""
        with torch.no_grad():
            return self.scorer(batch)[0].logprobs_N

    def imitate(self, samples: Sequence[Sample]) -> float:
        """One step of maximum likelihood on the model tokens; returns the mean loss."""
        total = sum(int(s.mask.sum()) for s in samples)
        loss_sum = 0.0
        self.model.train()
        for row in self._rows(samples):
            logprobs_N = self.scorer(self._pack(row))[0].logprobs_N
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

    def _before(
        self, batch: PackedBatch, engine_is_old: bool, steps_taken: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """pi_old and the reference of the model tokens, (N,); None where it is the policy itself.

        Before the first step pi_old is the policy, whose own detached log-probabilities serve; and
        before the first step of a run so is the reference.
        """
        kl = bool(self.objective.kl_coef)
        needed = not engine_is_old or (kl and self._at_reference)
        start_N = self.logprobs(batch) if steps_taken and needed else None
        old_N = batch.engine_logprobs_N if engine_is_old else start_N
        return old_N, start_N if self._at_reference or not kl else self.reference_logprobs(batch)

    def reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities of the model tokens by the model as it was given, (N,)."""
        if self._reference is None:
            with self.policy.disable_adapter():
                return self.logprobs(batch)
        with torch.no_grad():
            return self._reference(batch)[0].logprobs_N

    def _accumulate(
        self,
        batch: PackedBatch,
        old_N: Tensor | None,
        reference_N: Tensor | None,
        sequences: int,
        log: UpdateLog,
    ) -> Tensor:
        """Adds a microbatch's gradient; returns the policy's own log-probabilities, (N,)."""
        router = self.scorer.router_coefficient
        self.model.train()
        predicted, balance = self.scorer(batch, routers=router > 0)
        own_N = predicted.logprobs_N.detach()
        old_N = own_N if old_N is None else old_N
        kl = bool(self.objective.kl_coef)
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
            reference_logprobs_N=(own_N if reference_N is None else reference_N) if kl else None,
            kl_coef=self.objective.kl_coef,
            importance_weights_N=self._correction(old_N, batch),
            normaliser=sequences,
        )
        loss = output.loss
        log.objective(output, predicted, kl)
        if balance is not None:
            loss = loss + router * balance.loss * len(batch.lengths_B) / sequences
            log.experts(balance, len(batch.input_ids_T))
        self.accelerator.backward(loss)
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

    def _step(self) -> Tensor:
        limit = self.config.max_grad_norm or math.inf
        norm: Tensor = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self._at_reference = False
        return norm


def _need_engine_logprobs(samples: Sequence[Sample]) -> None:
    if any(np.isnan(s.engine_logprobs).any() for s in samples):
        raise BatchError(
            "the engine's log-probabilities of some samples are not known; expected them where "
            "they are pi_old or a mismatch is corrected"
        )


def make_optimizer(config: LearnerConfig, weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser that the config names.

    Raises:
        MissingExtraError: It is one of bitsandbytes, which is not installed.
    """
    settings: Any = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(weights, fused=True, **settings)
    try:
        from bitsandbytes import optim
    except ImportError as error:
        raise MissingExtraError(
            f"optimizer is {config.optimizer!r} and bitsandbytes is not installed: "
            "pip install bitsandbytes"
        ) from error
    kind = optim.AdamW8bit if config.optimizer == "adamw_8bit" else optim.PagedAdamW8bit
    made: torch.optim.Optimizer = kind(weights, **settings)
    return made


def _adapted(model: Any) -> bool:
    return hasattr(model, "disable_adapter")


def _adapter_is_zero(model: Any) -> bool:
    """Whether a model is what it was given as: a whole one is, an adapter only while it is zero."""
    up = [p for name, p in model.named_parameters() if "lora_B" in name]
    return not _adapted(model) or (bool(up) and not any(bool(p.any()) for p in up))
