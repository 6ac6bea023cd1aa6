"""Notices at the start and in the first steps of a run that it learns nothing."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.config import Config
from gspo_env.credit.estimators import compares_episodes
from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.env.registration import make_env
from gspo_env.errors import TrainingError
from gspo_env.registry import name_of
from gspo_env.rollout.failures import close_quietly
from gspo_env.rollout.play import PolicyInput, PolicyOutput, demonstrator, look, play_now
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.trust import changed_files
from gspo_env.types import Episode, Group, StopReason, Task, Turn

logger = logging.getLogger(__name__)

FIRST_STEPS = 3
"""Steps after which a run says that it has learned nothing so far."""
_PROMPTS = 32
"""First prompts that are read before a run."""
_NEARLY_ALL = 0.95
"""Share of successes before training from which their rule is worth a word."""
_EPISODES = 4
"""Episodes that are played to see whether an environment gives advantages of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Why a run learns nothing, or less than its settings say."""

    name: str
    """One word, such as `no_turn`."""
    text: str
    """One sentence with the values and what to change."""
    hopeless: bool = False
    """Whether nothing can be learned in any step."""


def of_settings(config: Config, envs: Mapping[str, TextEnvironment]) -> Iterator[Problem]:
    """Yields what is wrong with settings and environments before anything is played.

    Args:
        config: The settings.
        envs: The environments by the `env_id` of their tasks; a few episodes are played if groups
            have one episode.
    """
    for env_id, env in envs.items():
        if attribute(env, "gives_reward", None) is False:
            key = "rewards" if len(envs) == 1 else f"{env_id}.rewards"
            yield Problem(
                name="no_reward",
                text=f"{env_id} never gives a reward: name reward functions with "
                f"--env-kwargs {key}=file.py:function",
                hopeless=True,
            )
    size, episodes = config.rollout.group_size, config.rollout.group_size * config.tasks_per_step
    estimator = config.advantage
    if size == 1 and compares_episodes(estimator) and not _give_advantages(envs, config):
        yield Problem(
            name="groups_of_one",
            text=f"rollout.group_size is 1, and the estimator {name_of('advantage', estimator)!r} "
            "compares the episodes of a group, so every advantage is 0: expected at least 2",
            hopeless=True,
        )
    if config.learner.minibatches > episodes:
        yield Problem(
            name="minibatches",
            text=f"learner.minibatches is {config.learner.minibatches}, and a step has {episodes} "
            f"episodes (tasks_per_step {config.tasks_per_step}, group_size {size}): an update has "
            "at most one optimiser step for each episode",
        )


def _untrained(env_id: str) -> Problem:
    return Problem(
        name="untrained",
        text=f"{env_id} has no expert_action, so the tiny model starts with random weights and "
        "learns only to end its turns: name a model with --model, or add a demonstrator",
    )


def of_prompts(
    env: TextEnvironment, env_id: str, chat: ChatTokenizer, limits: RolloutConfig
) -> Problem | None:
    """Resets the environment to some tasks; returns a problem if no first prompt fits."""
    tokens: list[int] = []
    for n in range(_PROMPTS):
        task = Task(env_id=env_id, seed=derive_seed("room", n) % HELD_OUT)
        episode = play_now(env, task, look)
        if episode.failed:
            return None  # the rollout counts and reports these
        tokens.append(len(chat.start(episode.final_observation, episode.prompt)))
        if tokens[-1] + limits.max_turn_tokens <= limits.max_context:
            return None
    lengths = " to ".join(map(str, sorted({min(tokens), max(tokens)})))
    return Problem(
        name="no_turn",
        text=f"no episode can have a turn: the first prompts have {lengths} tokens, and "
        f"rollout.max_context {limits.max_context} less rollout.max_turn_tokens "
        f"{limits.max_turn_tokens} leaves {limits.max_context - limits.max_turn_tokens}: raise "
        "max_context or lower max_turn_tokens",
        hopeless=True,
    )


def of_changed_files(folder: Path, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields a problem if a file that settings name differs from when the run was last trained.

    Args:
        folder: Folder of the run.
        settings: Settings that may name files.
    """
    if names := changed_files(folder, settings):
        yield Problem(
            name="changed_file",
            text=f"{', '.join(names)} has changed since this run was last trained: results before "
            "and after may not be comparable",
        )


