"""What an update reports: its metrics, and the values of single tokens for the episodes to keep."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gspo_env.learner.losses import segment_sizes
from gspo_env.types import FloatArray, IntArray

_TURNS = {
    **{0: "train/logprob_diff_turn_1", 1: "train/logprob_diff_turn_2"},
    **{3: "train/logprob_diff_turn_4", 7: "train/logprob_diff_turn_8"},
    15: "train/logprob_diff_turn_16",
}
"""The metric of the turns from each index to below the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassStats:
    """Results of one forward and backward pass, without gradient."""

    values: dict[str, Tensor]
    """By name, without those that are unknown.

    Scalars are `loss` (the share of this row in the loss of the minibatch), `router_loss`,
    `observation_loss`, `entropy_sum`, `load_max` and `load_min`. All others are (N,): `turn`,
    `episode` (an index into `episodes`), `advantage`, `ratio`, `clipped`, `kl`, `entropy`, `top1`,
    `control` (the probability of marks that were not sampled), `trainer_logprobs` (by the policy
    before the first step), `engine_logprobs` and `age` (updates of the weights since the token was
    sampled)."""
    episodes: tuple[int | None, ...]
    """The number of each episode; see `gspo_env.batch.sample.Sample.episode`."""
    computed_tokens: int
    """Tokens of the row."""
    sequence_tokens: int
    """Tokens of its sequences, of which several may share one of the row."""

    def token_mean(self, name: str) -> float | None:
        """Returns the mean of a value over the row's model tokens; None if it is unknown."""
        return float(_floating(self.values[name]).mean()) if name in self.values else None

    @property
    def mismatch_N(self) -> Tensor | None:
        """The trainer's less the engine's log-probabilities, (N,); None if one is unknown."""
        if not {"trainer_logprobs", "engine_logprobs"} <= self.values.keys():
            return None
        return self.values["trainer_logprobs"] - self.values["engine_logprobs"]

    def outside_clip(self, low: float, high: float) -> float | None:
        """Returns the share of episodes whose mismatch alone takes their ratio outside the clip."""
        if self.mismatch_N is None:
            return None
        episode_N, count = self.values["episode"], len(self.episodes)
        sum_E = self.mismatch_N.new_zeros(count).index_add_(0, episode_N, self.mismatch_N)
        ratio_E = (sum_E / segment_sizes(episode_N, count).clamp(min=1)).exp()
        return float(((ratio_E < low) | (ratio_E > high)).float().mean())


