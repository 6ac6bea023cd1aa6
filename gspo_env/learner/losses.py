"""The clipped objectives of GSPO, GSPO-token, GRPO and Dr. GRPO as pure functions on tensors.

Axis letters: B sequences, T tokens, N model tokens (those that the policy sampled), S segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Unpack, get_args

import torch
from torch import Tensor

from gspo_env.errors import BatchError, ConfigError
from gspo_env.learner.loss import ClipOptions, ClipSettings, Correction, RatioLevel

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this size before `exp`, so that no ratio overflows."""


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


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    turn_ids: Tensor | None = None,
    episode_ids: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    **options: Unpack[ClipOptions],
) -> ObjectiveOutput:
    """Computes the loss of `packed_policy_loss` for padded sequences.

    The options are the fields of `gspo_env.learner.loss.ClipSettings`. What a masked-out slot
    holds, NaN included, changes neither the loss nor its gradient. Sequences without a model token
    do not count. Rows with the same id in `episode_ids` are one sequence in these terms.

    Shapes:
        logprobs, old_logprobs, mask: (B, T); advantages: (B,) or (B, T); turn_ids,
        reference_logprobs, importance_weights: (B, T) if given; episode_ids: (B,) in [0, B) if
        given.

    Raises:
        BatchError: Shapes do not fit together, or a setting is invalid.
    """
    _check_padded(logprobs, advantages, mask)

    def packed(name: str, values: Tensor | None) -> Any:
        _check_shape(name, values, logprobs.shape)
        return None if values is None else values[mask]

    _check_shape("episode_ids", episode_ids, mask.shape[:1])
    rows_N = mask.nonzero()[:, 0]
    output = packed_policy_loss(
        logprobs[mask],
        packed("old_logprobs", old_logprobs),
        advantages[rows_N] if advantages.ndim == 1 else advantages[mask],
        rows_N if episode_ids is None else episode_ids[rows_N],
        num_sequences=len(mask),
        turn_ids_N=packed("turn_ids", turn_ids),
        reference_logprobs_N=packed("reference_logprobs", reference_logprobs),
        importance_weights_N=packed("importance_weights", importance_weights),
        **options,
    )
    return _padded(output, mask)


def _padded(output: ObjectiveOutput, mask: Tensor) -> ObjectiveOutput:
    """Puts the parts of an output where the mask is true; elsewhere no token changes anything."""

    def scattered(values_N: Tensor | None, elsewhere: float) -> Tensor | None:
        if values_N is None:
            return None
        full = torch.full(mask.shape, elsewhere, dtype=values_N.dtype, device=mask.device)
        return full.masked_scatter(mask, values_N)

    return replace(
        output,
        ratio=scattered(output.ratio, 1.0),
        clipped=scattered(output.clipped, False),
        kl=scattered(output.kl, 0.0),
    )


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
    normaliser: float | None = None,
    **options: Unpack[ClipOptions],
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
        BatchError: Shapes do not fit together, or a setting is invalid.

    Source:
        arXiv 2507.18071, eq. 5, 7, 13 and 14; dual clip: arXiv 1912.09729; `token_mean`:
        arXiv 2503.14476; `token_sum`: arXiv 2503.20783; `ratio_mean`: arXiv 2605.12058, eq. 1 to 3;
        `clip_adapt`: arXiv 2605.06200, see `gspo_env.learner.loss.AdaptiveClip`.
    """
    settings = _settings(options)
    shape = logprobs_N.shape
    _check_shape("old_logprobs_N", old_logprobs_N, shape)
    _check_shape("advantages_N", advantages_N, shape)
    _check_shape("sequence_ids_N", sequence_ids_N, shape)
    _check_shape("turn_ids_N", turn_ids_N, shape)
    _check_shape("reference_logprobs_N", reference_logprobs_N, shape)
    _check_shape("importance_weights_N", importance_weights_N, shape)
    _check_ids("sequence_ids_N", sequence_ids_N, num_sequences)
    segments_N, count = _segments(
        sequence_ids_N, num_sequences, settings.ratio_level, turn_ids_N, num_turns
    )
    lp_N, ratio_N, carrier_N = _ratios(
        logprobs_N, old_logprobs_N, segments_N, count, settings.ratio_mean
    )
    adv_N = advantages_N.detach().to(lp_N.dtype)
    objective_N, clipped_N = _clipped_objective(ratio_N, carrier_N, adv_N, settings)
    if importance_weights_N is not None:
        objective_N = objective_N * importance_weights_N.detach().to(lp_N.dtype)
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
    mean = _aggregate(objective_N, sequence_ids_N, num_sequences, settings, normaliser)
    return ObjectiveOutput(loss=-mean, ratio=ratio_N, clipped=clipped_N, kl=kl_N)


def _ratios(
    logprobs_N: Tensor, old_logprobs_N: Tensor, segments_N: Tensor, count: int, power: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the log-probabilities in the loss's dtype, ratios s, and carriers of the gradient.

    A carrier has the value of `_log_ratios` and the gradient of its own token's log-probability.
    """
    # bf16 and fp16 round exp(3e-4) to exactly 1
    dtype = torch.promote_types(logprobs_N.dtype, torch.float32)
    lp_N = logprobs_N.to(dtype)
    log_ratio_N = lp_N.detach() - old_logprobs_N.detach().to(dtype)
    log_s_N, log_carrier_N = _log_ratios(log_ratio_N, segments_N, count, power)
    # The difference first: (carrier + lp) - lp would round the carrier to the precision of lp.
    carrier_N = ((lp_N - lp_N.detach()) + log_carrier_N).exp()
    return lp_N, log_s_N.exp(), carrier_N


