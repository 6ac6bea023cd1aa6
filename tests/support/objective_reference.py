"""A reference for the objectives in NumPy float64, written from the equations.

It uses loops and closed-form gradients on purpose, and shares no code with the losses of the
learner.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gspo_env.errors import BatchError
from gspo_env.learner.losses import ClipSettings
from gspo_env.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceOutput:
    """The loss, its gradient and the per-token quantities, (B, T)."""

    loss: float
    gradient: FloatArray
    """The loss's derivative with respect to each log-probability."""
    ratio: FloatArray
    """The importance ratio, 1 if the mask is false."""
    clipped: BoolArray
    """True if the clip blocks the policy gradient."""
    kl: FloatArray
    """The k3 estimate of each token, 0 without a reference."""


def policy_loss(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    turn_ids: ArrayLike | None = None,
    reference_logprobs: ArrayLike | None = None,
    importance_weights: ArrayLike | None = None,
    ages: ArrayLike | None = None,
    **options: Any,
) -> ReferenceOutput:
    """Computes the clipped loss and its gradient, token by token.

    Shapes:
        As `gspo_env.learner.policy_loss`.

    Raises:
        ConfigError: An option is invalid.
        BatchError: The ratio level is `turn` without turn ids.

    Source:
        arXiv 2507.18071, eq. 5, 7, 13, 14 (value) and 17 (gradient); with a ratio mean of power
        p, the factor s of token t in eq. 14 becomes s^(1-p) w_t^p. The derivative of
        k3 = r - 1 - log r with r = exp(ref - logprob) is 1 - r.
    """
    new, old = np.asarray(logprobs, np.float64), np.asarray(old_logprobs, np.float64)
    keep = np.asarray(mask, np.bool_)
    adv = np.asarray(advantages, np.float64)
    adv = np.broadcast_to(adv[:, None], new.shape) if adv.ndim == 1 else adv
    turns = None if turn_ids is None else np.asarray(turn_ids, np.int64)
    settings = ClipSettings(**options)
    ratio = _ratio(new - old, keep, turns, settings)
    token_ratio = np.exp(np.clip(new - old, -20, 20), where=keep, out=np.ones(new.shape))
    rho = _or(importance_weights, np.ones(new.shape))
    ref, age = _or(reference_logprobs, new), _or(ages, np.zeros(new.shape))
    gradient, kl = np.zeros(new.shape), np.zeros(new.shape)
    clipped = np.zeros(new.shape, np.bool_)
    objective = 0.0
    for i, t in np.argwhere(keep):
        weight = _weight(keep, i, t, turns, settings)
        s, a = ratio[i, t], adv[i, t]
        bound = _bound(s, a, settings, (1 + age[i, t]) ** settings.clip_staleness)
        carrier = s ** (1 - settings.ratio_mean) * token_ratio[i, t] ** settings.ratio_mean
        if settings.positives == "unweighted" and a > 0:
            carrier = 1.0
        clipped[i, t] = bound is not None
        value = carrier * a if bound is None else bound * a
        log_r = np.clip(ref[i, t] - new[i, t], -20, 20)
        r = np.exp(log_r)
        kl[i, t] = r - 1 - log_r
        objective += weight * (rho[i, t] * value - settings.kl_coef * kl[i, t])
        slope = 0.0 if clipped[i, t] else rho[i, t] * carrier * a
        gradient[i, t] = -weight * (slope - settings.kl_coef * (1 - r))
    return ReferenceOutput(
        loss=-float(objective), gradient=gradient, ratio=ratio, clipped=clipped, kl=kl
    )


def truncated_importance_weights(
    old_trainer_logprobs: ArrayLike, engine_logprobs: ArrayLike, *, cap: float = 2.0
) -> FloatArray:
    """Computes min(rho, cap) with rho = pi_old(trainer) / pi_rollout(engine), any shape.

    Source:
        arXiv 1802.01561, eq. 1 (rho-bar).
    """
    old, engine = (np.asarray(a, np.float64) for a in (old_trainer_logprobs, engine_logprobs))
    rho: FloatArray = np.exp(np.clip(old - engine, -20, 20))
    return np.minimum(rho, cap)


def _or(values: ArrayLike | None, default: FloatArray) -> FloatArray:
    return default if values is None else np.asarray(values, np.float64)


def _weight(
    keep: BoolArray, i: int, t: int, turns: IntArray | None, settings: ClipSettings
) -> float:
    """Returns the weight of token t of sequence i in the loss."""
    sequences = int(keep.any(axis=1).sum())
    if settings.aggregation == "turn_mean":
        assert turns is not None
        own = turns[i, keep[i]]
        return float(1 / ((own == turns[i, t]).sum() * len(set(own.tolist())) * sequences))
    counts = {
        "sequence_mean": keep[i].sum() * sequences,
        "token_mean": keep.sum(),
        "token_sum": settings.max_tokens * sequences,
    }
    return float(1 / counts[settings.aggregation])


def _bound(s: float, a: float, settings: ClipSettings, widening: float) -> float | None:
    """Returns the bound that replaces s in min(s a, clip(s) a), or None if s itself stays."""
    if settings.dual_clip and a < 0 and s > settings.dual_clip:
        return settings.dual_clip
    if settings.positives != "clipped" and a > 0:
        return None
    bounded = min(max(s, 1 - widening * settings.clip_low), 1 + widening * settings.clip_high)
    return bounded if bounded * a < s * a else None


def _ratio(
    log_ratio: FloatArray, keep: BoolArray, turns: IntArray | None, settings: ClipSettings
) -> FloatArray:
    """Computes the power mean of the token ratios of each token's segment; eq. 7 for power 0."""
    level, power = settings.ratio_level, settings.ratio_mean
    if level == "turn" and turns is None:
        raise BatchError("ratio_level is 'turn' without turn_ids; expected the turn of each token")
    ratio = np.ones(keep.shape)
    for i, t in np.argwhere(keep):
        reaching = keep[i].copy()
        if level == "token":
            reaching = np.arange(len(reaching)) == t
        elif level == "turn" and turns is not None:
            reaching &= turns[i] == turns[i, t]
        own = log_ratio[i, reaching]
        if power:
            ratio[i, t] = np.mean(np.exp(np.clip(own, -20, 20)) ** power) ** (1 / power)
        else:
            ratio[i, t] = np.exp(np.clip(own.mean(), -20, 20))
    return ratio
