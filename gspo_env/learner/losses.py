"""The losses of GSPO, GSPO-token, GRPO and Dr. GRPO: classes to choose from, and pure functions.

Axis letters: B sequences, T tokens, N model tokens (those that the policy sampled), S segments.
PyTorch is imported when a loss is computed, so that configs and `--help` stay fast.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Interval

from gspo_env.errors import BatchError, ConfigError
from gspo_env.settings import settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this size before `exp`, so that no ratio overflows."""
RatioLevel = Literal["sequence", "turn", "token"]
Aggregation = Literal["sequence_mean", "turn_mean", "token_mean", "token_sum"]
Correction = Literal["none", "truncated", "mask"]
OldLogprobs = Literal["trainer", "engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveOutput:
    """The loss and its parts: (B, T) from `policy_loss`, (N,) from `packed_policy_loss`.

    A user's loss may leave out the parts; the metrics of missing parts are not logged.
    """

    loss: Tensor
    """Scalar; the only field with a gradient."""
    ratio: Tensor | None = None
    """The importance ratio of each token, 1 if the mask is false."""
    clipped: Tensor | None = None
    """True on the tokens whose policy gradient the clip blocks."""
    kl: Tensor | None = None
    """The k3 estimate of KL(policy, reference) of each token; None without a reference."""


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
    """Log-probabilities as the engine reported them; None if unknown."""
    ages_N: Tensor | None = None
    """Updates of the weights since each token was sampled; None if unknown."""
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


@settings
class AggregationSettings:
    """How a loss reduces the objectives of tokens to one number."""

    aggregation: Aggregation = "sequence_mean"
    """Mean over an episode's tokens, then over episodes; mean over a turn's tokens, then over the
    episode's turns, then over episodes (FACTOR, arXiv 2608.07118); mean over all tokens of a
    minibatch (DAPO, arXiv 2503.14476); or sum over tokens divided by `max_tokens`, then mean over
    episodes (Dr. GRPO, arXiv 2503.20783)."""
    max_tokens: Annotated[int, Ge(1)] = 1024
    """The constant that `token_sum` divides by, such as the most tokens of an episode. The other
    aggregations ignore it."""


@settings
class ClipSettings(AggregationSettings):
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
    positives: Literal["clipped", "unclipped", "unweighted"] = "clipped"
    """Tokens with an advantage above 0: their ratio is clipped above, or has no upper bound, or
    counts as 1, as in UP-GRPO. The clip of negative advantages stays."""
    clip_staleness: Annotated[float, Interval(ge=-3, le=3)] = 0.0
    """Power a: `clip_low` and `clip_high` are multiplied by (1 + age)^a, where the age of a token
    is the number of updates since it was sampled. Below 0, stale tokens have a narrower range."""
    dual_clip: Annotated[float, Ge(0)] = 0.0
    """The ratio's upper bound for negative advantages, above 1 + clip_high; 0 sets none."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the k3 KL to the reference: the initial model, with its adapter turned off or as a
    frozen copy. 0 computes no KL."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        high = 1 + self.clip_high
        if self.dual_clip and self.dual_clip <= high:
            raise ConfigError(f"dual_clip is {self.dual_clip!r}; expected 0 or above {high}")
        if self.ratio_mean and self.ratio_level == "token":
            raise ConfigError(
                f"ratio_mean is {self.ratio_mean!r} with ratio_level 'token'; expected 0, because "
                "a single token has no mean to take"
            )


@settings
class ClippedLoss(ClipSettings, Loss):
    """The clipped policy loss; see `gspo_env.learner.policy_loss`."""

    old_logprobs: OldLogprobs = "trainer"
    """Whose log-probabilities are pi_old. The engine's save a forward pass, but then a mismatch
    enters the ratio."""
    correction: Literal["auto", "none", "truncated", "mask"] = "auto"
    """Importance weights for the train/inference mismatch; only with the trainer's pi_old. `auto`
    is `truncated` if `supply.max_staleness` is above 0, else `none`."""
    correction_cap: Annotated[float, Ge(1)] = 2.0
    """The largest correction weight C."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        super().__post_init__()
        if self.resolved_correction != "none" and self.old_logprobs == "engine":
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
        return self.old_logprobs == "engine" or self.resolved_correction != "none"

    @property
    def resolved_correction(self) -> Correction:
        """The correction, `none` where it is `auto`; see `decide_correction`."""
        return "none" if self.correction == "auto" else self.correction

    @property
    def clip_range(self) -> tuple[float, float]:
        """The bounds of the ratio, for tokens of the newest weights."""
        high = 1 + self.clip_high if self.positives == "clipped" else math.inf
        return 1 - self.clip_low, high

    def mismatch_weights(self, inputs: LossInput) -> Tensor | None:
        """Returns the weight (N,) of each token's objective; None if all are 1."""
        if self.resolved_correction == "none" or inputs.engine_logprobs_N is None:
            return None
        from gspo_env.learner.mismatch import importance_weights

        return importance_weights(
            inputs.old_logprobs_N,
            inputs.engine_logprobs_N,
            inputs.episode_N,
            kind=self.resolved_correction,
            cap=self.correction_cap,
            num_sequences=inputs.num_episodes,
        )

    def compute(self, inputs: LossInput) -> ObjectiveOutput:
        """Computes the loss of a microbatch."""
        return packed_policy_loss(
            inputs.logprobs_N,
            inputs.old_logprobs_N,
            inputs.advantages_N,
            inputs.episode_N,
            num_sequences=inputs.num_episodes,
            turn_ids_N=inputs.turn_N,
            num_turns=inputs.num_turns,
            reference_logprobs_N=inputs.reference_logprobs_N,
            importance_weights_N=self.mismatch_weights(inputs),
            ages_N=inputs.ages_N,
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


@settings
class GSPO(ClippedLoss):
    """Group sequence policy optimisation: one ratio an episode; arXiv 2507.18071."""


@settings
class GRPO(ClippedLoss):
    """Group relative policy optimisation: one ratio a token; arXiv 2402.03300."""

    ratio_level: RatioLevel = "token"
    clip_low: Annotated[float, Interval(ge=0, lt=1)] = 0.2
    clip_high: Annotated[float, Ge(0)] = 0.27


@settings
class DrGRPO(GRPO):
    """GRPO whose loss is not divided by an episode's own length; arXiv 2503.20783."""

    aggregation: Aggregation = "token_sum"


def packed_policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_ids_N: Tensor,
    *,
    num_sequences: int,
    turn_ids_N: Tensor | None = None,
    num_turns: int | None = None,
    reference_logprobs_N: Tensor | None = None,
    importance_weights_N: Tensor | None = None,
    ages_N: Tensor | None = None,
    normaliser: float | None = None,
    **options: Any,
) -> ObjectiveOutput:
    """Computes the clipped policy loss of the model tokens alone; training uses this one.

    The arguments are those of `policy_loss`. `normaliser` is the denominator of the aggregation:
    the number of non-empty sequences, or of model tokens for `token_mean`. Microbatches that pass
    the count of the whole minibatch have losses that add up to its loss. All tokens of a sequence
    have to be in one microbatch.

    Shapes:
        Every tensor: (N,). `sequence_ids_N` in [0, num_sequences), `turn_ids_N` in [0, num_turns),
        or at least 0 without `num_turns`; it saves a wait for a GPU. Ids are checked on a CPU only.

    Raises:
        BatchError: Shapes do not fit together, or a needed argument is missing.
        ConfigError: An option is invalid.

    Source:
        arXiv 2507.18071, eq. 5, 7, 13 and 14; dual clip: arXiv 1912.09729; `token_mean`:
        arXiv 2503.14476; `token_sum`: arXiv 2503.20783; `ratio_mean`: arXiv 2605.12058, eq. 1 to 3;
        `turn_mean`, `positives` and `clip_staleness`: the equations of docs/learner.md.
    """
    settings = ClipSettings(**options)
    check_shapes(
        logprobs_N.shape,
        old_logprobs_N=old_logprobs_N,
        advantages_N=advantages_N,
        sequence_ids_N=sequence_ids_N,
        turn_ids_N=turn_ids_N,
        reference_logprobs_N=reference_logprobs_N,
        importance_weights_N=importance_weights_N,
        ages_N=ages_N,
    )
    check_ids("sequence_ids_N", sequence_ids_N, num_sequences)
    segments_N, count = _segments(
        sequence_ids_N, num_sequences, settings.ratio_level, turn_ids_N, num_turns
    )
    dtype = wide_dtype(logprobs_N)  # bf16 and fp16 round exp(3e-4) to exactly 1
    lp_N, adv_N = logprobs_N.to(dtype), advantages_N.detach().to(dtype)
    log_ratio_N = lp_N.detach() - old_logprobs_N.detach().to(dtype)
    log_s_N, log_carrier_N = _log_ratios(log_ratio_N, segments_N, count, settings.ratio_mean)
    if settings.positives == "unweighted":
        log_carrier_N = log_carrier_N.masked_fill(adv_N > 0, 0.0)
    # a carrier has the gradient of its own token's log-probability; the difference comes first,
    # because (carrier + lp) - lp would round the carrier to the precision of lp
    carrier_N = ((lp_N - lp_N.detach()) + log_carrier_N).exp()
    ratio_N = log_s_N.exp()
    objective_N, clipped_N = _clipped_objective(ratio_N, carrier_N, adv_N, settings, ages_N)
    if importance_weights_N is not None:
        objective_N = objective_N * importance_weights_N.detach().to(dtype)
    kl_N = None
    if reference_logprobs_N is not None:
        kl_N = _k3(lp_N, reference_logprobs_N)
        if settings.kl_coef:
            objective_N = objective_N - settings.kl_coef * kl_N
        kl_N = kl_N.detach()
    elif settings.kl_coef:
        raise BatchError(
            f"kl_coef is {settings.kl_coef!r} without reference_logprobs; expected both or neither"
        )
    turns = (turn_ids_N, num_turns)
    mean = aggregate(objective_N, sequence_ids_N, num_sequences, settings, normaliser, *turns)
    return ObjectiveOutput(loss=-mean, ratio=ratio_N, clipped=clipped_N, kl=kl_N)


def wide_dtype(values: Tensor) -> torch.dtype:
    """Returns the tensor's dtype, or float32 if it is narrower."""
    import torch

    return torch.promote_types(values.dtype, torch.float32)


def _segments(
    sequence_ids_N: Tensor,
    num_sequences: int,
    ratio_level: RatioLevel,
    turn_ids_N: Tensor | None,
    num_turns: int | None,
) -> tuple[Tensor, int]:
    """Returns the segment (tokens with one common ratio) of each token, and their number."""
    import torch

    if ratio_level == "token":
        return torch.arange(len(sequence_ids_N), device=sequence_ids_N.device), len(sequence_ids_N)
    if ratio_level == "sequence":
        return sequence_ids_N, num_sequences
    if turn_ids_N is None:
        raise BatchError(
            "ratio_level is 'turn' or aggregation 'turn_mean' without turn_ids; expected the turn "
            "of each token"
        )
    check_ids("turn_ids_N", turn_ids_N, num_turns)
    turns = num_turns
    if turns is None:
        turns = int(turn_ids_N.max()) + 1 if len(turn_ids_N) else 1
    return sequence_ids_N.long() * turns + turn_ids_N.long(), num_sequences * turns


def _log_ratios(
    log_ratio_N: Tensor, segments_N: Tensor, count: int, power: float
) -> tuple[Tensor, Tensor]:
    """Computes log s, with s the power mean of a segment's token ratios w, and log carriers.

    s = mean(w^p)^(1/p), and the carrier is s^(1-p) w^p: s itself for the geometric mean, p = 0.
    """
    limit = LOG_RATIO_LIMIT
    if not power:
        log_s_N = segment_mean(log_ratio_N, segments_N, count).clamp(-limit, limit)
        return log_s_N, log_s_N
    log_w_N = log_ratio_N.clamp(-limit, limit)
    geometric_N = segment_mean(log_w_N, segments_N, count)
    # Around the geometric mean, log1p and expm1 keep their precision for small p: the mean of
    # expm1 is small there, and never negative. Ratios of exp(26) would overflow for |p| = 3.
    powers_N = (power * (log_w_N - geometric_N)).clamp(max=4 * limit)
    above_N = segment_mean(powers_N.expm1(), segments_N, count)
    log_s_N = geometric_N + above_N.clamp(min=0).log1p() / power
    return log_s_N, (1 - power) * log_s_N + power * log_w_N


def segment_mean(values_N: Tensor, segments_N: Tensor, count: int) -> Tensor:
    """Returns the mean of each segment, for each of its tokens."""
    sums_S = values_N.new_zeros(count).index_add(0, segments_N, values_N)
    return (sums_S / segment_sizes(segments_N, count).clamp(min=1))[segments_N]


def segment_sizes(segments_N: Tensor, count: int) -> Tensor:
    """Returns the number of tokens of each segment; unlike `bincount`, it waits for no GPU."""
    import torch

    ones_N = torch.ones_like(segments_N, dtype=torch.int64)
    return segments_N.new_zeros(count, dtype=torch.int64).index_add_(0, segments_N, ones_N)


def _clipped_objective(
    ratio_N: Tensor,
    carrier_N: Tensor,
    adv_N: Tensor,
    settings: ClipSettings,
    ages_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes min(s A, clip(s) A) with the carrier's gradient, and whether the clip blocks it."""
    width: Any = 1.0
    if power := settings.clip_staleness:
        if ages_N is None:
            raise BatchError(f"clip_staleness is {power!r} without ages; expected both or neither")
        width = (1 + ages_N.to(ratio_N.dtype)) ** power
    low, high = 1 - width * settings.clip_low, 1 + width * settings.clip_high
    dual_clip = settings.dual_clip
    above_N = (adv_N > 0) & (ratio_N > high) & (settings.positives == "clipped")
    clipped_N = above_N | ((adv_N < 0) & (ratio_N < low))
    objective_N = ratio_N.clamp(low, high).where(clipped_N, carrier_N) * adv_N
    if dual_clip:
        above_N = (adv_N < 0) & (ratio_N > dual_clip)
        objective_N = (dual_clip * adv_N).where(above_N, objective_N)
        clipped_N = clipped_N | above_N
    return objective_N, clipped_N


def _k3(lp_N: Tensor, reference_N: Tensor) -> Tensor:
    """Computes k3 = r - 1 - log r with r = pi_ref / pi; exactly zero if the two agree."""
    log_r_N = (reference_N.detach().to(lp_N.dtype) - lp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_r_N.expm1() - log_r_N


def aggregate(
    objective_N: Tensor,
    sequence_ids_N: Tensor,
    num_sequences: int,
    settings: AggregationSettings,
    normaliser: float | None,
    turn_ids_N: Tensor | None = None,
    num_turns: int | None = None,
) -> Tensor:
    """Reduces the objectives of all tokens to one number."""
    if normaliser is not None and not normaliser > 0:
        raise BatchError(f"normaliser is {normaliser!r}; expected a number above 0")
    if settings.aggregation == "token_mean":
        return objective_N.sum() / (max(len(objective_N), 1) if normaliser is None else normaliser)
    lengths_B = segment_sizes(sequence_ids_N, num_sequences)
    count = (lengths_B > 0).sum().clamp(min=1) if normaliser is None else normaliser
    if settings.aggregation == "token_sum":
        return objective_N.sum() / settings.max_tokens / count
    if settings.aggregation == "turn_mean":
        turns_N, size = _segments(sequence_ids_N, num_sequences, "turn", turn_ids_N, num_turns)
        lengths_S = segment_sizes(turns_N, size)
        turns_B = (lengths_S.view(num_sequences, size // max(num_sequences, 1)) > 0).sum(1)
        divisor_N = lengths_S[turns_N] * turns_B[sequence_ids_N]
    else:
        divisor_N = lengths_B[sequence_ids_N]
    return (objective_N * divisor_N.to(objective_N.dtype).reciprocal()).sum() / count


def check_shapes(shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    """Raises `BatchError` if a tensor that is given has another shape."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise BatchError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")


def check_ids(name: str, ids_N: Tensor, count: int | None) -> None:
    """Rejects ids of another type, and on a CPU those out of range.

    Raises:
        BatchError: They are.
    """
    import torch

    if ids_N.dtype not in (torch.int64, torch.int32):
        raise BatchError(f"{name} has dtype {ids_N.dtype}; expected torch.int64 or torch.int32")
    if not len(ids_N) or ids_N.device.type != "cpu":
        return  # reading them would wait for the GPU, whose kernels refuse such an index
    least, most = int(ids_N.min()), int(ids_N.max())
    if least < 0 or (count is not None and most >= count):
        below = "" if count is None else f" and below {count}"
        raise BatchError(f"{name} spans {least} to {most}; expected ids of at least 0{below}")
