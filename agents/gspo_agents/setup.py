"""What a run starts with: the model that a recipe makes, its score, its learner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.config import Config, learner_arguments
from gspo_env.engines import Engine, Transformers
from gspo_env.env.base import TextEnvironment
from gspo_env.errors import ConfigError
from gspo_env.learner.learner import Learner
from gspo_env.learner.settings import Trainer, make_optimizer
from gspo_env.model.check import RunMode, check_model
from gspo_env.model.load import add_adapter, check_targets
from gspo_env.recipes import build as embedded
from gspo_env.recipes.conversations import read_demonstrations
from gspo_env.registry import BUILTIN, load_function, name_of
from gspo_env.tracking.console import Progress
from gspo_env.tracking.multi import check_trackers
from gspo_env.training.split import Split
from gspo_env.types import Episode

if TYPE_CHECKING:
    from gspo_env.distributed.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A model that a recipe made."""

    model: Any
    tokenizer: Any
    episodes: list[Episode]
    """What the warm-up imitates."""
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


def warm_up(
    made: Start, chat: ChatTokenizer, config: Config, split: Callable[[], Split], progress: Progress
) -> int:
    """Warms up a model on its demonstrations.

    Args:
        made: The model and its demonstrations.
        chat: Its tokenizer.
        config: The settings.
        split: Returns the tasks that are held out.
        progress: Shows the steps.

    Returns:
        The number of demonstrations that were left out because they play held-out tasks.
    """
    if not made.episodes or not config.recipe.imitation_steps:
        return 0
    held = split()
    kept = [e for e in made.episodes if not held.holds_out(e)]
    imitate(made.model, chat, kept, config, progress)
    return len(made.episodes) - len(kept)


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


def check_ranks(config: Config, ranks: Ranks | None) -> None:
    """Checks that the engine of a config can play for several ranks.

    Raises:
        ConfigError: It is vLLM in the process of rank 0, which would wait for the other ranks.
    """
    if ranks is not None and name_of("engine", config.engine) == "vllm":
        raise ConfigError(
            "the engine is 'vllm' and several ranks train: vLLM in the process of a rank takes the "
            "others for its own; expected --engine vllm-server or transformers"
        )


def check_learning(model: Any, config: Config) -> None:
    """Tries what only training needs before a folder is made.

    Raises:
        ConfigError: A tracker's address does not answer, the optimiser cannot be made, or the
            engine cannot play ahead.
        MissingExtraError: The optimiser needs a package that is not installed.
        ModelError: The model cannot have the adapter.
    """
    check_trackers(config.tracker)
    built_in = name_of("engine", config.engine) in BUILTIN["engine"]
    if config.supply.max_staleness and not built_in:  # whether it can is seen when it is started
        start_engine(model, config, ahead=True).close()
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
    samples = embedded.imitation_samples(episodes, chat, most, progress.when_slow())
    if not samples:
        logger.warning("no demonstration fits rollout.max_context %d: none is imitated", most)
        return
    total = settings.imitation_steps

    seen = 0

    def show(step: int, loss: float) -> None:
        nonlocal seen
        if step < seen:
            progress.line(
                f"the loss has hardly fallen in {seen} steps: the imitation goes on longer"
            )
        seen = step
        if step % 20 == 0 or step == total:
            progress.update("imitation", step, total, loss=loss)

    embedded.warm_up(model, samples, settings, config.seed, show)


def check_way(model: Any, config: Config) -> RunMode:
    """Decides how the model is run; says so if the slower way is needed."""
    decide: Any = check_model
    if isinstance(config.engine, Transformers):
        decide = load_function("gspo_env.engines.embedded.start:check_engine", "engine")
    mode: RunMode = decide(model, max_context=config.rollout.max_context).mode
    return mode


def start_engine(model: Any, config: Config, *, ahead: bool = False) -> Engine:
    """Starts the engine of the config.

    Args:
        model: The model.
        config: The settings.
        ahead: Whether the engine samples while the learner updates its weights.

    Raises:
        ConfigError: The engine has no weights of its own, and is to sample meanwhile.
    """
    chosen, limits = config.engine, config.rollout
    if ahead and isinstance(chosen, Transformers):
        chosen = replace(chosen, own_weights=True)
    engine: Engine = chosen.start(
        model, max_slots=limits.concurrency, max_context=limits.max_context
    )
    if ahead and not engine.copies:
        engine.close()
        raise ConfigError(
            f"supply.max_staleness is {config.supply.max_staleness}, and the engine "
            f"{name_of('engine', chosen)!r} shares the weights of the learner; expected 0, or an "
            "engine with weights of its own (gspo_env.engines.Engine.copies)"
        )
    return engine


def make_learner(model: Any, config: Config, ranks: Ranks | None = None) -> Trainer:
    """Makes the learner of a run.

    Args:
        model: The model that plays; with several ranks, it gets the weights after each update.
        config: The settings.
        ranks: Those of the run, of which this is the first; None for one process.
    """
    if ranks is not None:
        make_controller = load_function("gspo_env.distributed.launch:make_controller", "learner")
        controller: Trainer = make_controller(ranks, model, config)
        return controller
    return Learner(model, **learner_arguments(config))