def to_cpu(passes: Sequence[PassStats]) -> list[PassStats]:
    """Copies the values of all passes to the CPU; it waits for a GPU once."""
    tensors = [tensor for each in passes for tensor in each.values.values()]
    if not tensors:
        return []
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    flat = torch.cat([tensor.detach().flatten().to(wide) for tensor in tensors]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
    return [
        replace(
            each, values={k: next(parts).view(v.shape).to(v.dtype) for k, v in each.values.items()}
        )
        for each in passes
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenValues:
    """The values of the trained tokens of one turn, (N,) each; None where they are unknown."""

    advantage: FloatArray | None = None
    trainer_logprobs: FloatArray | None = None
    """By the policy before the first step."""
    ratio: FloatArray | None = None
    clipped: FloatArray | None = None
    """1 where the clip blocks the policy gradient, else 0."""
    entropy: FloatArray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """Results of an update."""

    passes: Sequence[PassStats]
    """Those of the steps that were not skipped, on the CPU."""
    grad_norms: Sequence[float]
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
    entropy_coef: float | None = None
    """The weight of the entropy in the next step; None without one."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name; those that are unknown are left out."""
        metrics: dict[str, float | None] = {
            "train/skipped_steps": float(self.skipped_steps),
            "train/oom_splits": float(self.oom_splits),
            "train/learning_rate": self.learning_rate,
            "train/loss_scale": self.loss_scale,
            "train/entropy_coef": self.entropy_coef,
            "time/update": self.seconds,
        }
        if self.passes:
            metrics |= self._pass_metrics()
        return {name: value for name, value in metrics.items() if value is not None}

    def _pass_metrics(self) -> dict[str, float | None]:
        passes, steps = self.passes, len(self.grad_norms)
        model_tokens = [len(each.values["turn"]) for each in passes]
        computed = [each.computed_tokens for each in passes]
        tokens = sum(each.sequence_tokens for each in passes)

        def by_token(name: str) -> float | None:
            return _mean([each.token_mean(name) for each in passes], model_tokens)

        def by_row(name: str) -> float | None:
            return _mean([each.token_mean(name) for each in passes], computed)

        ratios = [each.values["ratio"] for each in passes if "ratio" in each.values]
        return {
            "train/loss": sum(float(each.values["loss"]) for each in passes) / steps,
            "train/grad_norm": sum(self.grad_norms) / steps,
            "train/ratio": by_token("ratio"),
            "train/ratio_min": min((float(ratio_N.min()) for ratio_N in ratios), default=None),
            "train/ratio_max": max((float(ratio_N.max()) for ratio_N in ratios), default=None),
            "train/clipped_fraction": by_token("clipped"),
            "train/kl": by_token("kl"),
            "train/entropy": by_token("entropy"),
            "train/top1": by_token("top1"),
            "train/control_token_probability": _control(passes),
            "train/router_loss": by_row("router_loss"),
            "train/observation_loss": by_row("observation_loss"),
            "train/expert_load_max": by_row("load_max"),
            "train/expert_load_min": by_row("load_min"),
            **self._mismatch_metrics(),
            "train/shared_fraction": 1 - sum(computed) / tokens,
            "train/tokens_per_second": tokens / self.seconds,
        }

    def _mismatch_metrics(self) -> dict[str, float | None]:
        """Compares the engine's log-probabilities with the trainer's, before the update."""
        passes = [each for each in self.passes if each.mismatch_N is not None]
        if not passes:
            return {}
        size_N = torch.cat(
            [m.abs().float() for each in passes if (m := each.mismatch_N) is not None]
        )
        outside = None
        if self.clip_range is not None:
            shares = [each.outside_clip(*self.clip_range) for each in self.passes]
            outside = _mean(shares, [len(each.episodes) for each in self.passes])
        return {
            "train/logprob_diff_mean": float(size_N.mean()),
            "train/logprob_diff_p99": float(np.quantile(size_N.numpy(), 0.99)),
            "train/logprob_diff_max": float(size_N.max()),
            "train/ratio_outside_clip": outside,
            **_by_turn(size_N, torch.cat([each.values["turn"] for each in passes])),
            **_by_age(size_N, [each.values.get("age") for each in passes]),
        }

    def token_values(self, episodes: Collection[int]) -> dict[tuple[int, int], TokenValues]:
        """Returns the values of each turn of some episodes, by the episode's number and the turn.

        Turns whose step was skipped are missing.

        Args:
            episodes: Numbers of the episodes; see `gspo_env.batch.sample.Sample.episode`.
        """
        return {key: value for each in self.passes for key, value in _of_pass(each, episodes)}


def _control(passes: Sequence[PassStats]) -> float | None:
    """Returns the mean probability of marks behind a turn's first token, where a call may begin."""
    every = [each.values for each in passes if "control" in each.values]
    same = [(v["turn"].diff() == 0) & (v["episode"].diff() == 0) for v in every]
    chances = [v["control"][1:][same_N] for v, same_N in zip(every, same, strict=True)]
    return float(torch.cat(chances).mean()) if any(map(len, chances)) else None


def _by_turn(size_N: Tensor, turn_N: Tensor) -> dict[str, float]:
    """Returns the mean size of the mismatch by turn; nothing if all tokens are of first turns."""
    starts = torch.tensor(list(_TURNS))
    place_N = torch.bucketize(turn_N, starts, right=True) - 1
    means = _means(size_N, place_N)
    names = list(_TURNS.values())
    return {names[place]: mean for place, mean in means.items()} if max(means) else {}


def _by_age(size_N: Tensor, ages: Sequence[Tensor | None]) -> dict[str, float]:
    """Returns the mean size of the mismatch by the version of the weights, if there are several."""
    age_N = [age for age in ages if age is not None]
    if len(age_N) < len(ages):
        return {}
    means = _means(size_N, torch.cat(age_N))
    return {f"train/logprob_diff_age_{n}": m for n, m in means.items()} if len(means) > 1 else {}


def _means(values_N: Tensor, kind_N: Tensor) -> dict[int, float]:
    kinds: list[int] = torch.unique(kind_N).tolist()
    return {kind: float(values_N[kind_N == kind].mean()) for kind in kinds}


def _of_pass(
    stats: PassStats, episodes: Collection[int]
) -> Iterator[tuple[tuple[int, int], TokenValues]]:
    numbers = np.array([-1 if number is None else number for number in stats.episodes])
    episode_N: IntArray = numbers[stats.values["episode"].numpy()]
    turn_N = stats.values["turn"].numpy()
    arrays = {
        name: stats.values[name].double().numpy()
        for name in ("advantage", "trainer_logprobs", "ratio", "clipped", "entropy")
        if name in stats.values
    }
    # the trained tokens of a turn are in one sequence, so they are neighbours
    cuts = np.flatnonzero((np.diff(episode_N) != 0) | (np.diff(turn_N) != 0)) + 1
    for start, end in pairwise([0, *cuts.tolist(), len(turn_N)]):
        if (number := int(episode_N[start])) in episodes:
            values = {name: array[start:end] for name, array in arrays.items()}
            yield (number, int(turn_N[start])), TokenValues(**values)


def _mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Returns the weighted mean of the known values; None if there is none."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    total = sum(value * weight for value, weight in pairs)
    return total / sum(weight for _, weight in pairs) if pairs else None


def _floating(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.float()