def of_success(groups: Sequence[Group], when: str = "before training") -> Problem | None:
    """Returns a problem if nearly all episodes succeed only because their outcome is above 0.

    Args:
        groups: Episodes of an evaluation.
        when: When they were played, for the sentence.
    """
    episodes = [e for group in groups for e in group.episodes if not e.failed and e.turns]
    outcomes = [episode.outcome for episode in episodes]
    if not episodes or any(e.turns[-1].info.success is not None for e in episodes):
        return None
    wins = float(np.mean([bool(episode.success) for episode in episodes]))
    if wins < _NEARLY_ALL or min(outcomes) == max(outcomes):
        return None
    return Problem(
        name="success",
        text=f"{wins:.0%} of the episodes count as a success {when}, since no step says "
        f"`success` and an outcome above 0 is one; outcomes go from {min(outcomes):.3g} to "
        f"{max(outcomes):.3g}: return info['success'] on the last step",
    )


def refuse_hopeless(configs: Sequence[Config]) -> None:
    """Refuses settings of runs in the same environments with which nothing can be learned.

    Raises:
        TrainingError: Nothing can be learned, or a run is strict and there is a problem.
    """
    envs: dict[str, TextEnvironment] = {}
    try:
        for member in configs[0].environments:
            envs[member.env_id] = make_env(member.spec, **member.kwargs)
        for config in configs:
            for problem in of_settings(config, envs):
                refuse(problem, config.strict)
    finally:
        for env in envs.values():
            close_quietly(env)


def at_start(
    config: Config,
    envs: Mapping[str, TextEnvironment],
    chat: ChatTokenizer,
    *,
    untrained: Sequence[str],
) -> list[Problem]:
    """Returns why a run would learn nothing, or less than its settings say.

    Args:
        config: The settings.
        envs: The environments by the `env_id` of their tasks; their episodes are played.
        chat: The tokenizer.
        untrained: The environments without demonstrations for a model with random weights.

    Raises:
        TrainingError: Nothing can be learned, or the run is strict and there is a problem.
    """
    found = list(of_settings(config, envs))
    for env_id, env in envs.items():
        found += [_untrained(env_id)] if env_id in untrained else []
        found += filter(None, [of_prompts(env, env_id, chat, config.rollout)])
    for problem in found:
        refuse(problem, config.strict)
    return found


def refuse(problem: Problem, strict: bool) -> None:
    """Raises an error for a problem that a run must not begin or go on with.

    Raises:
        TrainingError: Nothing can be learned, or the run is strict.
    """
    if problem.hopeless:
        raise TrainingError(problem.text)
    if strict:
        raise TrainingError(f"{problem.text} (a warning without --strict)")