def _settings(options: ClipOptions) -> ClipSettings:
    try:
        return ClipSettings(**options)
    except ConfigError as error:
        raise BatchError(str(error)) from error


def importance_weights(
    old_trainer_logprobs_N: Tensor,
    engine_logprobs_N: Tensor,
    sequence_ids_N: Tensor,
    *,
    kind: Correction,
    cap: float = 2.0,
    num_sequences: int | None = None,
) -> Tensor:
    """Weights for the mismatch rho between the trainer's and the engine's sampling policy.

    `truncated` gives each token min(rho, cap). `mask` gives 0 to every token of a sequence whose
    geometric-mean rho leaves [1/cap, cap], 1 to the others. `none` gives 1. Do not use them if the
    engine's log-probabilities are pi_old: the ratio then already contains the mismatch.

    Shapes:
        Every tensor, and the result: (N,).

    Raises:
        BatchError: Shapes do not fit together, the kind is unknown, or the cap is below 1.

    Source:
        Truncated importance sampling as in arXiv 1802.01561 (rho-bar, eq. 1).
    """
    if kind not in get_args(Correction):
        raise BatchError(f"kind is {kind!r}; expected one of {get_args(Correction)}")
    if not cap >= 1:
        raise BatchError(f"cap is {cap!r}; expected a number of at least 1")
    _check_shape("engine_logprobs_N", engine_logprobs_N, old_trainer_logprobs_N.shape)
    _check_shape("sequence_ids_N", sequence_ids_N, old_trainer_logprobs_N.shape)
    dtype = torch.promote_types(old_trainer_logprobs_N.dtype, torch.float32)
    log_rho_N = old_trainer_logprobs_N.detach().to(dtype) - engine_logprobs_N.detach().to(dtype)
    if kind == "none" or not len(log_rho_N):
        return torch.ones_like(log_rho_N)
    if kind == "truncated":
        return log_rho_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    _check_ids("sequence_ids_N", sequence_ids_N, num_sequences)
    count = int(sequence_ids_N.max()) + 1 if num_sequences is None else num_sequences
    mean_N = _segment_mean(log_rho_N, sequence_ids_N, count)
    limit = torch.full((), cap, dtype=dtype, device=mean_N.device).log()
    return (mean_N.abs() <= limit).to(dtype)


def _segments(
    sequence_ids_N: Tensor,
    num_sequences: int,
    ratio_level: RatioLevel,
    turn_ids_N: Tensor | None,
    num_turns: int | None,
) -> tuple[Tensor, int]:
    """Returns the segment (tokens with one common ratio) of each token, and their number."""
    if ratio_level == "token":
        return torch.arange(len(sequence_ids_N), device=sequence_ids_N.device), len(sequence_ids_N)
    if ratio_level == "sequence":
        return sequence_ids_N, num_sequences
    if turn_ids_N is None:
        raise BatchError("ratio_level is 'turn' without turn_ids; expected the turn of each token")
    _check_ids("turn_ids_N", turn_ids_N, num_turns)
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
        log_s_N = _segment_mean(log_ratio_N, segments_N, count).clamp(-limit, limit)
        return log_s_N, log_s_N
    log_w_N = log_ratio_N.clamp(-limit, limit)
    geometric_N = _segment_mean(log_w_N, segments_N, count)
    # Around the geometric mean, log1p and expm1 keep their precision for small p: the mean of
    # expm1 is small there, and never negative. Ratios of exp(26) would overflow for |p| = 3.
    powers_N = (power * (log_w_N - geometric_N)).clamp(max=4 * limit)
    above_N = _segment_mean(torch.expm1(powers_N), segments_N, count)
    log_s_N = geometric_N + torch.log1p(above_N.clamp(min=0)) / power
    return log_s_N, (1 - power) * log_s_N + power * log_w_N


