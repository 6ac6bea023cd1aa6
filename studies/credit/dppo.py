"""A mask of tokens by the change of their probability.

gspo-env train --loss studies/credit/dppo.py:DPPO

It is not a built-in loss: at every drift of `losses_exact.py`, `cispo` has as little bias
or less.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from gspo_env.learner.losses import LossInput
from gspo_env.learner.more_losses import WeightedLoss
from gspo_env.settings import settings


@settings
class DPPO(WeightedLoss):
    """A mask of tokens whose probability has moved far already, instead of a clip of ratios.

    With p = pi(y_t) and q = pi_old(y_t), w_t = r_t, but 0 if A_t > 0 and p - q > `mask_high`, or
    A_t < 0 and p - q < -`mask_low`. The ratio of a rare token may thus be large.

    Source:
        Binary total variation, arXiv 2602.04879; the equation as in prime-rl's default loss, whose
        pi_old is the engine's, without its KL term.

    Example:
        A token with q = 0.5 and p = 0.8 has w = 0 with an advantage above 0, and 1.6 below 0.
    """

    mask_low: Annotated[float, Ge(0)] = 0.2
    """The largest fall of a probability at which negative advantages count."""
    mask_high: Annotated[float, Ge(0)] = 0.2
    """The largest rise of a probability at which positive advantages count."""

    def weigh(self, log_ratio_N: Tensor, inputs: LossInput) -> Tensor:
        """See `WeightedLoss.weigh`."""
        rise_N = inputs.logprobs_N.detach().exp() - inputs.old_logprobs_N.exp()
        high_N = (inputs.advantages_N > 0) & (rise_N > self.mask_high)
        low_N = (inputs.advantages_N < 0) & (rise_N < -self.mask_low)
        return log_ratio_N.exp().masked_fill(high_N | low_N, 0)
