"""Further losses, which are imported when they are selected.

Notation: r_t = pi(y_t) / pi_old(y_t) is the ratio of a token, W the product of r_t over the tokens
of an episode, and sg stops the gradient. Each loss of the class `WeightedLoss` has the gradient

    aggregate over tokens of  w_t A_t grad log pi(y_t),

so its equation is that of the weight w_t. `train/loss` is the mean of w_t A_t: some papers'
objectives have another value, with the same gradient.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Interval

from gspo_env.learner.losses import (
    GRPO,
    GSPO,
    LOG_RATIO_LIMIT,
    Aggregation,
    AggregationSettings,
    Loss,
    LossInput,
    ObjectiveOutput,
    OldLogprobs,
    aggregate,
    wide_dtype,
)
from gspo_env.settings import settings

if TYPE_CHECKING:
    from torch import Tensor


@settings
class WeightedLoss(AggregationSettings, Loss):
    """Base class of the losses that weigh the policy gradient of each token."""

    aggregation: Aggregation = "token_mean"
    old_logprobs: OldLogprobs = "engine"
    """Whose log-probabilities are pi_old. With the engine's, the ratio also corrects stale episodes
    and differences between engine and trainer; with the trainer's, nothing does."""

    @abstractmethod
    def weigh(self, log_ratio_N: Tensor, inputs: LossInput) -> Tensor:
        """Returns the weight w_t of each token (N,) from the logarithms of r_t."""

    def compute(self, inputs: LossInput) -> ObjectiveOutput:
        """Computes the loss of a microbatch."""
        lp_N = inputs.logprobs_N.to(wide_dtype(inputs.logprobs_N))
        log_ratio_N = lp_N.detach() - inputs.old_logprobs_N.detach()
        log_ratio_N = log_ratio_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        weight_N = self.weigh(log_ratio_N, inputs)
        # the carrier pi / sg[pi] is 1 and has the gradient of log pi
        objective_N = weight_N * inputs.advantages_N.detach() * (lp_N - lp_N.detach()).exp()
        count = inputs.tokens if self.aggregation == "token_mean" else inputs.episodes
        turns = (inputs.turn_N, inputs.num_turns)
        mean = aggregate(objective_N, inputs.episode_N, inputs.num_episodes, self, count, *turns)
        return ObjectiveOutput(loss=-mean, ratio=log_ratio_N.exp(), clipped=weight_N == 0)


@settings
class SAPO(WeightedLoss):
    """Soft adaptive policy optimisation: a sigmoid gate instead of a clip.

    J is the mean of f(r_t) A_t with f(r) = 4 / tau * sigmoid(tau (r - 1)), so the weight is
    w_t = 4 g (1 - g) r_t with g = sigmoid(tau (r_t - 1)): 1 at r_t = 1, at most 1.6 near r_t = 2,
    and near 0 for ratios that are far from 1.

    Source:
        arXiv 2511.20347; the equation as in TRL's `loss_type="sapo"`.

    Example:
        With tau = 1, a token of ratio 2 has g = sigmoid(1) = 0.731 and the weight 1.573.
    """

    aggregation: Aggregation = "sequence_mean"
    tau_pos: Annotated[float, Gt(0)] = 1.0
    """Temperature tau of tokens with an advantage above 0; a larger one forgets faster."""
    tau_neg: Annotated[float, Gt(0)] = 1.05
    """Temperature tau of all other tokens."""

    def weigh(self, log_ratio_N: Tensor, inputs: LossInput) -> Tensor:
        """See `WeightedLoss.weigh`."""
        ratio_N = log_ratio_N.exp()
        tau_N = ratio_N.new_full((), self.tau_neg).where(inputs.advantages_N <= 0, self.tau_pos)
        gate_N = (tau_N * (ratio_N - 1)).sigmoid()
        return 4 * gate_N * (1 - gate_N) * ratio_N


@settings
class CISPO(WeightedLoss):
    """Clipped importance-sampling weights: no token loses its gradient.

    J is the mean over all tokens of sg[min(r_t, cap)] A_t log pi(y_t): w_t = min(r_t, cap).

    Source:
        MiniMax-M1, arXiv 2506.13585, without a lower bound as there; the cap is that of ScaleRL,
        arXiv 2510.13786, and the equation as in TRL's `loss_type="cispo"`.

    Example:
        With cap 5, tokens of the ratios 0.5 and 7 have the weights 0.5 and 5.
    """

    cap: Annotated[float, Ge(1)] = 5.0
    """The largest weight, 1 + epsilon_high."""

    def weigh(self, log_ratio_N: Tensor, inputs: LossInput) -> Tensor:
        """See `WeightedLoss.weigh`."""
        return log_ratio_N.exp().clamp(max=self.cap)


