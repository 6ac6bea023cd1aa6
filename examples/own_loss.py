"""A custom loss: a policy gradient that limits the ratio by tanh instead of a clip.

gspo-env train --loss examples/own_loss.py:SquashedRatio
"""

from __future__ import annotations

from dataclasses import dataclass

from gspo_env.errors import ConfigError
from gspo_env.learner import Loss, LossInput, ObjectiveOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class SquashedRatio(Loss):
    """Limits the logarithm of each token ratio by tanh; the loss is the mean over all tokens."""

    bound: float = 0.3
    """Largest log-ratio; the gradient falls smoothly towards it."""

    def __post_init__(self) -> None:
        """Refuses impossible values."""
        if not self.bound > 0:
            raise ConfigError(f"bound is {self.bound!r}; expected a number above 0")

    def compute(self, inputs: LossInput) -> ObjectiveOutput:
        """Computes the loss of a microbatch; the learner adds those of a minibatch."""
        log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
        ratio_N = (self.bound * (log_ratio_N / self.bound).tanh()).exp()
        loss = -(ratio_N * inputs.advantages_N).sum() / inputs.tokens
        return ObjectiveOutput(loss=loss, ratio=ratio_N)
