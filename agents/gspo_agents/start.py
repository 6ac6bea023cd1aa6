"""The model that a recipe makes, and what is known of a run before it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_env.config import Config
from gspo_env.env.base import TextEnvironment
from gspo_env.errors import ConfigError
from gspo_env.tracking.progress import Progress
from gspo_env.types import Episode


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A model that a recipe made."""

    model: Any
    tokenizer: Any
    episodes: list[Episode]
    """What the warm-up imitates."""
    demonstrated: bool
    """Whether the episodes come from the environment's demonstrator."""


def make_start(config: Config, env: TextEnvironment, env_id: str) -> Start:
    """Makes the model of the config's recipe, and shows the progress if that takes long.

    Raises:
        ConfigError: The recipe makes no model.
    """
    recipe, seed = config.recipe, config.seed
    with Progress() as progress:
        show = progress.when_slow()
        made = recipe.build(env, env_id, seed, config.rollout, show)
        if made is None:
            raise ConfigError(
                "model is '' and the recipe makes none; expected a model, or a recipe such as "
                "Config.from_recipe('tiny')"
            )
        model, tokenizer, episodes = made
        demonstrated = bool(episodes)
        if not demonstrated:
            episodes = recipe.babble(env, env_id, seed, show)
    return Start(model=model, tokenizer=tokenizer, episodes=episodes, demonstrated=demonstrated)
