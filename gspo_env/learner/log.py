"""The numbers that an update reports, and their names as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gspo_env.learner.objectives import ObjectiveOutput
from gspo_env.model.experts import RouterBalance


@dataclass(frozen=True, kw_only=True, slots=True)
class PassStats:
    """What one forward and backward pass found; nothing has a gradient."""

    loss: float
    """The share of this microbatch in the loss of its minibatch."""
    output: ObjectiveOutput
    entropy_N: Tensor
    top1_N: Tensor
    router_balance: RouterBalance | None
    """None for a dense model."""
    mismatch_N: Tensor | None
    """Trainer's less engine's log-probabilities before the update; None if either is not known."""
    sequence_N: Tensor
    sequences: int
    tokens: int
    """Tokens of the packed row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """What an update found and did."""

    passes: tuple[PassStats, ...]
    grad_norms: tuple[float, ...]
    """One for each optimiser step."""
    learning_rate: float
    tokens: int
    """Tokens of all samples, shared ones counted for each."""
    seconds: float
    clip_range: tuple[float, float] | None
    """Bounds of the ratio, if the loss has any."""

    def metrics(self) -> dict[str, float]:
        """Names every number."""
        computed = sum(p.tokens for p in self.passes)
        return {
            "train/loss": sum(p.loss for p in self.passes) / len(self.grad_norms),
            "train/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "train/learning_rate": self.learning_rate,
            **self._mean("train/ratio", lambda p: p.output.ratio),
            **self._extremes("train/ratio", lambda p: p.output.ratio),
            **self._mean("train/clipped_fraction", lambda p: p.output.clipped),
            **self._mean("train/kl", lambda p: p.output.kl),
            **self._mean("train/entropy", lambda p: p.entropy_N),
            **self._mean("train/top1", lambda p: p.top1_N),
            **self._router(),
            **self._mismatch(),
            "train/shared_fraction": 1 - computed / self.tokens,
            "train/tokens_per_second": self.tokens / self.seconds,
            "time/update": self.seconds,
        }

    def _mean(self, name: str, values: Callable[[PassStats], Tensor | None]) -> dict[str, float]:
        known = [v for v in map(values, self.passes) if v is not None]
        return _weighted(name, ((float(v.to(_wide(v)).mean()), len(v)) for v in known))

    def _extremes(
        self, name: str, values: Callable[[PassStats], Tensor | None]
    ) -> dict[str, float]:
        known = [v for v in map(values, self.passes) if v is not None]
        if not known:
            return {}
        least, most = min(float(v.min()) for v in known), max(float(v.max()) for v in known)
        return {f"{name}_min": least, f"{name}_max": most}

    def _router(self) -> dict[str, float]:
        rows = [(p.router_balance, p.tokens) for p in self.passes if p.router_balance is not None]
        return {
            **_weighted("train/router_loss", ((float(b.loss), n) for b, n in rows)),
            **_weighted("train/expert_load_max", ((float(b.load.max()), n) for b, n in rows)),
            **_weighted("train/expert_load_min", ((float(b.load.min()), n) for b, n in rows)),
        }

    def _mismatch(self) -> dict[str, float]:
        """How far the engine's log-probabilities are from the trainer's, before the update."""
        known = [(p, p.mismatch_N) for p in self.passes if p.mismatch_N is not None]
        if not known:
            return {}
        size_N = torch.cat([m.abs().float().cpu() for _, m in known])
        metrics = {
            "train/logprob_diff_mean": float(size_N.mean()),
            "train/logprob_diff_p99": float(np.quantile(size_N.numpy(), 0.99)),
            "train/logprob_diff_max": max(float(m.abs().max()) for _, m in known),
        }
        if self.clip_range is None:
            return metrics
        low, high = self.clip_range
        shares = ((_outside(p, m, low, high), p.sequences) for p, m in known)
        return {**metrics, **_weighted("train/ratio_outside_clip", shares)}


def _weighted(name: str, values: Iterable[tuple[float, int]]) -> dict[str, float]:
    """The weighted mean under its name; nothing without values."""
    total = weight = 0.0
    for value, count in values:
        total += value * count
        weight += count
    return {name: total / weight} if weight else {}


def _outside(stats: PassStats, mismatch_N: Tensor, low: float, high: float) -> float:
    """The share of sequences whose mismatch alone takes their ratio outside the clip."""
    sum_B = mismatch_N.new_zeros(stats.sequences).index_add_(0, stats.sequence_N, mismatch_N)
    lengths_B = torch.bincount(stats.sequence_N, minlength=stats.sequences).clamp(min=1)
    ratio_B = (sum_B / lengths_B).exp()
    return float(((ratio_B < low) | (ratio_B > high)).float().mean())


def _wide(values: Tensor) -> torch.dtype:
    return values.dtype if values.is_floating_point() else torch.float32
