"""Recipes for a given model, which imitates demonstrations before it is trained with GSPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Interval

from gspo_env.errors import ConfigError
from gspo_env.recipes.base import Recipe
from gspo_env.settings import settings

LOOKS = 4
"""Steps of an imitation whose weights are compared, if they are chosen by pass@k."""


@settings
class Imitate(Recipe):
    """A given model imitates demonstrations first: with its LoRA adapter if it gets one."""

    conversations: str = ""
    """File of conversations to imitate in place of episodes: JSON lines in chat form, such as
    `gspo-env capture` writes."""
    teacher: str = "expert"
    """Who plays the episodes to imitate: `expert`, the environment's own `expert_action`; `self`,
    the model before training; or another model, as `--model` takes it."""
    demonstrations: Annotated[int, Ge(1)] = 256
    """Episodes that the teacher plays."""
    slips: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Probability that an action of the expert is wrong."""
    min_reward: float | None = None
    """Imitate only conversations, or episodes, with at least this reward. By default these are all
    of a file and of the expert, and the successful ones of a model."""
    imitation_steps: Annotated[int, Ge(0)] = 100
    """Steps of maximum likelihood."""
    imitation_batch: Annotated[int, Ge(1)] = 16
    """Conversations or episodes of a step."""
    imitation_learning_rate: Annotated[float, Gt(0)] = 1e-5
    """Largest learning rate. A LoRA adapter needs about ten times that of a whole model."""
    imitation_pass_at: Annotated[int, Ge(0)] = 0
    """k by whose pass@k the weights are chosen: after each quarter of the steps, k episodes of as
    many training tasks as `eval_tasks` are played, and the best weights are kept. With 0 the last
    weights are."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if self.conversations and self.teacher != "expert":
            raise ConfigError(
                f"teacher is {self.teacher!r} and conversations {self.conversations!r}; expected "
                "one of them to imitate"
            )
        if self.slips and (self.conversations or self.teacher != "expert"):
            raise ConfigError(
                f"slips is {self.slips}, and no expert plays; expected 0, or --teacher expert"
            )

        if self.imitation_pass_at and 0 < self.imitation_steps < LOOKS:
            raise ConfigError(
                f"imitation_pass_at is {self.imitation_pass_at} and imitation_steps "
                f"{self.imitation_steps}; expected at least {LOOKS} steps, or 0 to keep the last "
                "weights"
            )

    @property
    def demonstrates(self) -> bool:
        """Whether there is anything to imitate."""
        return bool(self.imitation_steps)


@settings
class SmolLM2(Imitate):
    """SmolLM2-135M-Instruct works out stories in words with a calculator, on two CPU cores.

    Its clip range and learning rate are far above the paper's, as for the tiny model: a run of
    minutes has few steps. The rate falls to 0, so the last weights are about as good as the best.
    """

    changes: ClassVar[Mapping[str, Any]] = {
        "model": "smollm2",
        "env": "gspo/Story-v0",
        "steps": 12,
        "tasks_per_step": 8,
        "eval_tasks": 64,
        "eval_every": 4,
        "rollout": {"max_turn_tokens": 40, "max_context": 512, "concurrency": 64},
        "loss": {"clip_low": 0.03, "clip_high": 0.05},
        "learner": {
            "learning_rate": 1e-4,
            "warmup_steps": 2,
            "schedule": "cosine",
            "minibatches": 2,
            "max_grad_norm": 0.03,
            "lora_rank": 16,
        },
    }

    demonstrations: Annotated[int, Ge(1)] = 256
    imitation_steps: Annotated[int, Ge(0)] = 64
    imitation_batch: Annotated[int, Ge(1)] = 8
    imitation_learning_rate: Annotated[float, Gt(0)] = 1e-3
