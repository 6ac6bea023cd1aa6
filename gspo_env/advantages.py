"""Credit assignment: a group's rewards to one advantage per turn, before any batching.

An estimator maps a `Group` to one (K_i,) array per episode. Episodes that ended in an error or
have no turn enter no statistic and get zeros. Axis letters: G episodes, K turns.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gspo_env.errors import ConfigError
from gspo_env.types import Episode, FloatArray, Group, StopReason

Estimator = Callable[..., Sequence[FloatArray]]

ESTIMATORS: dict[str, Estimator] = {}
"""The estimators that `AdvantageConfig.estimator` may name."""

ENTRY_POINT_GROUP = "gspo_env.advantages"
MIN_SCALE = 1e-8
"""A group whose standard deviation is below this has nothing to compare: its advantages are 0."""
MIN_PEERS = 3
"""The least number of episodes that must reach a turn for a baseline of that turn alone."""


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
    train_on_truncated: bool = True
    """Whether truncated episodes are trained on; they enter the statistics either way."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        if not self.estimator:
            raise ConfigError("estimator is ''; expected a name such as 'returns_to_go'")
        _check_settings(self.gamma, self.ddof)
        _check_choice("baseline", self.baseline, ("mean", "leave_one_out"))
        _check_choice("scale", self.scale, ("std", "none", "batch"))


def register_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Decorator that makes an estimator available under a name."""

    def register(function: Estimator) -> Estimator:
        ESTIMATORS[name] = function
        return function

    return register


@register_estimator("outcome")
def outcome(
    group: Group,
    *,
    baseline: str = "mean",
    scale: str = "std",
    ddof: int = 0,
    score: str = "return",
) -> list[FloatArray]:
    """One advantage for a whole episode: (score - baseline) / scale.

    `score` is the sum of the per-turn rewards (`return`) or `Episode.outcome` (`outcome`).
    Leave-one-out with scale `none` is RLOO; mean with scale `none` is Dr. GRPO.

    Shapes:
        result: one (K_i,) array per episode, constant over its turns.

    Raises:
        ConfigError: A setting is unknown.

    Source:
        GRPO, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783.
    """
    _check_settings(1.0, ddof)
    _check_choice("baseline", baseline, ("mean", "leave_one_out"))
    _check_choice("scale", scale, ("std", "none"))
    _check_choice("score", score, ("return", "outcome"))
    rows, used = _zeros(group), _usable(group)
    if len(used) < 2:
        return rows
    episodes = [group.episodes[i] for i in used]
    scores_G = np.array([e.outcome if score == "outcome" else e.rewards.sum() for e in episodes])
    centred_G = scores_G - scores_G.mean()
    std = _std(centred_G, ddof)
    if std < MIN_SCALE:
        return rows
    if baseline == "leave_one_out":
        # r_i minus the mean of the others is the mean-centred score times n / (n - 1)
        centred_G = centred_G * len(used) / (len(used) - 1)
    for i, value in zip(used, centred_G / (std if scale == "std" else 1.0), strict=True):
        rows[i] += value
    return rows


@register_estimator("returns_to_go")
def returns_to_go(
    group: Group, *, gamma: float = 1.0, scale: str = "std", ddof: int = 0
) -> list[FloatArray]:
    """Each turn's discounted return-to-go against the other episodes at the same turn.

    With turns counted from 1, A_ik = (G_ik - b_ik) / sigma. The baseline b_ik is the mean of G_jk
    over the other episodes j that have a turn k (K_j >= k): a finished episode is not counted as
    zero. Where fewer than 3 episodes, i included, have a turn k, b_ik is the mean of G_jl over
    every turn l of every other episode. sigma pools the deviations over all turns of the group;
    each is taken from its turn's mean (the group's mean where the baseline falls back), so that a
    reward common to all episodes of equal length changes nothing.

    Shapes:
        result: one (K_i,) array per episode.

    Raises:
        ConfigError: A setting is unknown or out of range.

    Example:
        Three episodes with rewards [1, 0], [0, 1] and [0, 0] have returns-to-go [1, 0], [1, 1] and
        [0, 0]; unscaled, the first gets [1 - 1/2, 0 - 1/2].
    """
    _check_settings(gamma, ddof)
    _check_choice("scale", scale, ("std", "none"))
    rows, used = _zeros(group), _usable(group)
    if len(used) < 2:
        return rows
    returns = [_discounted(group.episodes[i].rewards, gamma) for i in used]
    everything = np.concatenate(returns)
    deviations: list[FloatArray] = []
    for k in range(max(map(len, returns))):
        here = [n for n, values in enumerate(returns) if len(values) > k]
        at_k = np.array([returns[n][k] for n in here])
        if len(here) >= MIN_PEERS:
            baselines = (at_k.sum() - at_k) / (len(here) - 1)
            deviations.append(at_k - at_k.mean())
        else:
            others = [_mean_without(everything, returns[n]) for n in here]
            baselines = np.array(others)
            deviations.append(at_k - everything.mean())
        for n, value in zip(here, at_k - baselines, strict=True):
            rows[used[n]][k] = value
    std = _std(np.concatenate(deviations), ddof)
    if std < MIN_SCALE:
        return _zeros(group)
    return [row / std for row in rows] if scale == "std" else rows


def load_estimator(name: str) -> Estimator:
    """Finds an estimator: a registered name, an entry point, or `where:function`.

    Raises:
        ConfigError: Nothing has that name, or it cannot be imported.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" in name:
        return _import_estimator(name)
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    if name in plugins.names:
        loaded: Estimator = plugins[name].load()
        return loaded
    known = sorted({*ESTIMATORS, *plugins.names})
    near = ", ".join(difflib.get_close_matches(name, known) or known)
    raise ConfigError(
        f"estimator is {name!r}; expected one of: {near}, or module:function, or file.py:function"
    )


