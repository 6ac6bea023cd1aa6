"""What a run starts with: its model and demonstrations, engine, collector and learner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gspo_agents.environments import make_pool
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.config import Config, learner_arguments
from gspo_env.engines import Engine, Transformers
from gspo_env.env.base import TextEnvironment
from gspo_env.errors import ConfigError
from gspo_env.learner.learner import Learner
from gspo_env.learner.settings import Trainer, make_optimizer
from gspo_env.model.check import RunMode, check_model
from gspo_env.model.head import is_adapted
from gspo_env.recipes.build import Imitation, imitation_samples
from gspo_env.registry import BUILTIN, load_function, name_of
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.pool import EnvPools
from gspo_env.tracking.console import Progress
from gspo_env.types import Episode

if TYPE_CHECKING:
    from gspo_env.distributed.ranks import Ranks
    from gspo_env.training.checkpoints import CheckpointWriter
    from gspo_env.training.resume import Checkpoint
    from gspo_env.training.start_choice import StartChoice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A model and what it imitates before the first step."""

    model: Any
    tokenizer: Any
    episodes: list[Episode]
    """The demonstrations."""
    undemonstrated: list[str] = field(default_factory=list)
    """The environments that have no demonstrator, by the `env_id` of their tasks."""


def make_start(config: Config, envs: Mapping[str, TextEnvironment]) -> Start:
    """Makes the model of the config's recipe, and shows the progress if that takes long.

    Raises:
        ConfigError: The recipe makes no model.
    """
    recipe, seed = config.recipe, config.seed
    with Progress() as progress:
        show = progress.when_slow()
        start = recipe.build(envs, seed, config.rollout, show)
        if start is None:
            raise ConfigError(
                f"model is '' and the recipe {name_of('recipe', recipe)!r} makes none; expected a "
                "model (--model), or the recipe 'tiny', which makes one"
            )
        model, tokenizer, episodes = start
        shown = {episode.task.env_id for episode in episodes}
        foreign = bool(episodes) and not shown & envs.keys()  # conversations of no environment
        without = [] if foreign else [env_id for env_id in envs if env_id not in shown]
        if without:
            episodes += recipe.babble({env_id: envs[env_id] for env_id in without}, seed, show)
    return Start(model=model, tokenizer=tokenizer, episodes=episodes, undemonstrated=without)


def imitate(
    model: Any,
    chat: ChatTokenizer,
    episodes: list[Episode],
    config: Config,
    progress: Progress,
    writer: CheckpointWriter | None = None,
    checkpoint: Checkpoint | None = None,
    choice: StartChoice | None = None,
) -> None:
    """Trains the model on demonstrations, by the settings of the config's recipe.

    Args:
        model: The model.
        chat: Its tokenizer.
        episodes: The demonstrations.
        config: The settings.
        progress: Shows the steps.
        writer: Saves an imitation that takes long or is stopped.
        checkpoint: Where such an imitation resumes.
        choice: Chooses the weights that it ends with; the last by default.

    Raises:
        KeyboardInterrupt: A signal stopped it.
        OutputError: The checkpoint is damaged.
    """
    if not episodes:
        logger.warning("every demonstration plays a held-out task: the model starts untrained")
        return
    recipe, max_context = config.recipe, config.rollout.max_context
    samples = imitation_samples(episodes, chat, max_context, progress.when_slow())
    if not samples:
        logger.warning(
            "no demonstration fits rollout.max_context %d: none is imitated", max_context
        )
        return
    imitation = Imitation(model, samples, recipe, config.seed, config.learner)
    if checkpoint is not None:
        from gspo_env.training.imitation import restore

        restore(imitation, checkpoint, choice)
    if writer is not None:
        writer.interrupt.graceful = True
    total, slow = recipe.imitation_steps, progress.when_slow(5.0)
    previous = imitation.steps
    while previous < total:
        loss, step = imitation.step(), imitation.steps
        if step < previous:
            progress.line(f"the loss has hardly fallen in {previous} steps: imitation continues")
        previous = step
        if step % 20 == 0 or step == total:
            progress.update("imitation", step, total, loss=loss)
        else:
            slow("imitation", step, total, loss=loss)
        if choice is not None and choice.due(step, total):
            progress.line(choice.look(len(imitation.losses)))
        if writer is not None and writer.due_in_imitation:
            from gspo_env.training.imitation import save

            save(imitation, writer, choice)


