"""What a run starts with: the model that a recipe makes, its score, its learner."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo_env.config import Config, to_toml
from gspo_env.engines import Transformers
from gspo_env.env.base import TextEnvironment
from gspo_env.errors import ConfigError
from gspo_env.importing import load_function
from gspo_env.learner.base import Trainer
from gspo_env.learner.controller import Controller
from gspo_env.learner.learner import Learner
from gspo_env.learner.optimizer import make_optimizer
from gspo_env.learner.ranks import Ranks
from gspo_env.model.check import Way, check_engine, check_model
from gspo_env.model.load import add_adapter, check_targets
from gspo_env.recipes.conversations import read_demonstrations
from gspo_env.recipes.embedded import imitation_samples, warm_up
from gspo_env.rollout.transcript import ChatTokenizer
from gspo_env.tracking.progress import Progress
from gspo_env.tracking.several import check_trackers
from gspo_env.training.launch import plan_of
from gspo_env.types import Episode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A model that a recipe made."""

    model: Any
    tokenizer: Any
    episodes: list[Episode]
    """What the warm-up imitates."""
    undemonstrated: list[str]
    """The environments that have no demonstrator, by the `env_id` of their tasks."""


def make_start(config: Config, envs: Mapping[str, TextEnvironment]) -> Start:
    """Makes the model of the config's recipe, and shows the progress if that takes long.

    Raises:
        ConfigError: The recipe makes no model.
    """
    recipe, seed = config.recipe, config.seed
    with Progress() as progress:
        show = progress.when_slow()
        made = recipe.build(envs, seed, config.rollout, show)
        if made is None:
            raise ConfigError(
                "model is '' and the recipe makes none; expected a model, or a recipe such as "
                "Config.from_recipe('tiny')"
            )
        model, tokenizer, episodes = made
        shown = {episode.task.env_id for episode in episodes}
        talks = bool(episodes) and not shown & envs.keys()  # conversations of no environment
        without = [] if talks else [env_id for env_id in envs if env_id not in shown]
        if without:
            episodes += recipe.babble({env_id: envs[env_id] for env_id in without}, seed, show)
    return Start(model=model, tokenizer=tokenizer, episodes=episodes, undemonstrated=without)


def read_talks(config: Config, chat: ChatTokenizer, env_id: str) -> list[Episode]:
    """Returns the conversations that a given model imitates before it is trained.

    Raises:
        ConfigError: They cannot be read.
    """
    recipe = config.recipe
    return read_demonstrations(recipe.conversations, recipe.min_reward, chat, env_id)


def with_adapter(model: Any, config: Config) -> Any:
    """Returns the model with the LoRA adapter of the config."""
    settings = config.learner
    alpha, targets = settings.lora_alpha, settings.lora_targets
    return add_adapter(model, settings.lora_rank, config.seed, alpha=alpha, targets=targets)


def check_learning(model: Any, config: Config) -> None:
    """Tries what only training needs before a folder is made: trackers, optimiser and adapter.

    Raises:
        ConfigError: A tracker's address does not answer, or the optimiser cannot be made.
        MissingExtraError: The optimiser needs a package that is not installed.
        ModelError: The model cannot have the adapter.
    """
    check_trackers(config.tracker)
    settings = config.learner
    if settings.lora_rank and not hasattr(model, "disable_adapter"):
        check_targets(model, settings.lora_targets)
    if ":" in settings.optimizer and settings.lora_rank:  # it trains weights that are made later
        load_function(settings.optimizer, "optimizer")
    elif settings.optimizer != "adamw":
        make_optimizer(settings, list(model.parameters()))


def imitate(
    model: Any, chat: ChatTokenizer, episodes: list[Episode], config: Config, progress: Progress
) -> None:
    """Trains the model on demonstrations, by the settings of the config's recipe."""
    if not episodes:
        logger.warning("every demonstration plays a held-out task: the model starts untrained")
        return
    settings, most = config.recipe, config.rollout.max_context
    samples = imitation_samples(episodes, chat, most, progress.when_slow())
    if not samples:
        logger.warning("no demonstration fits rollout.max_context %d: none is imitated", most)
        return
    total = settings.imitation_steps

    def show(step: int, loss: float) -> None:
        if step % 20 == 0 or step == total:
            progress.update(phase="imitation", step=step, total=total, loss=loss)

    warm_up(model, samples, settings, config.seed, show)


def check_way(model: Any, config: Config) -> Way:
    """Decides how the model is run; says so if the slower way is needed."""
    decide = check_engine if isinstance(config.engine, Transformers) else check_model
    return decide(model, max_context=config.rollout.max_context).way


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
