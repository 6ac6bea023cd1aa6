"""What an update reports: means and extremes over its microbatches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.sample import PackedBatch
from gspo_env.learner.objectives import ObjectiveOutput
from gspo_env.model.experts import Balance
from gspo_env.model.head import Predictions


class UpdateLog:
    """Token-weighted means and extremes over the microbatches of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)
        self._extremes: dict[str, float] = {}
        self._differences: list[Tensor] = []

    def add(self, name: str, value: float, weight: float | None) -> None:
        """Adds to a mean; without a weight the values add up."""
        self._sums[name] += value * (1.0 if weight is None else weight)
        self._weights[name] = 1.0 if weight is None else self._weights[name] + weight

    def extreme(self, name: str, value: float, pick: Any) -> None:
        """Keeps the smallest or largest value."""
        self._extremes[name] = pick(self._extremes.get(name, value), value)

    def objective(self, output: ObjectiveOutput, predicted: Predictions, kl: bool) -> None:
        """A microbatch's loss, ratios and entropies."""
        count = len(output.ratio)
        self.add("train/loss", float(output.loss.detach()), None)
        self.add("train/ratio", float(output.ratio.mean()), count)
        self.extreme("train/ratio_min", float(output.ratio.min()), min)
        self.extreme("train/ratio_max", float(output.ratio.max()), max)
        self.add("train/clipped_fraction", float(output.clipped.float().mean()), count)
        self.add("train/entropy", float(predicted.entropy_N.mean()), count)
        self.add("train/top1", float(predicted.top1_N.float().mean()), count)
        if kl:
            self.add("train/kl", float(output.kl.mean()), count)

    def experts(self, balance: Balance, tokens: int) -> None:
        """A microbatch's router."""
        self.add("train/router_loss", float(balance.loss.detach()), tokens)
        self.add("train/expert_load_max", float(balance.load.max()), tokens)
        self.add("train/expert_load_min", float(balance.load.min()), tokens)

    def mismatch(self, batch: PackedBatch, old_N: Tensor, low: float, high: float) -> None:
        """How far the engine's log-probabilities are from the trainer's, before any update."""
        difference_N = old_N - batch.engine_logprobs_N
        if difference_N.isnan().any():  # a batch from elsewhere, without an engine's
            return
        self._differences.append(difference_N.abs().float().cpu())
        self.extreme("rollout/logprob_diff_max", float(difference_N.abs().max()), max)
        rows = len(batch.lengths_B)
        sum_B = difference_N.new_zeros(rows).index_add_(0, batch.sequence_N, difference_N)
        ratio_B = (sum_B / torch.bincount(batch.sequence_N, minlength=rows).clamp(min=1)).exp()
        outside = ((ratio_B < low) | (ratio_B > high)).float().mean()
        self.add("rollout/ratio_outside_clip", float(outside), rows)

    def metrics(self) -> dict[str, float]:
        """Everything, by metric name."""
        means = {name: total / max(self._weights[name], 1.0) for name, total in self._sums.items()}
        extra = {}
        if self._differences:
            every = torch.cat(self._differences)
            extra["rollout/logprob_diff_mean"] = float(every.mean())
            extra["rollout/logprob_diff_p99"] = float(np.quantile(every.numpy(), 0.99))
        return {**means, **self._extremes, **extra}
