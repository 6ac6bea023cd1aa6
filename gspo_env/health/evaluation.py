"""Checks before training that play episodes or judge those of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gspo_env.config import Config
from gspo_env.env.base import TextEnvironment
from gspo_env.env.registration import make_env
from gspo_env.health.findings import Finding, refuse
from gspo_env.health.rules import IMITATE
from gspo_env.health.startup import check_settings
from gspo_env.rollout.failures import close_quietly
from gspo_env.types import Group

_NEARLY_ALL = 0.95
"""Share of successes in an evaluation from which their definition is doubtful."""


def check_first_evaluation(
    config: Config, groups: Sequence[Group], when: str = "before training"
) -> Iterator[Finding]:
    """Yields why training would learn little from episodes like those of an evaluation.

    Args:
        config: The settings of the run.
        groups: Episodes of the evaluation.
        when: When they were played, for the sentence.
    """
    if finding := check_success(groups, when):
        yield finding
    episodes = [e for group in groups for e in group.episodes if not e.failed]
    if not config.model or not episodes:
        return
    flaws = []
    if not any(episode.success for episode in episodes):
        flaws.append("none succeeds")
    turns = [turn for episode in episodes for turn in episode.turns]
    has_tools = any(episode.prompt.tools for episode in episodes)
    if has_tools and not any(turn.info.observation_role == "tool" for turn in turns):
        flaws.append("none calls a tool")
    outcomes = {episode.outcome for episode in episodes}
    if flaws and len(outcomes) == 1:
        flaws.append(f"all have the outcome {outcomes.pop():.3g}")
    if not flaws:
        return
    *most, last = flaws
    listed = f"{', '.join(most)} and {last}" if most else last
    yield Finding(
        name="zero_shot",
        text=f"Of the {len(episodes)} episode{'s' * (len(episodes) != 1)} {when}, {listed}.",
        advice="Imitate longer (--imitation-steps), or use easier tasks."
        if config.recipe.demonstrates
        else IMITATE,
    )


def check_success(groups: Sequence[Group], when: str = "before training") -> Finding | None:
    """Returns a finding if nearly all episodes succeed only because their outcome is above 0."""
    episodes = [e for group in groups for e in group.episodes if not e.failed and e.turns]
    outcomes = [episode.outcome for episode in episodes]
    if not episodes or any(e.turns[-1].info.success is not None for e in episodes):
        return None
    rate = sum(bool(episode.success) for episode in episodes) / len(episodes)
    if rate < _NEARLY_ALL or min(outcomes) == max(outcomes):
        return None
    return Finding(
        name="success",
        text=f"{rate:.0%} of the episodes count as a success {when}, because no step sets "
        "`success` and any outcome above 0 is one; outcomes go from "
        f"{min(outcomes):.3g} to {max(outcomes):.3g}.",
        advice="Return info['success'] on the last step.",
    )


def check_comparison(configs: Sequence[Config]) -> None:
    """Checks the settings of runs in the same environments.

    Raises:
        TrainingError: Nothing can be learned, or a run is strict and there is a finding.
    """
    envs: dict[str, TextEnvironment] = {}
    try:
        for member in configs[0].environments:
            envs[member.env_id] = make_env(member.spec, **member.kwargs)
        for config in configs:
            for finding in check_settings(config, envs):
                refuse(finding, strict=config.strict)
    finally:
        for env in envs.values():
            close_quietly(env)
