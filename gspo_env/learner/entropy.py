"""Control of the policy's entropy: a bonus, its adaptive coefficient, and tokens of high entropy.

With H_t the entropy (nats) of the distribution from which token t was sampled, at the temperature
of the rollout, and the M chosen tokens of a minibatch,

    J' = J + c * 1/M sum over chosen t of H_t.

All model tokens are chosen, or with `learner.entropy_share` those whose entropy, before the step,
is not below the quantile 1 - share of the minibatch; the others have the advantage 0. With
`learner.entropy_target` h > 0, c changes after each optimiser step: up by 0.005 if the mean entropy
was at most h, else down, within 0 and 1, and the bonus is added only after such a low mean.

Source:
    Adaptive coefficient: Skywork-OR1, arXiv 2505.22312, with the rule and the numbers of TRL 1.16's
    `use_adaptive_entropy`; tokens of high entropy: arXiv 2506.01939, TRL's `top_entropy_quantile`.

Example:
    With coefficient 0.1 and target 1, a step with the mean entropy 0.8 makes c = 0.105, which the
    next step applies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gspo_env.learner.minibatch import Minibatch
from gspo_env.learner.settings import LearnerConfig

STEP, MOST = 0.005, 1.0
"""By how much an adaptive coefficient changes, and its upper bound."""
_ROUNDING = 1e-5
"""Entropies that differ less are equal, such as those of one prompt in several episodes."""


@dataclass(slots=True)
class EntropyControl:
    """The coefficient of the bonus, which may change."""

    target: float
    coefficient: float
    applies: bool
    """Whether the next step adds the bonus."""

    @classmethod
    def of(cls, config: LearnerConfig) -> EntropyControl:
        """Returns the control of a new run."""
        target = config.entropy_target
        return cls(target=target, coefficient=config.entropy_coef, applies=not target)

    @property
    def weight(self) -> float:
        """The coefficient that a step applies."""
        return self.coefficient if self.applies else 0.0

    def see(self, mean: float) -> None:
        """Adapts the coefficient to the mean entropy of the chosen tokens of a step."""
        if self.target:
            self.applies = mean <= self.target
            changed = self.coefficient + (STEP if self.applies else -STEP)
            self.coefficient = min(max(changed, 0.0), MOST)


def choose_tokens(minibatch: Minibatch, share: float) -> Minibatch:
    """Returns a scored minibatch with the least entropy of a token that is trained."""
    entropies = [m.entropy_N for m in minibatch.microbatches if m.entropy_N is not None]
    entropy_N = torch.cat(entropies)
    floor = float(entropy_N.float().quantile(1 - share)) - _ROUNDING
    count = int((entropy_N >= floor).sum())
    return replace(minibatch, entropy_floor=floor, chosen_tokens=count)