def _segment_mean(values_N: Tensor, segments_N: Tensor, count: int) -> Tensor:
    """Returns the mean of each segment, for each of its tokens."""
    sums_S = values_N.new_zeros(count).index_add(0, segments_N, values_N)
    return (sums_S / segment_sizes(segments_N, count).clamp(min=1))[segments_N]


def segment_sizes(segments_N: Tensor, count: int) -> Tensor:
    """Returns the number of tokens of each segment; unlike `bincount`, it waits for no GPU."""
    zeros_S = segments_N.new_zeros(count, dtype=torch.int64)
    return zeros_S.index_add_(0, segments_N, torch.ones_like(segments_N, dtype=torch.int64))


def _clipped_objective(
    ratio_N: Tensor, carrier_N: Tensor, adv_N: Tensor, settings: ClipSettings
) -> tuple[Tensor, Tensor]:
    """Computes min(s A, clip(s) A) with the carrier's gradient, and whether the clip blocks it."""
    low: Any = 1 - settings.clip_low
    high: Any = 1 + settings.clip_high
    if settings.clip_adapt:
        width_N = 1 + settings.clip_adapt * torch.tanh(adv_N / 2)
        low, high = 1 - settings.clip_low * width_N, 1 + settings.clip_high * width_N
    dual_clip = settings.dual_clip
    clipped_N = ((adv_N > 0) & (ratio_N > high)) | ((adv_N < 0) & (ratio_N < low))
    objective_N = torch.where(clipped_N, ratio_N.clamp(low, high), carrier_N) * adv_N
    if dual_clip:
        above_N = (adv_N < 0) & (ratio_N > dual_clip)
        objective_N = torch.where(above_N, dual_clip * adv_N, objective_N)
        clipped_N = clipped_N | above_N
    return objective_N, clipped_N


def _k3(lp_N: Tensor, reference_N: Tensor) -> Tensor:
    """Computes k3 = r - 1 - log r with r = pi_ref / pi; exactly zero if the two agree."""
    log_r_N = (reference_N.detach().to(lp_N.dtype) - lp_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_r_N) - log_r_N


def _aggregate(
    objective_N: Tensor,
    sequence_ids_N: Tensor,
    num_sequences: int,
    settings: ClipSettings,
    normaliser: float | None,
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
    weight_N = lengths_B.clamp(min=1).to(objective_N.dtype).reciprocal()[sequence_ids_N]
    return (objective_N * weight_N).sum() / count


def _check_padded(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> None:
    if logprobs.ndim != 2:
        raise BatchError(f"logprobs has shape {tuple(logprobs.shape)}; expected (B, T)")
    if mask.dtype != torch.bool:
        raise BatchError(f"mask has dtype {mask.dtype}; expected torch.bool")
    _check_shape("mask", mask, logprobs.shape)
    per_sequence = advantages.ndim == 1
    _check_shape("advantages", advantages, logprobs.shape[:1] if per_sequence else logprobs.shape)


def _check_shape(name: str, tensor: Tensor | None, shape: torch.Size) -> None:
    if tensor is not None and tensor.shape != shape:
        raise BatchError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")


def _check_ids(name: str, ids_N: Tensor, count: int | None) -> None:
    if ids_N.dtype not in (torch.int64, torch.int32):
        raise BatchError(f"{name} has dtype {ids_N.dtype}; expected torch.int64 or torch.int32")
    if not len(ids_N) or ids_N.device.type != "cpu":
        return  # reading them would wait for the GPU, whose kernels refuse such an index
    least, most = int(ids_N.min()), int(ids_N.max())
    if least < 0 or (count is not None and most >= count):
        below = "" if count is None else f" and below {count}"
        raise BatchError(f"{name} spans {least} to {most}; expected ids of at least 0{below}")
