"""Checks that make environments or play episodes before a run; most settings need none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from gspo_env.config import Config
from gspo_env.credit.estimators import GroupEstimator
from gspo_env.credit.scores import ScoreChoice
from gspo_env.env.base import TextEnvironment
from gspo_env.env.registration import label
from gspo_env.errors import ConfigError
from gspo_env.health.findings import Finding
from gspo_env.health.startup import check_settings
from gspo_env.registry import name_of
from gspo_env.rollout.failures import close_quietly
from gspo_env.rollout.play import PolicyInput, PolicyOutput, demonstrator, play_now
from gspo_env.rollout.pool import make_member
from gspo_env.runtime.threads import EnvThread
from gspo_env.types import Episode, Task

_EPISODES = 4
"""Episodes that are played to see whether an environment gives token advantages."""
_TASKS = 16
"""Tasks of which an expert plays one, else there is none."""


def _play(env_id: str, env: TextEnvironment, config: Config) -> list[Episode]:
    """Plays a few episodes; returns those that did not fail."""

    def act(now: PolicyInput) -> PolicyOutput:
        try:
            text = str(demonstrator()(now))
        except NotImplementedError:
            text = "yes"
        return PolicyOutput(text=text, action_ids=(0,) * max(1, len(text.split())))

    tasks = [Task(env_id=env_id, seed=seed) for seed in range(_EPISODES)]
    played = [play_now(env, task, act, max_turns=config.rollout.max_turns) for task in tasks]
    return [episode for episode in played if not episode.failed]


def _has_token_advantages(episodes: Sequence[Episode]) -> bool:
    turns = [turn for episode in episodes for turn in episode.turns]
    return any(turn.info.token_advantages is not None for turn in turns)


def check_comparison(configs: Sequence[Config]) -> None:
    """Checks the settings of runs in the same environments, which are made for it.

    Raises:
        ConfigError: Settings do not go with an environment.
        TrainingError: Nothing can be learned, or a run is strict and there is a finding.
    """
    envs: dict[str, TextEnvironment] = {}
    limits, thread = configs[0].rollout, EnvThread()
    guard = partial(thread.guard, label(configs[0].env), limits.episode_timeout)
    try:
        for member in configs[0].environments:
            envs[member.env_id] = guard(make_member, member, limits)
        for config in configs:
            guard(check_settings, config, envs)
    finally:
        for env in envs.values():
            guard(close_quietly, env)
        thread.stop()


def check_episodes(config: Config, envs: Mapping[str, TextEnvironment]) -> Iterator[Finding]:
    """Yields what is wrong with settings that need something that not every environment gives."""
    played = {env_id: _play(env_id, env, config) for env_id, env in envs.items()}
    for env_id, shown in played.items():
        for episode in shown:
            config.advantage.check_episode(envs[env_id], episode)
            config.compaction.check_episode(envs[env_id], episode)
        if config.credit.score == "sum":
            ScoreChoice(env_id, "sum").see(shown)
    compares = isinstance(config.advantage, GroupEstimator)
    lone = config.rollout.group_size == 1 and compares
    if lone and not all(map(_has_token_advantages, played.values())):
        yield Finding(
            name="groups_of_one",
            text="rollout.group_size is 1, and the estimator "
            f"{name_of('advantage', config.advantage)!r} compares the episodes of a group, so "
            "every advantage is 0.",
            advice="Use at least 2.",
            hopeless=True,
        )


def check_expert(env_id: str, env: TextEnvironment) -> None:
    """Checks that an environment has a demonstrator, which plays the first turn of some tasks.

    Raises:
        ConfigError: It plays none of them.
    """
    reason = None
    for seed in range(_TASKS):
        try:
            play_now(env, Task(env_id=env_id, seed=seed), demonstrator(), max_turns=1)
            return
        except NotImplementedError as error:
            reason = error
    raise ConfigError(
        f"learner.imitation is 'expert', and {env_id} has no expert ({reason}); expected "
        "--imitation kept, which imitates the policy's own successes, or none"
    )
