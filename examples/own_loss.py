"""A loss of your own: a policy gradient whose ratio is squashed instead of clipped.

gspo-env train --loss examples/own_loss.py:SquashedRatio
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_env.errors import ConfigError
from gspo_env.learner import Loss, LossInput, ObjectiveOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class SquashedRatio(Loss):
    """Token ratios whose logarithms tanh keeps within a bound; mean over all tokens."""

    bound: float = 0.3
    """Largest log-ratio; the gradient falls smoothly towards it."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        if not self.bound > 0:
            raise ConfigError(f"bound is {self.bound!r}; expected a number above 0")

    def compute(self, inputs: LossInput) -> ObjectiveOutput:
        """Computes the loss of a microbatch; those of a minibatch are added up."""
        log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
        ratio_N = (self.bound * (log_ratio_N / self.bound).tanh()).exp()
        loss = -(ratio_N * inputs.advantages_N).sum() / inputs.tokens
        return ObjectiveOutput(loss=loss, ratio=ratio_N)
