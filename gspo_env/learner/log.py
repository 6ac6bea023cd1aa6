"""The numbers that an update reports, and their names as metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.sample import PackedBatch
from gspo_env.learner.objectives import ObjectiveOutput
from gspo_env.model.experts import RouterBalance


@dataclass(frozen=True, kw_only=True, slots=True)
class PassStats:
    """Results of one forward and backward pass, without gradient."""

    row: PackedBatch
    output: ObjectiveOutput
    """Its loss is the share of this row in the loss of the minibatch."""
    entropy_N: Tensor
    top1_N: Tensor
    router_balance: RouterBalance | None
    """None for a dense model."""
    before_N: Tensor | None
    """Log-probabilities by the policy before the first step; None if they are not known."""

    @property
    def mismatch_N(self) -> Tensor | None:
        """Trainer's less engine's log-probabilities before the update; None if not known."""
        if self.before_N is None or self.row.engine_logprobs_N is None:
            return None
        return self.before_N - self.row.engine_logprobs_N


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """Results of an update."""

    passes: tuple[PassStats, ...]
    """Those of the steps that were not skipped."""
    grad_norms: tuple[float, ...]
    """One for each step that was not skipped."""
    skipped_steps: int
    """Steps whose gradient was not finite."""
    loss_scale: float | None
    """None unless the model has float16 weights."""
    learning_rate: float
    seconds: float
    clip_range: tuple[float, float] | None
    """Bounds of the ratio, if the loss has any."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name, without those that are not known."""
        always: dict[str, float | None] = {
            "train/skipped_steps": float(self.skipped_steps),
            "train/learning_rate": self.learning_rate,
            "train/loss_scale": self.loss_scale,
            "time/update": self.seconds,
        }
        metrics = always | (self._of_passes() if self.passes else {})
        return {name: value for name, value in metrics.items() if value is not None}

    def _of_passes(self) -> dict[str, float | None]:
        steps = len(self.grad_norms)
        computed = sum(len(p.row.input_ids_T) for p in self.passes)
        tokens = sum(sum(p.row.lengths_B) for p in self.passes)
        return {
            "train/loss": sum(float(p.output.loss) for p in self.passes) / steps,
            "train/grad_norm": sum(self.grad_norms) / steps,
            "train/ratio": self._mean(lambda p: p.output.ratio),
            "train/ratio_min": self._extreme(torch.min, lambda p: p.output.ratio),
            "train/ratio_max": self._extreme(torch.max, lambda p: p.output.ratio),
            "train/clipped_fraction": self._mean(lambda p: p.output.clipped),
            "train/kl": self._mean(lambda p: p.output.kl),
            "train/entropy": self._mean(lambda p: p.entropy_N),
            "train/top1": self._mean(lambda p: p.top1_N),
            "train/router_loss": self._router(lambda b: b.loss),
            "train/expert_load_max": self._router(lambda b: b.load.max()),
            "train/expert_load_min": self._router(lambda b: b.load.min()),
            **self._mismatch(),
            "train/shared_fraction": 1 - computed / tokens,
            "train/tokens_per_second": tokens / self.seconds,
        }

    def _mean(self, values: Callable[[PassStats], Tensor | None]) -> float | None:
        known = [v for v in map(values, self.passes) if v is not None]
        return _weighted([(_float(v).mean(), len(v)) for v in known])

    def _extreme(self, pick: Any, values: Callable[[PassStats], Tensor | None]) -> float | None:
        known = [v for v in map(values, self.passes) if v is not None]
        return float(pick(torch.cat(known))) if known else None

    def _router(self, value: Callable[[RouterBalance], Tensor]) -> float | None:
        rows = [(p.router_balance, len(p.row.input_ids_T)) for p in self.passes]
        return _weighted([(value(b), n) for b, n in rows if b is not None])

    def _mismatch(self) -> dict[str, float | None]:
        """Measures the engine's log-probabilities against the trainer's, before the update."""
        known = [(p.row, p.mismatch_N) for p in self.passes if p.mismatch_N is not None]
        if not known:
            return {}
        size_N = torch.cat([m.abs().float().cpu() for _, m in known])
        outside = None
        if self.clip_range is not None:
            low, high = self.clip_range
            outside = _weighted([(_outside(r, m, low, high), len(r.lengths_B)) for r, m in known])
        return {
            "train/logprob_diff_mean": float(size_N.mean()),
            "train/logprob_diff_p99": float(np.quantile(size_N.numpy(), 0.99)),
            "train/logprob_diff_max": float(size_N.max()),
            "train/ratio_outside_clip": outside,
        }


def _weighted(values: list[tuple[Tensor, int]]) -> float | None:
    """Returns the weighted mean; None without values."""
    total = sum(float(value) * weight for value, weight in values)
    return total / sum(weight for _, weight in values) if values else None


def _outside(row: PackedBatch, mismatch_N: Tensor, low: float, high: float) -> Tensor:
    """Returns the share of sequences whose mismatch alone takes their ratio outside the clip."""
    count = len(row.lengths_B)
    sum_B = mismatch_N.new_zeros(count).index_add_(0, row.sequence_N, mismatch_N)
    lengths_B = torch.bincount(row.sequence_N, minlength=count).clamp(min=1)
    ratio_B = (sum_B / lengths_B).exp()
    return _float((ratio_B < low) | (ratio_B > high)).mean()


def _float(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.float()
