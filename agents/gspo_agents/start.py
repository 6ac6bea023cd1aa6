"""The model that a recipe makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_env.config import Config, to_toml, with_score
from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.env.info import declared_score
from gspo_env.errors import ConfigError
from gspo_env.learner.base import Trainer
from gspo_env.learner.controller import Controller
from gspo_env.learner.learner import Learner
from gspo_env.learner.ranks import Ranks
from gspo_env.model.load import add_adapter
from gspo_env.recipes.conversations import read_demonstrations
from gspo_env.rollout.transcript import ChatTokenizer
from gspo_env.tracking.progress import Progress
from gspo_env.training.launch import plan_of
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


def read_talks(config: Config, chat: ChatTokenizer, env_id: str) -> list[Episode]:
    """Returns the conversations that a given model imitates before it is trained.

    Raises:
        ConfigError: They cannot be read.
    """
    recipe = config.recipe
    return read_demonstrations(recipe.conversations, recipe.min_reward, chat, env_id)


def take_score(config: Config, env: TextEnvironment, env_id: str) -> Config:
    """Returns the config with the score that the environment declares, unless it has one.

    Raises:
        ConfigError: The score is `sum`, and the environment declares that it has no outcome.
    """
    config = with_score(config, declared_score(env_id, env))
    if config.credit.score == "sum" and attribute(env, "gives_outcome", None) is False:
        raise ConfigError(f"credit.score is 'sum', but {env_id} gives no outcome; expected 'turns'")
    return config


def with_adapter(model: Any, config: Config) -> Any:
    """Returns the model with the LoRA adapter of the config."""
    settings = config.learner
    alpha, targets = settings.lora_alpha, settings.lora_targets
    return add_adapter(model, settings.lora_rank, config.seed, alpha=alpha, targets=targets)


def make_learner(model: Any, config: Config, ranks: Ranks | None = None) -> Trainer:
    """Makes the learner of a run.

    Args:
        model: The model that plays; with several ranks, it gets the weights after each update.
        config: The settings.
        ranks: Those of the run, of which this is the first; None for one process.
    """
    if ranks is not None:
        return Controller(ranks, model, plan_of(config), to_toml(config))
    return Learner(
        model,
        config.loss,
        config.learner,
        total_steps=config.steps * config.learner.minibatches,
        temperature=config.rollout.temperature,
    )
