"""Checks that a run can learn: at its start, in its first steps and at each evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.config import Config, check_estimator
from gspo_env.credit.estimators import Estimator, GroupEstimator
from gspo_env.env.base import TextEnvironment, attribute, num_eval_tasks
from gspo_env.errors import ConfigError, figure
from gspo_env.files import check_output
from gspo_env.health.findings import Finding, refuse
from gspo_env.health.rules import IMITATE, find_in_first_steps
from gspo_env.registry import name_of
from gspo_env.rollout.collector import RolloutPlugin
from gspo_env.rollout.play import look, play_now
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runs.evaluations import EvalSnapshot, describe_fall
from gspo_env.runs.names import CONTROL, SPIKE
from gspo_env.runs.run import History
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.tracking.multi import check_trackers
from gspo_env.types import Group, Task

FIRST_STEPS = 3
"""Steps after which a run is judged for the first time."""
_PROMPTS = 32
"""First prompts that are read before a run."""
_NEARLY_ALL = 0.95
"""Share of successes in an evaluation from which their definition is doubtful."""


def check_config(config: Config, *, ranks: bool = False) -> None:
    """Refuses what can never work: in a second, before PyTorch is loaded and a demonstration plays.

    Args:
        config: The settings of a training.
        ranks: Whether several ranks train.

    Raises:
        ConfigError: Settings contradict each other, or a tracker's address does not answer.
        MissingExtraError: A package is not installed.
        OutputError: The output folder is not empty or cannot be made.
    """
    check_player(config, ranks=ranks)
    check_training(config)


def check_training(config: Config) -> None:
    """Refuses what an agent that plays cannot be trained with; see `check_config`."""
    if config.output:
        check_output(config.output)
    if config.stop_at_success and not config.eval_every:
        raise ConfigError(
            f"stop_at_success is {config.stop_at_success} and eval_every is 0, so that nothing is "
            "evaluated before the last step; expected --eval-every of at least 1"
        )
    config.learner.require()
    check_trackers(config.tracker)


def check_player(config: Config, *, ranks: bool = False) -> None:
    """Refuses settings with which no agent can play; see `check_config`.

    Raises:
        ConfigError: The estimator, the engine, the ranks and the workers do not go together.
        MissingExtraError: The engine or the workers need a package that is not installed.
    """
    check_estimator(config)
    if ranks or config.rollout.ray_workers:
        from gspo_env.health.several import check_several

        check_several(config, ranks=ranks)
    config.rollout.require()
    getattr(config.engine, "require", lambda: None)()


def check_start(
    config: Config,
    envs: Mapping[str, TextEnvironment],
    chat: ChatTokenizer,
    *,
    undemonstrated: Sequence[str],
) -> list[Finding]:
    """Returns why a run would learn nothing, or less than its settings say.

    Args:
        config: The settings.
        envs: The environments by the `env_id` of their tasks; their episodes are played.
        chat: The tokenizer.
        undemonstrated: The environments without demonstrations for a model with random weights.

    Raises:
        TrainingError: Nothing can be learned, or the run is strict and there is a finding.
    """
    findings: list[Finding] = []
    for env_id, env in envs.items():
        if env_id in undemonstrated:
            findings.append(_no_demonstrations(env_id))
        if finding := _check_prompts(env, env_id, chat, config.rollout):
            findings.append(finding)
    for finding in findings:
        refuse(finding, strict=config.strict)
    return findings


def check_first_steps(config: Config, history: History, warn: Callable[[Finding], None]) -> None:
    """Warns of what the first steps of a run have in common, such as groups without variance.

    It does so after the first step and after the third, or the last one of a shorter run. After a
    later one, it warns only of control tokens that have become likely; see `find_spike`.

    Args:
        config: The settings.
        history: The metrics so far; the last entry is a training step.
        warn: Called with a finding.

    Raises:
        TrainingError: Nothing can be learned, or the run is strict and there is a finding.
    """
    step, last = history[-1][0], min(FIRST_STEPS, config.steps)
    if step > last and history[-1][1].get(CONTROL, 0.0) >= SPIKE:
        from gspo_env.health.run_rules import find_spike

        if spike := find_spike(config, history):
            warn(spike)
    if step not in (1, last):
        return
    finding = find_in_first_steps(config, history)
    if finding is not None and (step == last or finding.hopeless):
        warn(finding)
        refuse(finding, strict=config.strict)


def asks_environments(config: Config) -> bool:
    """Returns whether `check_settings` may refuse settings because of an environment."""
    return (
        config.eval_tasks == "all"
        or config.learner.imitation == "expert"
        or _plays_episodes(config)
    )


def _plays_episodes(config: Config) -> bool:
    """Returns whether `check_settings` plays a few episodes."""
    plugins = (config.advantage, Estimator), (config.compaction, RolloutPlugin)
    return (
        (config.rollout.group_size == 1 and isinstance(config.advantage, GroupEstimator))
        or (config.credit.score == "sum" and config.advantage.uses_score)
        or any(type(each).check_episode is not base.check_episode for each, base in plugins)
    )


def check_settings(config: Config, envs: Mapping[str, TextEnvironment]) -> list[Finding]:
    """Returns what is wrong with settings and environments before training.

    A few episodes are played if settings need something that not every environment gives.

    Raises:
        ConfigError: Settings do not go with an environment.
        TrainingError: Nothing can be learned, or the run is strict and there is a finding.
    """
    findings = [*_check_settings(config, envs)]
    for finding in findings:
        refuse(finding, strict=config.strict)
    return findings


def _check_settings(config: Config, envs: Mapping[str, TextEnvironment]) -> Iterator[Finding]:
    for env_id, env in envs.items():
        if config.eval_tasks == "all":
            num_eval_tasks(env_id, env)
        if config.learner.imitation == "expert":
            from gspo_env.health.episodes import check_expert

            check_expert(env_id, env)
        if attribute(env, "gives_reward", None) is False:
            key = "rewards" if len(envs) == 1 else f"{env_id}.rewards"
            yield Finding(
                name="no_reward",
                text=f"{env_id} never gives a reward.",
                advice=f"Name reward functions with --env-kwargs {key}=file.py:function.",
                hopeless=True,
            )
        if attribute(env, "rewards_by_agent", False) and not config.advantage.credits_agents:
            yield Finding(
                name="rewards_by_agent",
                text=f"The agents of {env_id} have rewards of their own, but the estimator "
                f"{name_of('advantage', config.advantage)!r} credits all turns with those of the "
                "first: the policy would learn to lose as the others.",
                advice="Use --advantage by_agent, or one with credits_agents = True.",
                hopeless=True,
            )
    size, episodes = config.rollout.group_size, config.rollout.group_size * config.tasks_per_step
    if _plays_episodes(config):
        from gspo_env.health.episodes import check_episodes

        yield from check_episodes(config, envs)
    if config.learner.minibatches > episodes:
        yield Finding(
            name="minibatches",
            text=f"learner.minibatches is {config.learner.minibatches}, and a step has {episodes} "
            f"episodes (tasks_per_step {config.tasks_per_step}, group_size {size}).",
            advice="An update has at most one optimiser step for each episode.",
        )


def _no_demonstrations(env_id: str) -> Finding:
    return Finding(
        name="untrained",
        text=f"{env_id} has no expert_action, so the tiny model starts with random weights and "
        "only learns to stop.",
        advice="Name a model with --model, or add a demonstrator.",
    )


def _check_prompts(
    env: TextEnvironment, env_id: str, chat: ChatTokenizer, limits: RolloutConfig
) -> Finding | None:
    """Resets the environment to some tasks; returns a finding if no first prompt fits."""
    available = limits.max_context - limits.max_turn_tokens
    lengths: list[int] = []
    for n in range(_PROMPTS):
        task = Task(env_id=env_id, seed=derive_seed("room", n) % HELD_OUT)
        episode = play_now(env, task, look)
        if episode.failed:
            return None  # the rollout counts and reports these
        lengths.append(len(chat.start(episode.final_observation, episode.prompt)))
        if lengths[-1] <= available:
            return None
    shown = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    return Finding(
        name="no_turn",
        text=f"No episode of {env_id} can have a turn: the first prompts have {shown} tokens, and "
        f"rollout.max_context {limits.max_context} less rollout.max_turn_tokens "
        f"{limits.max_turn_tokens} leaves {available}.",
        advice="Raise max_context or lower max_turn_tokens.",
        hopeless=True,
    )


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
        flaws.append(f"all have the outcome {figure(outcomes.pop())}")
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
        f"{figure(min(outcomes))} to {figure(max(outcomes))}.",
        advice="Return info['success'] on the last step.",
    )


def find_collapse(evaluations: Sequence[EvalSnapshot]) -> Finding | None:
    """Returns a finding if the last evaluation of a run in progress shows a collapse."""
    text = describe_fall(evaluations)
    if not text:
        return None
    return Finding(
        name="collapse",
        text=f"{text}: the policy may have collapsed.",
        advice="Lower the learning rate, use fewer minibatches or add --loss.kl-coef 0.01.",
    )
