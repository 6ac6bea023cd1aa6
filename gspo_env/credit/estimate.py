"""Credit assignment: a group's rewards to advantages, before any batching.

An estimator maps a `Group` to one array per episode: (K_i,), one number a turn, or (N_i,), one a
sampled token. Axis letters: G episodes, K turns, N model tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from gspo_env.credit.estimators import (
    gigpo,
    group_gae,
    normalize_then_accumulate,
    outcome,
    returns_to_go,
    turn_plus_outcome,
)
from gspo_env.credit.registry import (
    ESTIMATORS,
    Estimator,
    load_estimator,
    register_estimator,
)
from gspo_env.credit.statistics import (
    MIN_SCALE,
    check_choice,
    check_settings,
    fallbacks,
    std_of,
    usable,
)
from gspo_env.errors import ConfigError
from gspo_env.types import FloatArray, Group

__all__ = [
    "ESTIMATORS",
    "AdvantageConfig",
    "Estimator",
    "check_estimator",
    "estimate",
    "gigpo",
    "group_gae",
    "load_estimator",
    "normalize_then_accumulate",
    "outcome",
    "register_estimator",
    "returns_to_go",
    "turn_plus_outcome",
]

_WITH_BASELINE = (returns_to_go, turn_plus_outcome, group_gae)
"""The estimators that compare an episode with the others at the same turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """How rewards become advantages."""

    estimator: str = "returns_to_go"
    """A registered name, `module:function` or `path/to/file.py:function`."""
    gamma: float = 1.0
    """Discount per turn, in [0, 1]."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What `outcome` subtracts; `returns_to_go` always leaves one out."""
    scale: Literal["std", "none", "batch"] = "std"
    """Divisor: the group's standard deviation, 1, or the whole batch's standard deviation."""
    ddof: int = 0
    """Delta degrees of freedom of the standard deviation, 0 or 1."""
    rms: float = 0.0
    """Every batch's advantages are scaled to this root mean square over turns; 0 leaves them."""
    args: dict[str, Any] = field(default_factory=dict)
    """The estimator's other arguments, such as `lam=0.9`; JSON values."""
    train_on_truncated: bool = True
    """Whether truncated episodes are trained on; they enter the statistics either way."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        if not self.estimator:
            raise ConfigError("estimator is ''; expected a name such as 'returns_to_go'")
        check_settings(self.gamma, self.ddof)
        if not 0 <= self.rms < float("inf"):
            raise ConfigError(f"rms is {self.rms!r}; expected a number of at least 0")
        check_choice("baseline", self.baseline, ("mean", "leave_one_out"))
        check_choice("scale", self.scale, ("std", "none", "batch"))


def check_estimator(config: AdvantageConfig) -> None:
    """Makes sure, before anything is built, that an estimator exists and takes its arguments.

    Raises:
        ConfigError: It does not.
    """
    _accepted(load_estimator(config.estimator), config)


def estimate(
    groups: Sequence[Group], config: AdvantageConfig
) -> tuple[list[list[FloatArray]], dict[str, float]]:
    """The advantages of every episode of every group, and what to log about them.

    An estimator is handed those of `gamma`, `baseline`, `scale` and `ddof` that its signature has,
    and all of `args`. Scale `batch` asks it for scale `none` and divides by the standard deviation
    over the whole batch.

    Shapes:
        result: for each group, for each episode (K_i,), or (N_i,) where the estimator speaks of
            tokens.

    Raises:
        ConfigError: The estimator is unknown, does not take `args`, or returned arrays of a wrong
            shape or value.
    """
    function = load_estimator(config.estimator)
    kwargs = _accepted(function, config)
    rows = [_checked(config.estimator, g, function(g, **kwargs)) for g in groups]
    used = _used(groups, rows)
    if config.scale == "batch":
        std = std_of(used - used.mean(), config.ddof)
        rows = _times(rows, 1 / std if std >= MIN_SCALE else 0.0)
    rms = float(np.sqrt(np.mean(_used(groups, rows) ** 2)))
    if config.rms and rms >= MIN_SCALE:
        rows, rms = _times(rows, config.rms / rms), config.rms
    flat = [all(np.abs(values).max(initial=0) < MIN_SCALE for values in row) for row in rows]
    count = sum(map(fallbacks, groups)) if function in _WITH_BASELINE else 0
    return rows, {
        "rollout/zero_variance_groups": float(np.mean(flat)) if flat else 0.0,
        "advantages/baseline_fallbacks": float(count),
        "advantages/rms": rms,
    }


def _used(groups: Sequence[Group], rows: Sequence[Sequence[FloatArray]]) -> FloatArray:
    """Every number that will be trained on."""
    values = [row[i] for g, row in zip(groups, rows, strict=True) for i in usable(g)]
    return np.concatenate(values) if values else np.zeros(1)


def _times(rows: Sequence[Sequence[FloatArray]], factor: float) -> list[list[FloatArray]]:
    return [[values * factor for values in row] for row in rows]


def _accepted(function: Estimator, config: AdvantageConfig) -> dict[str, Any]:
    scale = "none" if config.scale == "batch" else config.scale
    offered = {
        "gamma": config.gamma,
        "baseline": config.baseline,
        "scale": scale,
        "ddof": config.ddof,
    }
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return offered | config.args
    own = [name for name in list(parameters)[1:] if name not in offered]
    unknown = [name for name in config.args if name not in own]
    if unknown:
        raise ConfigError(
            f"estimator {config.estimator!r} takes no argument {unknown[0]!r}; "
            f"expected one of: {', '.join(own) or 'none'}"
        )
    return {name: value for name, value in offered.items() if name in parameters} | config.args


def _checked(name: str, group: Group, result: Any) -> list[FloatArray]:
    what = f"estimator {name!r} returned"
    if not isinstance(result, list | tuple):
        raise ConfigError(f"{what} {type(result).__name__}; expected a list of arrays")
    if len(result) != len(group.episodes):
        got, want = len(result), len(group.episodes)
        raise ConfigError(f"{what} {got} arrays; expected {want}, one per episode of the group")
    rows: list[FloatArray] = []
    for i, (row, episode) in enumerate(zip(result, group.episodes, strict=True)):
        try:
            values: FloatArray = np.asarray(row, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{what} {row!r} for episode {i}; expected numbers") from error
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
