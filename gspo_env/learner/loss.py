"""The losses that a run can choose: GSPO, GRPO, Dr. GRPO, or a user's class.

Nothing here imports torch until a loss is computed, so that configs and `--help` stay fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Interval

from gspo_env.errors import ConfigError
from gspo_env.registry import check_values

if TYPE_CHECKING:
    from torch import Tensor

    from gspo_env.learner.losses import ObjectiveOutput

RatioLevel = Literal["sequence", "turn", "token"]
Aggregation = Literal["sequence_mean", "token_mean", "token_sum"]
Correction = Literal["none", "truncated", "mask"]
OldLogprobs = Literal["trainer", "engine"]


class ClipOptions(TypedDict, total=False):
    """The names and types of `ClipSettings`, for functions that take them as keywords."""

    ratio_level: RatioLevel
    ratio_mean: float
    clip_low: float
    clip_high: float
    clip_adapt: float
    dual_clip: float
    aggregation: Aggregation
    max_tokens: int
    kl_coef: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInput:
    """The N model tokens of a microbatch, and the counts of the minibatch that it is part of.

    The losses of a minibatch's microbatches are added up: divide sums by `episodes` or `tokens`.
    Every episode is complete. If some of its tokens are in other microbatches, they are here too,
    at the end, without a gradient and with the advantage 0.
    """

    logprobs_N: Tensor
    """Log-probabilities by the policy; the only tensor with a gradient."""
    old_logprobs_N: Tensor
    """Log-probabilities by the policy that sampled the tokens, pi_old."""
    advantages_N: Tensor
    episode_N: Tensor
    """The episode of each token, from 0; it has one ratio, however many sequences it has."""
    turn_N: Tensor
    """The turn of each token in its episode, from 0."""
    reference_logprobs_N: Tensor | None
    """Log-probabilities by the reference; None unless the loss needs them."""
    engine_logprobs_N: Tensor | None
    """Log-probabilities as the engine reported them; None if they are not known."""
    num_episodes: int
    """Episodes of this microbatch."""
    num_turns: int
    """One more than the largest turn of this microbatch."""
    episodes: int
    """Episodes of the whole minibatch."""
    tokens: int
    """Model tokens of the whole minibatch."""


class Loss(ABC):
    """A loss that `Learner` can train with: a frozen dataclass with one method.

    The attributes tell the learner what to compute; override those that differ.
    """

    __slots__ = ()

    @property
    def old_logprobs(self) -> OldLogprobs:
        """Whose log-probabilities are pi_old."""
        return "trainer"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads `reference_logprobs_N`."""
        return False

    @property
    def needs_engine_logprobs(self) -> bool:
        """Whether samples without the engine's log-probabilities are refused."""
        return self.old_logprobs == "engine"

    @property
    def clip_range(self) -> tuple[float, float] | None:
        """The bounds of the ratio, for the metric `train/ratio_outside_clip`; None: no metric."""
        return None

    @abstractmethod
    def compute(self, inputs: LossInput) -> ObjectiveOutput:
        """Computes the loss of a microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings:
    """The settings of the clipped policy loss."""

    ratio_level: RatioLevel = "sequence"
    """One importance ratio for each episode (GSPO), turn, or token (GRPO)."""
    ratio_mean: Annotated[float, Interval(ge=-3, le=3)] = 0.0
    """Power p of the mean over token ratios: 0 is the geometric mean of GSPO, 1 the arithmetic
    mean, and below 0 the smallest ratios weigh most; arXiv 2605.12058, eq. 1."""
    clip_low: Annotated[float, Interval(ge=0, lt=1)] = 3e-4
    """The ratio's lower bound is 1 - clip_low. The defaults are for the paper's large model; the
    ratios of a tiny model move further."""
    clip_high: Annotated[float, Ge(0)] = 4e-4
    """The ratio's upper bound is 1 + clip_high."""
    clip_adapt: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Widens the clip range of a token with a high advantage A and narrows that of a low one: both
    distances are multiplied by 1 + clip_adapt * tanh(A / 2). 0 gives all tokens the same range."""
    dual_clip: Annotated[float, Ge(0)] = 0.0
    """The ratio's upper bound for negative advantages, above 1 + clip_high; 0 sets none."""
    aggregation: Aggregation = "sequence_mean"
    """Mean over an episode's tokens, then over episodes; mean over all tokens of a minibatch
    (DAPO, arXiv 2503.14476); or sum over tokens divided by `max_tokens`, then mean over episodes
    (Dr. GRPO, arXiv 2503.20783)."""
    max_tokens: Annotated[int, Ge(1)] = 1024
    """The constant that `token_sum` divides by, such as the most tokens of an episode. The other
    aggregations ignore it."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the k3 KL to the reference: the initial model, with its adapter turned off or as a
    frozen copy. 0 computes no KL."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        check_values(self)
        high, low = 1 + self.clip_high, self.clip_low * (1 + self.clip_adapt)
        if self.dual_clip and self.dual_clip <= high:
            raise ConfigError(f"dual_clip is {self.dual_clip!r}; expected 0 or above {high}")
        if low >= 1:
            raise ConfigError(
                f"clip_adapt is {self.clip_adapt!r} with clip_low {self.clip_low!r}; expected "
                "clip_low * (1 + clip_adapt) below 1"
            )
        if self.ratio_mean and self.ratio_level == "token":
            raise ConfigError(
                f"ratio_mean is {self.ratio_mean!r} with ratio_level 'token'; expected 0, because "
                "the ratio of a token is no mean"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedLoss(ClipSettings, Loss):
    """The clipped policy loss; see `gspo_env.learner.losses.policy_loss`."""

    old_logprobs: OldLogprobs = "trainer"
    """Whose log-probabilities are pi_old. The engine's save a forward pass, but then a mismatch
    enters the ratio."""
    correction: Literal["auto", "none", "truncated", "mask"] = "auto"
    """Importance weights for the train/inference mismatch; only with the trainer's pi_old. `auto`
    is `truncated` if `supply.max_staleness` is above 0, else `none`."""
    correction_cap: float = 2.0
    """The largest correction weight C."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        ClipSettings.__post_init__(self)  # slots=True makes a new class, which breaks `super()`
        if not self.correction_cap >= 1:
            raise ConfigError(f"correction_cap is {self.correction_cap!r}; expected at least 1")
        if self.decided != "none" and self.old_logprobs == "engine":
            raise ConfigError(
                f"correction is {self.correction!r} with old_logprobs 'engine'; expected 'none', "
                "because the ratio already holds the mismatch"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL term."""
        return self.kl_coef > 0

    @property
    def needs_engine_logprobs(self) -> bool:
        """Whether they are pi_old, or a mismatch with them is corrected."""
        return self.old_logprobs == "engine" or self.decided != "none"

    @property
    def decided(self) -> Correction:
        """The correction, `none` where it is `auto`; see `decide_correction`."""
        return "none" if self.correction == "auto" else self.correction

    @property
    def clip_range(self) -> tuple[float, float]:
        """The bounds of the ratio."""
        return 1 - self.clip_low, 1 + self.clip_high

    def compute(self, inputs: LossInput) -> ObjectiveOutput:
        """Computes the loss of a microbatch."""
        from gspo_env.learner.losses import importance_weights, packed_policy_loss

        weights_N = None
        if self.decided != "none" and inputs.engine_logprobs_N is not None:
            weights_N = importance_weights(
                inputs.old_logprobs_N,
                inputs.engine_logprobs_N,
                inputs.episode_N,
                kind=self.decided,
                cap=self.correction_cap,
                num_sequences=inputs.num_episodes,
            )
        return packed_policy_loss(
            inputs.logprobs_N,
            inputs.old_logprobs_N,
            inputs.advantages_N,
            inputs.episode_N,
            num_sequences=inputs.num_episodes,
            turn_ids_N=inputs.turn_N,
            num_turns=inputs.num_turns,
            reference_logprobs_N=inputs.reference_logprobs_N,
            importance_weights_N=weights_N,
            normaliser=inputs.tokens if self.aggregation == "token_mean" else inputs.episodes,
            **{f.name: getattr(self, f.name) for f in fields(ClipSettings)},
        )


def decide_correction(loss: Any, max_staleness: int) -> Any:
    """Returns the loss of a run, whose `correction` is not `auto`.

    Tokens that older weights sampled have rho = pi_old(trainer) / pi(engine) other than 1, also
    without any mismatch. Where the engine's log-probabilities are pi_old, the ratio has it already.
    """
    if not isinstance(loss, ClippedLoss) or loss.correction != "auto":
        return loss
    stale = max_staleness > 0 and loss.old_logprobs == "trainer"
    return replace(loss, correction="truncated" if stale else "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPO(ClippedLoss):
    """Group sequence policy optimisation: one ratio an episode; arXiv 2507.18071."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveClip(GSPO):
    """One ratio a turn, whose clip range follows the turn's credit.

    The distances of both bounds from 1 are multiplied by c = 1 + clip_adapt * (2 sigmoid(z) - 1),
    which is 1 + clip_adapt * tanh(z / 2). In the paper, z is the turn's information gain,
    normalised over the episodes of the group that have this turn; here it is the turn's advantage.
    The two agree for `normalize_then_accumulate` with `per="turn"`, `scale="std"` and `gamma` 0 if
    the information gain is the turn's reward. With other estimators, `credit.rms` 1 gives
    advantages of the size of z.

    Source:
        A2TGPO, arXiv 2605.06200. We read its abstract and, in an article about its released code,
        the formula and the width 0.3, not the paper's own equation.
    """

    ratio_level: RatioLevel = "turn"
    clip_adapt: float = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(ClippedLoss):
    """Group relative policy optimisation: one ratio a token; arXiv 2402.03300."""

    ratio_level: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.27


@dataclass(frozen=True, kw_only=True, slots=True)
class DrGRPO(GRPO):
    """GRPO whose loss is not divided by an episode's own length; arXiv 2503.20783."""

    aggregation: Aggregation = "token_sum"