def check_learning(model: Any, config: Config, chat: ChatTokenizer) -> None:
    """Tries what only training needs before a folder is made.

    Raises:
        ConfigError: A plug-in does not go with other settings, the estimator's teacher has another
            tokenizer, the optimiser cannot be made, or the
            engine cannot play ahead.
        MissingExtraError: The optimiser needs a package that is not installed.
        ModelError: The model cannot have the adapter.
    """
    config.compaction.check(config, chat)
    config.branching.check(config, chat)
    config.advantage.check(chat)
    if config.supply.max_staleness and name_of("engine", config.engine) not in BUILTIN["engine"]:
        start_engine(model, config, ahead=True).close()
    settings = config.learner
    if settings.lora_rank and not is_adapted(model):
        from gspo_env.model.adapters import adapted_layers

        adapted_layers(model, settings.lora_targets)
    if ":" in settings.optimizer and settings.lora_rank:  # it trains weights that are made later
        load_function(settings.optimizer, "optimizer")
    elif settings.optimizer != "adamw":
        make_optimizer(settings, dict(model.named_parameters()))


def decide_mode(model: Any, config: Config) -> RunMode:
    """Decides how the model is run; warns if the slower way is needed."""
    decide: Any = check_model
    if isinstance(config.engine, Transformers):
        from gspo_env.engines.embedded.start import check_engine

        decide = check_engine
    mode: RunMode = decide(model, max_context=config.rollout.max_context).mode
    return mode


def start_engine(model: Any, config: Config, *, ahead: bool = False) -> Engine:
    """Starts the engine of the config.

    Args:
        model: The model.
        config: The settings.
        ahead: Whether the engine samples while the learner updates its weights.

    Raises:
        ConfigError: The engine has no weights of its own, or undoes updates, and is to sample
            meanwhile.
    """
    settings, limits = config.engine, config.rollout
    if ahead and isinstance(settings, Transformers):
        settings = replace(settings, own_weights=True)
    engine: Engine = settings.start(
        model, max_slots=limits.concurrency, max_context=limits.max_context
    )
    if ahead and not engine.copies:
        engine.close()
        raise ConfigError(
            f"supply.max_staleness is {config.supply.max_staleness}, and the engine "
            f"{name_of('engine', settings)!r} shares the weights of the learner; expected 0, or an "
            "engine with weights of its own (gspo_env.engines.Engine.copies)"
        )
    if ahead and engine.undo_updates:
        engine.close()
        raise ConfigError(
            f"engine.undo_updates is True and supply.max_staleness is "
            f"{config.supply.max_staleness}; expected 0, because episodes that are played ahead "
            "get the weights before they are accepted"
        )
    return engine


@contextmanager
def open_collector(
    config: Config,
    start_engine: Callable[[], Any],
    chat: ChatTokenizer,
    pool: EnvPools,
    vocab_size: int,
) -> Iterator[Collector]:
    """Yields what collects the episodes of a config; ends its workers afterwards.

    Args:
        config: The settings.
        start_engine: Returns the engine.
        chat: Renders the conversations.
        pool: The environments of this process.
        vocab_size: Number of ids of the model.
    """
    limits = config.rollout
    if not limits.ray_workers:
        collector = Collector(start_engine(), chat, pool, limits, vocab_size)
        yield config.compaction.wrap(collector)
        return
    from gspo_env.distributed.ray import open_workers

    make = partial(make_pool, config)
    with open_workers(start_engine, chat, pool, limits, vocab_size, make) as collector:
        yield config.compaction.wrap(collector)


def make_learner(model: Any, config: Config, ranks: Ranks | None = None) -> Trainer:
    """Makes the learner of a run.

    Args:
        model: The model that plays; with several ranks, it gets the weights after each update.
        config: The settings.
        ranks: Those of the run, of which this is the first; None for one process.
    """
    if ranks is not None:
        from gspo_env.distributed.controller import make_controller

        make: Any = make_controller
        controller: Trainer = make(ranks, model, config)
        return controller
    return Learner(model, **learner_arguments(config))
