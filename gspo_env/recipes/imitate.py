"""The recipe `imitate`: a given model imitates conversations before it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_env.errors import ConfigError
from gspo_env.recipes.base import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Imitate(Recipe):
    """A given model, whose weights all imitate recorded or hand-written conversations first."""

    conversations: str = ""
    """File of conversations: JSON lines in chat form, such as `gspo-env capture` writes."""
    min_reward: float | None = None
    """Imitate only conversations with at least this reward; by default all."""
    imitation_steps: int = 100
    """Steps of maximum likelihood."""
    imitation_batch: int = 16
    """Conversations of a step."""
    imitation_learning_rate: float = 1e-5
    """Largest learning rate."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if self.imitation_steps < 0 or self.imitation_batch < 1:
            raise ConfigError(
                f"imitation_steps is {self.imitation_steps} and imitation_batch "
                f"{self.imitation_batch}; expected at least 0 and 1"
            )
        if not self.imitation_learning_rate > 0:
            raise ConfigError(
                f"imitation_learning_rate is {self.imitation_learning_rate!r}; expected above 0"
            )
