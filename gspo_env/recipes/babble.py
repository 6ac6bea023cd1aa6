"""Random actions to imitate, for an environment that has no demonstrator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspo_env.env.base import TextEnvironment
from gspo_env.recipes.base import Show
from gspo_env.recipes.build import MAX_LOOKS, first_observations
from gspo_env.seeding import derive_seed
from gspo_env.tools.tool import tool_call_frames
from gspo_env.types import Episode, Task, Turn

_BABBLES = 4
"""Episodes of random actions for each task."""


def babble(
    env: TextEnvironment,
    env_id: str,
    count: int,
    seed: int,
    show: Show = lambda phase, step, total: None,
) -> list[Episode]:
    """Makes episodes of one random action, for an environment that has no demonstrator.

    An action consists of words or characters of the first observation, or calls one of the tools
    with them. A model that imitates them ends its turns and uses words that the environment uses.

    Args:
        env: The environment.
        env_id: Its id.
        count: Maximum number of episodes.
        seed: Seed of the tasks and of the actions.
        show: Shows how many tasks were read.
    """
    seeds = (derive_seed("babble", seed, n) for n in range(min(MAX_LOOKS, count)))
    tasks = [Task(env_id=env_id, seed=drawn % 10**9) for drawn in seeds]
    rng = np.random.default_rng(derive_seed("babble", seed))
    episodes = []
    for episode in first_observations(env, tasks, show):
        text = episode.final_observation
        for _ in range(min(_BABBLES, count // len(tasks))):
            action = _random_action(text, episode.prompt.tools, rng)
            turn = Turn(text=action, observation=text, reward=0.0)
            episodes.append(replace(episode, turns=(turn,), final_observation=""))
    return episodes


def _random_action(text: str, tools: Sequence[Any], rng: np.random.Generator) -> str:
    words = re.findall(r"\w+", text) or ["yes"]
    if tools and rng.random() < 0.5:
        opening, *others = tool_call_frames(tools[int(rng.integers(len(tools)))])
        return opening + "".join(str(rng.choice(words)) + frame for frame in others)
    start, length = rng.integers(len(words)), rng.integers(1, 5)
    if rng.random() < 0.5:
        return " ".join(words[start : start + length])
    return "".join(rng.choice(list("".join(words)), length))