def estimate(
    groups: Sequence[Group], config: AdvantageConfig
) -> tuple[list[list[FloatArray]], dict[str, float]]:
    """The advantages of every episode of every group, and what to log about them.

    An estimator is handed those of `gamma`, `baseline`, `scale` and `ddof` that its signature has.
    Scale `batch` asks it for scale `none` and divides by the standard deviation over all turns of
    the batch.

    Raises:
        ConfigError: The estimator is unknown, or returned arrays of a wrong shape or value.
    """
    function = load_estimator(config.estimator)
    kwargs = _accepted(function, config)
    rows = [_checked(config.estimator, g, function(g, **kwargs)) for g in groups]
    used = [row[i] for g, row in zip(groups, rows, strict=True) for i in _usable(g)] or [
        np.zeros(1)
    ]
    if config.scale == "batch":
        values = np.concatenate(used)
        std = _std(values - values.mean(), config.ddof)
        divisor = std if std >= MIN_SCALE else np.inf
        rows = [[values / divisor for values in row] for row in rows]
        used = [values / divisor for values in used]
    flat = [all(np.abs(values).max(initial=0) < MIN_SCALE for values in row) for row in rows]
    fallbacks = sum(map(_fallbacks, groups)) if function is returns_to_go else 0
    return rows, {
        "rollout/zero_variance_groups": float(np.mean(flat)) if flat else 0.0,
        "advantages/baseline_fallbacks": float(fallbacks),
        "advantages/rms": float(np.sqrt(np.mean(np.concatenate(used) ** 2))),
    }


def _check_settings(gamma: float, ddof: int) -> None:
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma is {gamma!r}; expected a number in [0, 1]")
    if ddof not in (0, 1):
        raise ConfigError(f"ddof is {ddof!r}; expected 0 or 1")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; expected one of {allowed}")


def _is_usable(episode: Episode) -> bool:
    return bool(episode.turns) and episode.stop_reason is not StopReason.ERROR


def _usable(group: Group) -> list[int]:
    return [i for i, episode in enumerate(group.episodes) if _is_usable(episode)]


def _zeros(group: Group) -> list[FloatArray]:
    return [np.zeros(len(episode.turns)) for episode in group.episodes]


def _std(deviations: FloatArray, ddof: int) -> float:
    return float(np.sqrt((deviations**2).sum() / max(len(deviations) - ddof, 1)))


def _mean_without(everything: FloatArray, own: FloatArray) -> float:
    return float((everything.sum() - own.sum()) / (len(everything) - len(own)))


def _discounted(rewards_K: FloatArray, gamma: float) -> FloatArray:
    returns_K = np.zeros(len(rewards_K))
    total = 0.0
    for k in reversed(range(len(rewards_K))):
        total = rewards_K[k] + gamma * total
        returns_K[k] = total
    return returns_K


def _fallbacks(group: Group) -> int:
    """Turns whose baseline is the group-pooled mean."""
    turns = [len(group.episodes[i].turns) for i in _usable(group)]
    if len(turns) < 2:
        return 0
    reaching = [sum(count > k for count in turns) for k in range(max(turns))]
    return sum(count for count in reaching if count < MIN_PEERS)


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
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


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
        want_shape = (len(episode.turns),)
        if values.shape != want_shape:
            raise ConfigError(
                f"{what} shape {values.shape} for episode {i}; expected {want_shape}, one per turn"
            )
        if not np.isfinite(values).all():
            raise ConfigError(f"{what} {values} for episode {i}; expected finite values")
        rows.append(values)
    return rows


def _import_estimator(name: str) -> Estimator:
    where, _, attribute = name.rpartition(":")
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"estimator is {name!r}; expected an importable place: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        near = ", ".join(difflib.get_close_matches(attribute, public) or sorted(public)) or "none"
        raise ConfigError(f"estimator is {name!r}; expected a function of {where}, such as: {near}")
    loaded: Estimator = function
    return loaded


def _load_file(where: str) -> Any:
    path = Path(where).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
