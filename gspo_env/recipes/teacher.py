"""Episodes for a given model to imitate, played by a demonstrator or by another model."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.env.base import TextEnvironment
from gspo_env.errors import ConfigError, TrainingError
from gspo_env.recipes.base import Show
from gspo_env.recipes.build import LITERAL, MAX_LOOKS, demonstrate, first_observations
from gspo_env.recipes.conversations import action_literal
from gspo_env.recipes.imitate import Imitate
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.tools.calls import parse_message
from gspo_env.types import Episode, Message, Task, Turn

logger = logging.getLogger(__name__)

_AT_ONCE, _MOST_DRAWS = MAX_LOOKS, 64
"""Tasks that are drawn at once, and how often, until enough of them are not held out."""


def training_tasks(
    seed: int,
    envs: Mapping[str, TextEnvironment],
    held_out: Mapping[str, Collection[str]],
    count: int,
) -> list[Task]:
    """Draws tasks of environments, which share them equally, whose keys are not held out.

    Raises:
        TrainingError: Too few tasks are not held out.
    """
    drawn: list[Task] = []
    for place, (env_id, env) in enumerate(envs.items()):
        share = len(range(place, count, len(envs)))
        free = itertools.islice(_draw(seed, env_id, env, held_out.get(env_id, ())), share)
        tasks = list(free)
        if len(tasks) < share:
            raise TrainingError(
                f"{env_id}: all of {_MOST_DRAWS * _AT_ONCE} tasks drawn but "
                f"{len(tasks)} are held out for evaluation; expected lower eval_tasks"
            )
        drawn += tasks
    return drawn


def _draw(
    seed: int, env_id: str, env: TextEnvironment, held_out: Collection[str]
) -> Iterator[Task]:
    for start in range(0, _MOST_DRAWS * _AT_ONCE, _AT_ONCE):
        numbers = range(start, start + _AT_ONCE)
        seeds = [derive_seed("demonstration", seed, n) % HELD_OUT for n in numbers]
        tasks = [Task(env_id=env_id, seed=drawn) for drawn in seeds]
        if held_out:
            looks = first_observations(env, tasks, lambda *_: None)
            tasks = [e.task for e in looks if e.reset.task_key not in held_out]
        yield from tasks


def play_expert(
    envs: Mapping[str, TextEnvironment],
    tasks: Sequence[Task],
    slips: float,
    limits: RolloutConfig,
    show: Show,
) -> list[Episode]:
    """Plays tasks with the environments' own demonstrators.

    Raises:
        ConfigError: An environment has no `expert_action`.
    """
    episodes: list[Episode] = []
    for env_id, env in envs.items():
        mine = [task for task in tasks if task.env_id == env_id]
        try:
            episodes += demonstrate(env, mine, slips, limits, show)
        except NotImplementedError:
            raise ConfigError(
                f"{env_id} has no expert_action to imitate; expected --teacher self or a model, or "
                "--conversations FILE"
            ) from None
    return episodes


def keep(recipe: Imitate, episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the episodes that are good enough to be imitated.

    Raises:
        TrainingError: There is none.
    """
    least, rated = recipe.min_reward, recipe.teacher != "expert"
    if least is None:
        good = [episode for episode in episodes if episode.success or not rated]
        claim = "succeeded"
    else:
        good = [episode for episode in episodes if episode.outcome >= least]
        claim = f"had a reward of at least {least:g}"
    if not good:
        raise TrainingError(
            f"none of the {len(episodes)} episodes of the teacher {recipe.teacher!r} {claim}, so "
            "there is nothing to imitate; expected a lower min_reward, or another teacher"
        )
    if len(good) < len(episodes):
        logger.info("%d of %d episodes of the teacher %s", len(good), len(episodes), claim)
    return good


def in_format(episode: Episode, chat: ChatTokenizer) -> Episode:
    """Returns an episode whose calls are written as the model's own template writes them."""
    turns = [_turn_in_format(turn, episode.prompt.tools, chat) for turn in episode.turns]
    return replace(episode, turns=tuple(turns))


def _turn_in_format(turn: Turn, tools: Sequence[Any], chat: ChatTokenizer) -> Turn:
    message, _ = parse_message(turn.text, tools) if tools else (None, 0)
    if message is None or not message.tool_calls:
        return turn
    before = Message(role="user", content=turn.observation)
    literal = action_literal([before, message], 1, tools, chat)
    if literal == turn.text:
        return turn
    info = replace(turn.info, extra={**turn.info.extra, LITERAL: literal})
    return replace(turn, text=chat.text.to_text(literal), info=info)
