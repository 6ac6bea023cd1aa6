"""Credit assignment: the groups of a rollout batch in, checked advantages out.

Axis letters: G episodes, K turns, N model tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from gspo_env.credit.estimators import Estimator
from gspo_env.credit.scores import auto_score
from gspo_env.credit.statistics import MIN_SCALE, all_zero, fallbacks, usable
from gspo_env.errors import ConfigError, raised_as
from gspo_env.registry import name_of
from gspo_env.settings import settings
from gspo_env.types import Episode, FloatArray, Group, Score


@settings
class CreditConfig:
    """Settings that apply to the advantages of every estimator."""

    score: Literal["auto", "turns", "outcome", "sum"] = "auto"
    """Rewards to learn from: those of the turns, the outcome at the last turn, or the sum of both.
    `auto` takes what the environment declares as `credit_score`, or what its first episodes
    contain. The estimators `outcome` and `turn_plus_outcome` have their own and refuse this."""
    rms: Annotated[float, Ge(0)] = 0.0
    """Scales the advantages of every batch to this root mean square over turns; 0 turns this
    off."""
    train_on_truncated: bool = True
    """Whether truncated episodes are trained on; they count in the statistics either way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """The advantages of a batch, and what to log about them."""

    advantages: list[list[FloatArray]]
    """For each group and each episode: (K_i,), or (N_i,) from an estimator of single tokens."""
    zero_variance_groups: float
    """Share of the groups in which every advantage is zero, those of the environment included."""
    baseline_fallbacks: int
    """Turns without a baseline of their own, because too few episodes reach them."""
    length_biased_groups: float
    """Share of the groups in which turns pay, episodes end by themselves after different numbers of
    turns, and the estimator pays or fines one more turn."""
    rms: float
    """Root mean square of the advantages."""
    seconds: float
    """Of the computation, which includes the pass of a teacher."""
    of_estimator: Mapping[str, float] = field(default_factory=dict)
    """Further metrics; see `Estimator.metrics`."""

    def blind(self, groups: Sequence[Group]) -> bool:
        """Returns whether all advantages are zero although outcomes of a group differ."""
        used = [[group.episodes[i] for i in usable(group)] for group in groups]
        differ = any(len({episode.outcome for episode in row}) > 1 for row in used)
        return self.zero_variance_groups == 1.0 and differ

    def metrics(self) -> dict[str, float]:
        """Returns the statistics by metric name."""
        return {
            "rollout/zero_variance_groups": self.zero_variance_groups,
            "train/baseline_fallbacks": float(self.baseline_fallbacks),
            "train/length_biased_groups": self.length_biased_groups,
            "train/advantage_rms": self.rms,
            "time/credit": self.seconds,
            **self.of_estimator,
        }


def estimate(
    groups: Sequence[Group],
    estimator: Estimator,
    config: CreditConfig | None = None,
    scores: Mapping[str, Score] = MappingProxyType({}),
) -> Credit:
    """Computes the advantages of every episode of every group.

    Args:
        groups: The groups of a rollout batch.
        estimator: The estimator.
        config: The score and the scaling of the whole batch; the score `auto` is decided from all
            groups together.
        scores: The score of each environment, by the `env_id` of its tasks; the others have the
            config's.

    Raises:
        ConfigError: The estimator returned arrays of a wrong shape, or with invalid values.
    """
    started, config = time.perf_counter(), config or CreditConfig()
    score = auto_score(groups) if config.score == "auto" else config.score
    groups = [replace(g, score=scores.get(g.task.env_id, score)) for g in groups]
    name = name_of("advantage", estimator)
    rows = [_of_played(name, group, estimator) for group in groups]
    keep_cut = config.train_on_truncated
    rows = _times(rows, 1 / estimator.batch_divisor(_trained(groups, rows, keep_cut)))
    rms = float(np.sqrt(np.mean(_trained(groups, rows, keep_cut) ** 2)))
    if config.rms and rms >= MIN_SCALE:
        rows, rms = _times(rows, config.rms / rms), config.rms
    flat = [_is_flat(group, row) for group, row in zip(groups, rows, strict=True)]
    biased = [estimator.sums_comparisons and _may_stop_paid(group) for group in groups]
    return Credit(
        advantages=rows,
        zero_variance_groups=float(np.mean(flat)) if flat else 0.0,
        baseline_fallbacks=sum(map(fallbacks, groups)) if estimator.compares_turns else 0,
        length_biased_groups=float(np.mean(biased)) if biased else 0.0,
        rms=rms,
        seconds=time.perf_counter() - started,
        of_estimator=estimator.metrics(groups),
    )