@settings
class VESPO(WeightedLoss):
    """Variational sequence-level soft policy optimisation: a soft weight of the whole episode.

    J is the mean over all tokens of sg[phi(W)] A_t log pi(y_t), with
    w_t = phi(W) = W^k exp(lambda (1 - W)). W is not the mean of GSPO but the product over all
    tokens: the exact importance weight of the episode, which k = 1 and lambda = 0 apply in full.

    Source:
        arXiv 2602.10693; equation and defaults as in the authors' code and TRL's
        `loss_type="vespo"`.

    Example:
        Two tokens of the ratio 1.1 make W = 1.21; with an advantage above 0, each has the weight
        1.21^2 exp(3 (1 - 1.21)) = 0.780.
    """

    k_pos: Annotated[float, Ge(0)] = 2.0
    """Power k for advantages of at least 0: how much less a token counts if W is below 1."""
    lambda_pos: Annotated[float, Ge(0)] = 3.0
    """Decay lambda for advantages of at least 0: how much less it counts if W is above 1."""
    k_neg: Annotated[float, Ge(0)] = 3.0
    """Power k for negative advantages."""
    lambda_neg: Annotated[float, Ge(0)] = 2.0
    """Decay lambda for negative advantages."""

    def weigh(self, log_ratio_N: Tensor, inputs: LossInput) -> Tensor:
        """See `WeightedLoss.weigh`."""
        sum_E = log_ratio_N.new_zeros(inputs.num_episodes)
        sum_E = sum_E.index_add(0, inputs.episode_N, log_ratio_N)
        log_w_N = sum_E.clamp(math.log(1e-8), LOG_RATIO_LIMIT)[inputs.episode_N]
        positive_N = inputs.advantages_N >= 0
        k_N = log_w_N.new_full((), self.k_pos).where(positive_N, self.k_neg)
        lambda_N = log_w_N.new_full((), self.lambda_pos).where(positive_N, self.lambda_neg)
        return (k_N * log_w_N + lambda_N * (1 - log_w_N.exp())).exp()


@settings
class LUSPO(GSPO):
    """GSPO with the loss of each episode multiplied by its length, so that length adds no bias.

    J = 1/G sum over episodes of |y_i| min(s_i A_i, clip(s_i) A_i). In the token form of GSPO, that
    is the aggregation `token_sum` without its divisor.

    Source:
        arXiv 2602.05261; its clip range, section 5.1.

    Example:
        At ratios of 1, a token of an episode with advantage A has the gradient A / G, however long
        the episode is.
    """

    aggregation: Aggregation = "token_sum"
    max_tokens: Annotated[int, Ge(1)] = 1
    clip_low: Annotated[float, Interval(ge=0, lt=1)] = 2e-3
    clip_high: Annotated[float, Ge(0)] = 2.5e-3


@settings
class IcePop(GRPO):
    """GRPO with a two-sided mask of tokens on which trainer and engine differ.

    With rho_t = pi_old(y_t) / pi_engine(y_t) by the trainer and the engine, the objective of a
    token is multiplied by rho_t if `mask_low` <= rho_t <= `mask_high`, else by 0.

    Source:
        arXiv 2510.18855; as `vllm_importance_sampling_mode="token_mask"` of TRL.

    Example:
        Tokens with rho 0.4, 1.5 and 6 have the weights 0, 1.5 and 0.
    """

    old_logprobs: Literal["trainer"] = "trainer"
    """The mask compares the engine with it."""
    correction: Literal["none"] = "none"
    """The mask is the correction."""
    mask_low: Annotated[float, Ge(0)] = 0.5
    """The smallest rho of a token that is trained."""
    mask_high: Annotated[float, Ge(1)] = 5.0
    """The largest rho of a token that is trained."""

    @property
    def needs_engine_logprobs(self) -> bool:
        """Always: the mask compares with them."""
        return True

    def mismatch_weights(self, inputs: LossInput) -> Tensor | None:
        """See `ClippedLoss.mismatch_weights`."""
        assert inputs.engine_logprobs_N is not None
        rho_N = (inputs.old_logprobs_N - inputs.engine_logprobs_N).detach().exp()
        return rho_N.where((rho_N >= self.mask_low) & (rho_N <= self.mask_high), 0)
