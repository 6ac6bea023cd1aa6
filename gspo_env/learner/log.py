"""The numbers that an update reports, and their names as metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.sample import PackedBatch
from gspo_env.learner.losses import ObjectiveOutput, segment_sizes
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

    def numbers(self, clip_range: tuple[float, float] | None) -> dict[str, Tensor]:
        """Returns what the metrics are made of, still on the device; leaves out what is not known.

        `mismatch` is the size of the trainer's less the engine's log-probabilities, (N,).
        """
        output, balance = self.output, self.router_balance
        means = {
            "ratio": output.ratio,
            "clipped": output.clipped,
            "kl": output.kl,
            "entropy": self.entropy_N,
            "top1": self.top1_N,
        }
        found = {k: _float(v).mean() for k, v in means.items() if v is not None}
        found["loss"] = output.loss
        if output.ratio is not None:
            found |= {"ratio_min": output.ratio.min(), "ratio_max": output.ratio.max()}
        if balance is not None:
            found["router_loss"] = balance.loss
            found |= {"load_max": balance.load.max(), "load_min": balance.load.min()}
        if self.before_N is not None and self.row.engine_logprobs_N is not None:
            mismatch_N = self.before_N - self.row.engine_logprobs_N
            found["mismatch"] = mismatch_N.abs().float()
            if clip_range is not None:
                found["outside"] = _outside(self.row, mismatch_N, *clip_range)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class PassNumbers:
    """What the metrics are made of, on the CPU."""

    values: Mapping[str, Tensor]
    """The result of `PassStats.numbers`."""
    computed: int
    """Tokens of the row."""
    tokens: int
    """Tokens of its sequences."""
    own: int
    """Model tokens."""
    episodes: int


def numbers_of(
    passes: Sequence[PassStats], clip_range: tuple[float, float] | None
) -> list[PassNumbers]:
    """Copies the numbers of all passes to the CPU."""
    values = read([p.numbers(clip_range) for p in passes]) if passes else []
    return [
        PassNumbers(
            values=found,
            computed=len(p.row.input_ids_T),
            tokens=sum(p.row.lengths_B),
            own=len(p.entropy_N),
            episodes=len(p.row.episodes),
        )
        for p, found in zip(passes, values, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """Results of an update."""

    passes: tuple[PassStats, ...]
    """Those of the steps that were not skipped."""
    grad_norms: tuple[float, ...]
    """One for each step that was not skipped."""
    skipped_steps: int
    """Steps whose gradient was not finite."""
    oom_splits: int = 0
    """Rows that did not fit into memory and were split."""
    loss_scale: float | None
    """None unless the model has float16 weights."""
    learning_rate: float
    seconds: float
    clip_range: tuple[float, float] | None
    """Bounds of the ratio, if the loss has any."""

    def metrics(self, others: Sequence[PassNumbers] = ()) -> dict[str, float]:
        """Returns the metrics by name, without those that are not known.

        Args:
            others: The passes of the other ranks, in the same steps.
        """
        passes = [*numbers_of(self.passes, self.clip_range), *others]
        always: dict[str, float | None] = {
            "train/skipped_steps": float(self.skipped_steps),
            "train/oom_splits": float(self.oom_splits),
            "train/learning_rate": self.learning_rate,
            "train/loss_scale": self.loss_scale,
            "time/update": self.seconds,
        }
        metrics = always | (self._of_passes(passes) if passes else {})
        return {name: value for name, value in metrics.items() if value is not None}

    def _of_passes(self, rows: Sequence[PassNumbers]) -> dict[str, float | None]:
        steps = len(self.grad_norms)
        computed = [row.computed for row in rows]
        tokens = sum(row.tokens for row in rows)
        passes = [row.values for row in rows]
        own = [row.own for row in rows]
        return {
            "train/loss": sum(float(values["loss"]) for values in passes) / steps,
            "train/grad_norm": sum(self.grad_norms) / steps,
            "train/ratio": _mean(passes, "ratio", own),
            "train/ratio_min": _extreme(np.min, passes, "ratio_min"),
            "train/ratio_max": _extreme(np.max, passes, "ratio_max"),
            "train/clipped_fraction": _mean(passes, "clipped", own),
            "train/kl": _mean(passes, "kl", own),
            "train/entropy": _mean(passes, "entropy", own),
            "train/top1": _mean(passes, "top1", own),
            "train/router_loss": _mean(passes, "router_loss", computed),
            "train/expert_load_max": _mean(passes, "load_max", computed),
            "train/expert_load_min": _mean(passes, "load_min", computed),
            **_mismatch(passes, [row.episodes for row in rows]),
            "train/shared_fraction": 1 - sum(computed) / tokens,
            "train/tokens_per_second": tokens / self.seconds,
        }


def _mismatch(
    passes: Sequence[Mapping[str, Tensor]], episodes: Sequence[int]
) -> dict[str, float | None]:
    """Measures the engine's log-probabilities against the trainer's, before the update."""
    known = [values["mismatch"] for values in passes if "mismatch" in values]
    if not known:
        return {}
    size_N = torch.cat(known)
    return {
        "train/logprob_diff_mean": float(size_N.mean()),
        "train/logprob_diff_p99": float(np.quantile(size_N.numpy(), 0.99)),
        "train/logprob_diff_max": float(size_N.max()),
        "train/ratio_outside_clip": _mean(passes, "outside", episodes),
    }


def read(rows: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Copies the tensors of all rows to the CPU; it waits for a GPU once."""
    tensors = [tensor for row in rows for tensor in row.values()]
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    flat = torch.cat([tensor.detach().flatten().to(wide) for tensor in tensors]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
    return [{n: next(parts).view(t.shape).to(t.dtype) for n, t in row.items()} for row in rows]


def _extreme(pick: Any, passes: Sequence[Mapping[str, Tensor]], name: str) -> float | None:
    known = [float(values[name]) for values in passes if name in values]
    return float(pick(known)) if known else None


def _mean(
    passes: Sequence[Mapping[str, Tensor]], name: str, weights: Sequence[int]
) -> float | None:
    """Returns the weighted mean over the passes that have a number; None if none has."""
    known = [
        (float(values[name]), weight)
        for values, weight in zip(passes, weights, strict=True)
        if name in values
    ]
    total = sum(value * weight for value, weight in known)
    return total / sum(weight for _, weight in known) if known else None


def _outside(row: PackedBatch, mismatch_N: Tensor, low: float, high: float) -> Tensor:
    """Returns the share of episodes whose mismatch alone takes their ratio outside the clip."""
    count = len(row.episodes)
    sum_E = mismatch_N.new_zeros(count).index_add_(0, row.episode_N, mismatch_N)
    lengths_E = segment_sizes(row.episode_N, count).clamp(min=1)
    ratio_E = (sum_E / lengths_E).exp()
    return _float((ratio_E < low) | (ratio_E > high)).mean()


def _float(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.float()