@dataclass(slots=True)
class StartupChecks:
    """Watches the first steps of a run."""

    config: Config
    say: Callable[[Problem], None]
    _found: list[dict[str, str]] = field(default_factory=list)
    """The signs of each step that was seen, by name."""

    def report(self, problem: Problem) -> None:
        """Says a problem.

        Raises:
            TrainingError: Nothing can be learned, or the run is strict.
        """
        self.say(problem)
        refuse(problem, self.config.strict)

    def see(
        self,
        step: int,
        groups: Sequence[Group],
        samples: Sequence[Sample],
        metrics: Mapping[str, float],
    ) -> None:
        """Looks at a training step; says after the first steps what all of them had in common.

        Args:
            step: Its number, from 1.
            groups: The groups that were played.
            samples: What the update trained on.
            metrics: What the update measured.

        Raises:
            TrainingError: Nothing can be learned, or the run is strict.
        """
        if step > FIRST_STEPS:
            return
        self._found.append(dict(self._signs(groups, samples, metrics)))
        if step == 1 and "no_turn" in self._found[0]:
            self.report(Problem(name="no_turn", text=self._found[0]["no_turn"], hopeless=True))
        if step < min(FIRST_STEPS, self.config.steps):
            return
        common = [name for name in self._found[-1] if all(name in found for found in self._found)]
        if common:
            count = f"the first {step} steps" if step > 1 else "the first step"
            text = f"in {count}, {self._found[-1][common[0]]}"
            self.report(Problem(name=common[0], text=text))

    def _signs(
        self, groups: Sequence[Group], samples: Sequence[Sample], metrics: Mapping[str, float]
    ) -> Iterator[tuple[str, str]]:
        """Yields what is wrong with a step; the first explains those that follow."""
        limits = self.config.rollout
        episodes = [episode for group in groups for episode in group.episodes]
        turns = [turn for episode in episodes for turn in episode.turns]
        if not turns:
            yield "no_turn", _no_turn(episodes, limits)
        elif all(episode.stop_reason is StopReason.MAX_TURN_TOKENS for episode in episodes):
            yield (
                "all_cut",
                "every episode ended with an action that was cut at rollout.max_turn_tokens "
                f"{limits.max_turn_tokens}, which the environment does not see: raise it, or take "
                "a model that ends its turns",
            )
        flat = not any(np.any(sample.advantages) for sample in samples)
        if samples and flat:
            mean = float(np.mean([episode.rewards.sum() for episode in episodes]))
            yield (
                "no_variance",
                "the episodes of each group had equal rewards (mean return "
                f"{mean:.3g}), so nothing was learned from them: that is normal on hard tasks; "
                f"larger groups (rollout.group_size is {limits.group_size}), other tasks or a "
                "stronger model help",
            )
        if turns and not samples:
            yield (
                "no_token",
                "no sampled token was trained on: every episode was left out, or token_mask is "
                "false everywhere",
            )
        if samples and not flat and metrics.get("train/grad_norm") == 0.0:
            yield (
                "no_gradient",
                "the gradient was 0 although advantages were not: is the model frozen?",
            )


def _no_turn(episodes: Sequence[Episode], limits: RolloutConfig) -> str:
    reasons = sorted({episode.stop_reason for episode in episodes})
    text = f"no episode had a turn: all {len(episodes)} ended by {' or '.join(reasons)}"
    if StopReason.TIMEOUT in reasons:
        text += f" (rollout.episode_timeout is {limits.episode_timeout:g} s)"
    if StopReason.MAX_CONTEXT in reasons:
        room = limits.max_context - limits.max_turn_tokens
        text += f" (rollout.max_context less max_turn_tokens leaves {room} tokens)"
    return f"{text}; expected limits that leave room for an action"


def _give_advantages(envs: Mapping[str, TextEnvironment], config: Config) -> bool:
    """Plays a few episodes; returns whether every environment gives the advantages of tokens."""

    def act(now: PolicyInput) -> PolicyOutput:
        try:
            text = str(demonstrator()(now))
        except NotImplementedError:
            text = "yes"
        return PolicyOutput(text=text, action_ids=(0,) * max(1, len(text.split())))

    def given(turns: Sequence[Turn]) -> bool:
        return any(turn.info.token_advantages is not None for turn in turns)

    def gives(env_id: str, env: TextEnvironment) -> bool:
        tasks = [Task(env_id=env_id, seed=seed) for seed in range(_EPISODES)]
        most = config.rollout.max_turns
        return any(given(play_now(env, task, act, max_turns=most).turns) for task in tasks)

    return all(itertools.starmap(gives, envs.items()))
