"""What other settings would do with a kept batch: gradients and updates on the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gspo_agents.replay import Replay, Update
from gspo_env.batch.sample import Sample
from gspo_env.config import Config
from gspo_env.learner.learner import Learner
from gspo_env.runs.effects import Effect
from gspo_env.types import FloatArray

Advantages = dict[tuple[int, int, int], FloatArray]
"""Those of the tokens of each turn, by group, episode and turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """The gradient of a whole batch, at the weights before the update."""

    learner: Learner
    """In the state before the update."""
    values: dict[str, Tensor]
    advantages: Advantages


def effects(batch: Replay, arms: Mapping[str, Config]) -> dict[str, Effect]:
    """Computes the effect of each arm on a batch.

    Args:
        batch: The batch.
        arms: Configs that `Replay.allowed` returned, by name.

    Raises:
        BatchError: No token is trained.
        OutputError: The batch does not have what an estimator reads.
    """
    original = gradient(batch, batch.own)
    return {
        name: effect(batch, batch.update(config), gradient(batch, config), original)
        for name, config in arms.items()
    }


def effect(batch: Replay, update: Update, its: Gradient, original: Gradient) -> Effect:
    """Computes the effect of an update.

    Args:
        batch: The batch.
        update: An update with it.
        its: The gradient under the config of the update.
        original: The gradient to compare with.
    """
    before = _logprobs(its.learner, update.samples)
    after = _logprobs(update.learner, update.samples)
    change = {place: after[n] - before[n] for n, place in enumerate(update.places)}
    best, worst = _by_outcome(batch, change)
    groups = [[place for place in change if place[0] == n] for n in range(len(batch.batch.groups))]
    rewards = [[batch.batch.groups[p].episodes[g].outcome for p, g in group] for group in groups]
    return Effect(
        norm=_dot(its.values, its.values) ** 0.5,
        cosine=_cosine(its.values, original.values),
        clipped=update.metrics.get("train/clipped_fraction", 0.0),
        turned_tokens=_turned(its.advantages, original.advantages),
        turned_turns=_turned(_sums(its.advantages), _sums(original.advantages)),
        best=best,
        worst=worst,
        outcome=predicted(rewards, [[change[place] for place in group] for group in groups]),
    )


def predicted(outcomes: Sequence[Sequence[float]], change: Sequence[Sequence[float]]) -> float:
    """Predicts by how much an update changes the mean outcome.

    The episodes of a group weigh by exp(change), and their weights are normalised, which takes one
    of G from the difference. These episodes made the update too, so the prediction is too high;
    `studies/credit/whatif_exact.py` has by how much.

    Args:
        outcomes: Those of the episodes of each group.
        change: The change of the log-probability of each episode.

    Example:
        >>> round(predicted([[1.0, 0.0]], [[0.1, -0.1]]), 3)
        0.1
    """
    means = []
    for values_G, change_G in zip(outcomes, change, strict=True):
        if (size := len(values_G)) > 1:
            weight_G = np.exp(np.asarray(change_G) - np.max(change_G))
            difference = weight_G @ values_G / weight_G.sum() - np.mean(values_G)
            means.append(size / (size - 1) * difference)
    return float(np.mean(means)) if means else np.nan


def gradient(batch: Replay, config: Config) -> Gradient:
    """Computes the gradient of a batch under a config."""
    learner = batch.learner(replace(config, learner=replace(config.learner, minibatches=1)))
    samples, places, _ = batch.samples(config, learner)
    for minibatch in learner.score(learner.prepare(samples)):
        learner.backward(minibatch)
    advantages: Advantages = {}
    for sample in samples:
        group, index = places[sample.episode or 0]
        turns_N = sample.turn_ids[sample.mask]
        for turn in np.unique(turns_N):
            advantages[group, index, int(turn)] = sample.advantages[turns_N == turn]
    return Gradient(learner=learner, values=learner.masters.gradients(), advantages=advantages)


def _logprobs(learner: Learner, samples: Sequence[Sample]) -> dict[int, float]:
    """Returns the log-probability of each episode's sampled tokens."""
    sums: dict[int, float] = {}
    for minibatch in learner.prepare(samples):
        for microbatch in minibatch.microbatches:
            row = microbatch.row
            values_N = learner.logprobs(row).double()
            for place, number in enumerate(row.episodes):
                total = float(values_N[row.episode_N == place].sum())
                sums[number or 0] = sums.get(number or 0, 0.0) + total
    return sums


def _by_outcome(batch: Replay, change: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """Returns the mean change of the best and of the worst episodes of groups that differ."""
    best, worst = [], []
    for number, group in enumerate(batch.batch.groups):
        places = [place for place in change if place[0] == number]
        outcomes = {place: group.episodes[place[1]].outcome for place in places}
        low, high = min(outcomes.values(), default=0.0), max(outcomes.values(), default=0.0)
        if low < high:
            best += [change[place] for place in places if outcomes[place] == high]
            worst += [change[place] for place in places if outcomes[place] == low]
    return (float(np.mean(best)), float(np.mean(worst))) if best else (np.nan, np.nan)


def _dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    pairs = ((one[name].double(), other[name].double()) for name in one.keys() & other.keys())
    return float(sum(torch.sum(a * b) for a, b in pairs))


def _cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    size = (_dot(one, one) * _dot(other, other)) ** 0.5
    return _dot(one, other) / size if size else float("nan")


def _sums(advantages: Advantages) -> Advantages:
    return {turn: values.sum(keepdims=True) for turn, values in advantages.items()}


def _turned(ours: Advantages, theirs: Advantages) -> float:
    """Returns the share of values with opposite signs, of those that are not 0 on both sides."""
    turned = trained = 0
    for turn in ours.keys() | theirs.keys():
        one, other = (side.get(turn, np.zeros(1)) for side in (ours, theirs))
        if len(one) != len(other):  # it was edited, or is trained on one side only
            other = np.full(len(one), other.mean())
        turned += int(np.sum(one * other < 0))
        trained += int(np.sum((one != 0) | (other != 0)))
    return turned / trained if trained else 0.0
