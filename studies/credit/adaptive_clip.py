"""A clip range that follows the credit of each turn.

gspo-env train --loss studies/credit/adaptive_clip.py:AdaptiveClip
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Interval

from gspo_env.errors import ConfigError
from gspo_env.learner import Loss, LossInput, ObjectiveOutput
from gspo_env.learner.losses import segment_sizes
from gspo_env.settings import settings


@settings
class AdaptiveClip(Loss):
    """GSPO with one ratio a turn, whose clip range follows the turn's credit.

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

    clip_adapt: Annotated[float, Interval(ge=0, lt=1)] = 0.3
    """How much the clip range follows the advantage; 0 gives all tokens the same range."""
    clip_low: Annotated[float, Interval(ge=0, lt=1)] = 3e-4
    """The lower bound of a turn without credit is 1 - clip_low."""
    clip_high: Annotated[float, Ge(0)] = 4e-4
    """The upper bound of a turn without credit is 1 + clip_high."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if self.clip_low * (1 + self.clip_adapt) >= 1:
            raise ConfigError(
                f"clip_adapt is {self.clip_adapt!r} with clip_low {self.clip_low!r}; expected "
                "clip_low * (1 + clip_adapt) below 1"
            )

    @property
    def clip_range(self) -> tuple[float, float]:
        """The bounds of the ratio of a turn without credit."""
        return 1 - self.clip_low, 1 + self.clip_high

    def compute(self, inputs: LossInput) -> ObjectiveOutput:
        """Computes the loss of a microbatch."""
        turn_S = inputs.episode_N * inputs.num_turns + inputs.turn_N
        count = inputs.num_episodes * inputs.num_turns
        log_ratio_N = inputs.logprobs_N.detach() - inputs.old_logprobs_N
        sums_S = log_ratio_N.new_zeros(count).index_add(0, turn_S, log_ratio_N)
        log_s_N = (sums_S / segment_sizes(turn_S, count).clamp(min=1))[turn_S].clamp(-20, 20)
        ratio_N = log_s_N.exp()
        carrier_N = (inputs.logprobs_N - inputs.logprobs_N.detach() + log_s_N).exp()
        adv_N = inputs.advantages_N
        width_N = 1 + self.clip_adapt * torch.tanh(adv_N / 2)
        low_N, high_N = 1 - self.clip_low * width_N, 1 + self.clip_high * width_N
        clipped_N = ((adv_N > 0) & (ratio_N > high_N)) | ((adv_N < 0) & (ratio_N < low_N))
        objective_N = adv_N * torch.where(clipped_N, ratio_N.clamp(low_N, high_N), carrier_N)
        lengths_N = segment_sizes(inputs.episode_N, inputs.num_episodes)[inputs.episode_N]
        loss = -(objective_N / lengths_N).sum() / inputs.episodes
        return ObjectiveOutput(loss=loss, ratio=ratio_N, clipped=clipped_N)
