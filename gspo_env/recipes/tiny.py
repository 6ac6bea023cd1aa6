"""The recipe `tiny`: a model of 0.4 M parameters that learns a tool in minutes on a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Interval

from gspo_env.errors import ConfigError
from gspo_env.recipes.base import Recipe, Show
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.env.base import TextEnvironment
    from gspo_env.rollout.settings import RolloutConfig
    from gspo_env.types import Episode


@settings
class Tiny(Recipe):
    """A tiny Qwen3, built for the environment and warmed up on imperfect demonstrations."""

    changes: ClassVar[Mapping[str, Any]] = {
        "steps": 30,
        "tasks_per_step": 32,
        "rollout": {"max_turn_tokens": 32, "max_context": 512},
        "loss": {"clip_low": 0.03, "clip_high": 0.05},
        "learner": {
            "learning_rate": 4e-4,
            "warmup_steps": 16,
            "schedule": "cosine",
            "max_grad_norm": 0.1,
        },
    }

    hidden_size: Annotated[int, Ge(1)] = 128
    """Width of the model."""
    layers: Annotated[int, Ge(1)] = 2
    """Transformer layers."""
    heads: Annotated[int, Ge(1)] = 4
    """Attention heads."""
    initializer_range: Annotated[float, Ge(0)] = 0.0
    """Standard deviation of the random weights; 0 is 1/√hidden_size, with which a product keeps the
    size of its input (LeCun et al., Efficient BackProp, 1998)."""
    demonstrations: Annotated[int, Ge(1)] = 4000
    """Scripted episodes to imitate; several environments share them equally."""
    slips: Annotated[float, Interval(ge=0, lt=1)] = 0.1
    """Probability that a demonstrated action is wrong."""
    conversations: str = ""
    """File of conversations to imitate in place of scripted episodes: JSON lines in chat form, such
    as `gspo-env capture` writes. The vocabulary has their words."""
    min_reward: float | None = None
    """Imitate only conversations with at least this reward; by default all."""
    imitation_steps: Annotated[int, Ge(0)] = 250
    """Steps of maximum likelihood; 0 skips the warm-up."""
    imitation_batch: Annotated[int, Ge(1)] = 64
    """Episodes of a warm-up step."""
    imitation_learning_rate: Annotated[float, Gt(0)] = 3e-3
    """Largest learning rate of the warm-up."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if self.hidden_size % self.heads or self.hidden_size // self.heads % 2:
            raise ConfigError(
                f"hidden_size is {self.hidden_size} with {self.heads} heads; "
                "expected an even size for each head"
            )
        if self.min_reward is not None and not self.conversations:
            raise ConfigError(
                f"min_reward is {self.min_reward}, and the recipe plays its own demonstrations; "
                "expected none, or a file of conversations"
            )

    @property
    def demonstrates(self) -> bool:
        """Whether a tiny model of an earlier run imitates conversations."""
        return bool(self.conversations)

    def build(
        self, envs: Mapping[str, TextEnvironment], seed: int, limits: RolloutConfig, show: Show
    ) -> Any:
        """Makes the model, its tokenizer and the demonstrations to imitate."""
        from gspo_env.recipes.build import build

        return build(envs, self, seed, limits, show)

    def babble(self, envs: Mapping[str, TextEnvironment], seed: int, show: Show) -> list[Episode]:
        """Makes short random actions to imitate, so that the model learns to end its turns."""
        from gspo_env.recipes.babble import babble

        count = max(1, self.demonstrations // len(envs))
        return [e for n, env in envs.items() for e in babble(env, n, count, seed, show)]