def _is_flat(group: Group, row: Sequence[FloatArray]) -> bool:
    """Returns whether nothing is learned from a group: no advantage, nor one of the environment."""
    turns = [turn for episode in group.episodes for turn in episode.turns]
    if any(turn.info.token_advantages for turn in turns):
        return False
    return all_zero(row)


def _may_stop_paid(group: Group) -> bool:
    """Returns whether turns pay, and episodes end by themselves after different numbers of them."""
    ended = [episode for i in usable(group) if (episode := group.episodes[i]).terminated]
    pays = any(episode.rewards[:-1].any() for episode in ended)
    return pays and len({len(episode.turns) for episode in ended}) > 1


def _trained(
    groups: Sequence[Group], rows: Sequence[Sequence[FloatArray]], keep_cut: bool
) -> FloatArray:
    """Joins the advantages that are trained on."""
    values = [
        _in_loss(group.episodes[i], row[i])
        for group, row in zip(groups, rows, strict=True)
        for i in usable(group)
        if keep_cut or not group.episodes[i].truncated
    ]
    return np.concatenate(values) if any(map(len, values)) else np.zeros(1)


def _in_loss(episode: Episode, values: FloatArray) -> FloatArray:
    """Returns the advantages that the environment neither masks nor replaces by its own."""
    masks = []
    for turn in episode.turns:
        count, mask = len(turn.action_ids), turn.info.token_mask
        replaced = turn.info.token_advantages is not None
        masks.append(np.full(count, not replaced) if replaced or mask is None else np.array(mask))
    if len(values) != len(masks):
        trained: FloatArray = values[np.concatenate(masks)]
    else:
        trained = values[[bool(mask.any()) or not mask.size for mask in masks]]
    return trained


def _times(rows: Sequence[Sequence[FloatArray]], factor: float) -> list[list[FloatArray]]:
    return [[values * factor for values in row] for row in rows]


def _of_played(name: str, group: Group, estimator: Estimator) -> list[FloatArray]:
    """Computes the advantages from the episodes that did not fail; the others get zeros."""
    played = [i for i, e in enumerate(group.episodes) if not e.failed]
    if len(played) == len(group.episodes):
        return _checked(name, group, estimator.advantages(group))
    rows: list[FloatArray] = [np.zeros(len(e.turns)) for e in group.episodes]
    if played:  # a `GroupEstimator` gives a single one zeros
        rest = replace(group, episodes=tuple(group.episodes[i] for i in played))
        for i, row in zip(played, _checked(name, rest, estimator.advantages(rest)), strict=True):
            rows[i] = row
    return rows


def _checked(name: str, group: Group, result: Any) -> list[FloatArray]:
    what = f"estimator {name!r} returned"
    if not isinstance(result, list | tuple):
        raise ConfigError(f"{what} {type(result).__name__}; expected a list of arrays")
    if len(result) != len(group.episodes):
        got, want = len(result), len(group.episodes)
        raise ConfigError(f"{what} {got} arrays; expected {want}, one per episode of the group")
    rows: list[FloatArray] = []
    for i, (row, episode) in enumerate(zip(result, group.episodes, strict=True)):
        problem = f"{what} {row!r} for episode {i}; expected numbers"
        with raised_as(ConfigError, problem, TypeError, ValueError):
            values: FloatArray = np.asarray(row, dtype=np.float64)
        turns, tokens = len(episode.turns), episode.model_tokens
        if values.shape not in ((turns,), (tokens,)):
            raise ConfigError(
                f"{what} shape {values.shape} for episode {i}; expected ({turns},), one per turn, "
                f"or ({tokens},), one per sampled token"
            )
        if not np.isfinite(values).all():
            raise ConfigError(f"{what} {values} for episode {i}; expected finite values")
        rows.append(values)
    return rows
