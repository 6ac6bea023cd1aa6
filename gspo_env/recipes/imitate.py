"""The recipe `imitate`: a given model imitates conversations before it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from gspo_env.recipes.base import Recipe
from gspo_env.registry import check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class Imitate(Recipe):
    """A given model, whose weights all imitate recorded or hand-written conversations first."""

    conversations: str = ""
    """File of conversations: JSON lines in chat form, such as `gspo-env capture` writes."""
    min_reward: float | None = None
    """Imitate only conversations with at least this reward; by default all."""
    imitation_steps: Annotated[int, Ge(0)] = 100
    """Steps of maximum likelihood."""
    imitation_batch: Annotated[int, Ge(1)] = 16
    """Conversations of a step."""
    imitation_learning_rate: Annotated[float, Gt(0)] = 1e-5
    """Largest learning rate."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        check_values(self)
