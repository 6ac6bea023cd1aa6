"""Exact signal and noise of estimators on the tabular form of `DensityEnv`.

All turns are played, and the turn alone is the state, so the policy has one softmax over V actions
for each turn. Such problems have far too many groups to list, but an estimator without a divisor is
linear in the rewards: A_ik = b_k + sum over j, l of C[i, k, j, l] r_jl. The coefficients are read
off the estimator's own code, one reward at a time. Rewards are sums of independent sources, so the
mean and the variance of the update follow from moments, without an error of sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_env.batch.padded import bare_episode
from gspo_env.credit.estimators import Estimator
from gspo_env.errors import ConfigError
from gspo_env.types import FloatArray, Group
from studies.credit.exact import TASK, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Density:
    """The tabular form of `DensityEnv`; the noise of an episode is independent of its words.

    Example:
        >>> Density(turns=16, decisions=4).positions
        (2, 6, 10, 14)
    """

    turns: int
    """Turns of every episode, K."""
    decisions: int
    """Turns whose action matters: the right one earns 1 / decisions."""
    noise: float = 0.0
    """A routine turn pays plus or minus this, in units of the reward of a decision."""
    delay: int = 0
    """Turns between a decision and its reward, paid on the last turn at the latest."""
    actions: int = 4
    """Actions of a turn, V; one is right."""
    right: float = 0.25
    """Probability of the right action; the others share the rest. Routine turns are uniform."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        for name, possible, allowed in (
            ("turns", self.turns >= 1, "at least 1"),
            ("decisions", 1 <= self.decisions <= self.turns, f"1 to {self.turns}"),
            ("noise", 0 <= self.noise < math.inf, "at least 0"),
            ("delay", 0 <= self.delay < self.turns, f"0 to {self.turns - 1}"),
            ("actions", self.actions >= 2, "at least 2"),
            ("right", 0 < self.right < 1, "a number between 0 and 1"),
        ):
            if not possible:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected {allowed}")

    @property
    def density(self) -> float:
        """The share of turns that are decisions, rho."""
        return self.decisions / self.turns

    @property
    def positions(self) -> tuple[int, ...]:
        """The turns that are decisions: the middles of equal parts of the episode."""
        return tuple(
            (2 * n + 1) * self.turns // (2 * self.decisions) for n in range(self.decisions)
        )

    def paid(self, turn: int) -> int:
        """Returns the turn that pays for a turn."""
        return min(turn + self.delay, self.turns - 1) if turn in self.positions else turn

    def problem(self) -> Problem:
        """Returns the same problem for `Enumeration`, one token an action.

        Raises:
            ConfigError: There is noise or a delay, which are not part of a tabular state here.
        """
        if self.noise or self.delay:
            raise ConfigError(
                f"noise is {self.noise} and delay {self.delay}; expected 0 and 0, because rewards "
                "of a `Problem` follow from the state and the action"
            )
        after = np.repeat(np.arange(1, self.turns + 1)[:, None], self.actions, axis=1)
        after[-1] = -1
        reward = np.zeros((self.turns, self.actions))
        reward[list(self.positions), 0] = 1 / self.decisions
        return Problem(after=after, reward=reward, tokens=1, vocabulary=self.actions)

    def logits(self) -> FloatArray:
        """Returns the policy for `problem`."""
        rows = np.zeros((self.turns, 1, self.actions))
        rows[list(self.positions), 0] = np.log(self._chance())
        return rows

    def _chance(self) -> FloatArray:
        rest = (1 - self.right) / (self.actions - 1)
        return np.array([self.right] + [rest] * (self.actions - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """The update from one group, against the true gradient of the expected return."""

    snr: float
    """Norm of the expected update, over the root of the trace of the covariance of an update."""
    cosine: float
    """Cosine of the expected update and the true gradient: below 1 is a bias in direction."""
    bias: float
    """Norm of (best-scaled expected update - true gradient), over the norm of the true gradient."""
    length: float
    """Norm of the expected update."""
    noise: float
    """Root of the trace of the covariance of an update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moments:
    """Moments of a turn's source x and of its score psi = d log pi(a) / d logits."""

    mean: float
    variance: float
    cross: FloatArray
    """(V,) E[(x - mean) psi]."""
    score: float
    """E|psi|^2."""
    skew: float
    """E[(x - mean) |psi|^2]."""
    square: float
    """E[(x - mean)^2 |psi|^2]."""


def signal(problem: Density, estimator: Estimator, group_size: int) -> Signal:
    """Computes signal, noise and bias of the update from one group, exactly.

    The update is that of the loss on policy, the mean over episodes of the mean over tokens.

    Args:
        problem: The problem.
        estimator: An estimator that is linear in the rewards.
        group_size: Episodes of a group, G.

    Raises:
        ConfigError: There is one episode, or the estimator is not linear in the rewards, as one
            with a divisor.
    """
    if group_size < 2:
        raise ConfigError(f"group_size is {group_size}; expected at least 2")
    turns, size = problem.turns, group_size
    coefficients, constant_GK = _linear(problem, estimator, size)
    paying = np.zeros((turns, turns))  # [turn that pays, source]
    for turn in range(turns):
        paying[problem.paid(turn), turn] = 1.0
    weight = coefficients @ paying  # (G, K, G, K): of each source in each advantage
    moments = [_moments(problem, turn) for turn in range(turns)]
    means_K = np.array([m.mean for m in moments])
    variance_K = np.array([m.variance for m in moments])
    level_GK = constant_GK + np.einsum("ikjl,l->ik", weight, means_K)
    update, second, true = [], 0.0, []
    for k, at in enumerate(moments):
        own_GG = weight[:, k, :, k]  # of episode j's source at turn k in the advantage of episode i
        own_G = np.diag(own_GG)
        total_G = np.einsum("ijl,l->i", weight[:, k] ** 2, variance_K)
        rest_G = total_G - own_G**2 * at.variance
        same = (
            (level_GK[:, k] ** 2 + rest_G) * at.score
            + own_G**2 * at.square
            + 2 * level_GK[:, k] * own_G * at.skew
        ).sum()
        # episodes i and j: each source has to meet its own score once
        pairs = own_G.sum() ** 2 - (own_G**2).sum() + (own_GG * own_GG.T).sum() - (own_G**2).sum()
        second += same + pairs * float(at.cross @ at.cross)
        update.append(own_G.sum() * at.cross)
        true.append(at.cross)
    share = 1 / (size * turns)
    return _signal(np.concatenate(update) * share, second * share**2, np.concatenate(true))


def slope(x: Sequence[float], y: Sequence[float], confidence: float = 0.95) -> tuple[float, ...]:
    """Fits a line by least squares; returns its slope and the bounds of a t interval.

    The interval measures how far the points are from a line; exact points have no other error.
    """
    from scipy.stats import linregress, t

    fit = linregress(x, y)
    half = float(t.ppf((1 + confidence) / 2, len(x) - 2) * fit.stderr)
    return float(fit.slope), float(fit.slope) - half, float(fit.slope) + half


def _signal(mean: FloatArray, second: float, true: FloatArray) -> Signal:
    length, size = float(np.linalg.norm(mean)), float(np.linalg.norm(true))
    along = float(mean @ true)
    if length < 1e-12 * size:
        mean, length = np.zeros(len(mean)), 0.0  # rounding errors have no direction
    scale = along / length**2 if length else 0.0
    noise = math.sqrt(max(second - length**2, 1e-300))
    return Signal(
        snr=length / noise,
        cosine=along / (length * size) if length else 0.0,
        bias=float(np.linalg.norm(scale * mean - true)) / size,
        length=length,
        noise=noise,
    )


def _moments(problem: Density, turn: int) -> _Moments:
    if turn not in problem.positions:
        variance = (problem.noise / problem.decisions) ** 2
        score = 1 - 1 / problem.actions
        return _Moments(
            mean=0.0,
            variance=variance,
            cross=np.zeros(problem.actions),
            score=score,
            skew=0.0,
            square=variance * score,
        )
    chance_V = problem._chance()
    psi_VV = np.eye(problem.actions) - chance_V
    earned_V = np.zeros(problem.actions)
    earned_V[0] = 1 / problem.decisions
    mean = float(chance_V @ earned_V)
    off_V, norm_V = earned_V - mean, (psi_VV**2).sum(1)
    return _Moments(
        mean=mean,
        variance=float(chance_V @ off_V**2),
        cross=(chance_V * off_V) @ psi_VV,
        score=float(chance_V @ norm_V),
        skew=float(chance_V @ (off_V * norm_V)),
        square=float(chance_V @ (off_V**2 * norm_V)),
    )


def _linear(problem: Density, estimator: Estimator, size: int) -> tuple[FloatArray, FloatArray]:
    """Reads (G, K, G, K) coefficients and (G, K) constants off an estimator."""

    def advantages(rewards_GK: FloatArray) -> FloatArray:
        keys = list(map(str, range(problem.turns)))
        lengths = [1] * problem.turns
        episodes = tuple(bare_episode(TASK, lengths, row, keys) for row in rewards_GK.tolist())
        return np.array(estimator.advantages(Group(task=TASK, episodes=episodes)))

    # around unequal rewards, because an estimator gives zeros where nothing differs
    rng = np.random.default_rng(0)
    base_GK = rng.standard_normal((size, problem.turns))
    at_base = advantages(base_GK)
    coefficients = np.zeros((size, problem.turns, size, problem.turns))
    for turn in range(problem.turns):
        moved_GK = base_GK.copy()
        moved_GK[0, turn] += 1.0
        change_GK = advantages(moved_GK) - at_base
        coefficients[:, :, :, turn] = change_GK[1, :, None]  # no estimator numbers the episodes
        for i in range(size):
            coefficients[i, :, i, turn] = change_GK[0]
    constant_GK = at_base - np.einsum("ikjl,jl->ik", coefficients, base_GK)
    other_GK = rng.standard_normal(base_GK.shape)
    predicted = constant_GK + np.einsum("ikjl,jl->ik", coefficients, other_GK)
    if not np.allclose(advantages(other_GK), predicted, rtol=0, atol=1e-9):
        raise ConfigError(
            f"{type(estimator).__name__} with scale {estimator.scale!r} is not linear in the "
            "rewards; expected an estimator with scale 'none', or use `Enumeration`"
        )
    return coefficients, constant_GK
