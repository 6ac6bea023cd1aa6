"""What a given model imitates before the first step, by the settings of its recipe."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gspo_env.recipes import Recipe, teacher
from gspo_env.recipes.conversations import read_demonstrations
from gspo_env.tracking.console import Progress
from gspo_env.types import Episode

if TYPE_CHECKING:
    from gspo_agents.gspo import GSPOAgent


def gather(agent: GSPOAgent) -> list[Episode]:
    """Reads conversations, or lets the teacher of the recipe play training tasks.

    Raises:
        ConfigError: The conversations cannot be read, or an environment has no demonstrator.
        TrainingError: Nothing that the teacher played is good enough.
    """
    config, recipe, environments = agent.config, agent.config.recipe, agent.environments
    if recipe.conversations:
        return read_demonstrations(
            recipe.conversations, recipe.min_reward, agent.chat, agent.env_id
        )
    expert = recipe.teacher == "expert"
    samples = 1 if expert else min(recipe.demonstrations, config.rollout.group_size)
    envs, guard = environments.envs, environments.guard
    tasks = agent.training_tasks(math.ceil(recipe.demonstrations / samples), config.seed)
    if expert:
        with Progress() as progress:
            show = progress.when_slow()
            play, slips = teacher.play_expert, recipe.slips
            episodes = guard(play, envs, tasks, slips, config.rollout, show)
    else:
        player = agent
        if recipe.teacher != "self":
            alone = replace(config, recipe=Recipe(), learner=replace(config.learner, lora_rank=0))
            player = type(agent)(recipe.teacher, config=alone)
        groups = player.evaluate(tasks, samples)
        episodes = [e for group in groups for e in group.episodes if not e.failed and e.turns]
    return [teacher.in_format(e, agent.chat) for e in teacher.keep(recipe, episodes)]
