"""Rules of `gspo-env diagnose` about limits of episodes, tasks and the learning signal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_env.episodes.schema import EpisodeRecord
from gspo_env.health.rules import (
    SOLVED,
    Evidence,
    Said,
    _change,
    now,
    share,
    values_by_turn,
)

_FLAT = 0.8
"""Share of groups without variance from which low entropy has stopped the learning."""
_MOST_NATS = 0.1
"""Entropy that is never low: a token in fifty or more is still a choice between two."""
_ALIKE = 0.9
"""Share of the groups with equal actions from which the policy, not the task, is the reason."""
_FEWEST = 8
"""Episodes or groups without which a share of them means nothing."""
_LITTLE = 0.05
"""A turn has credit if it has this share of its episode's largest advantage."""


def cut_actions(found: Evidence, limit: float) -> Said | None:
    """Actions are cut before the environment sees them."""
    return _stopped(
        found,
        limit,
        "max_turn_tokens",
        "end with an action that was cut at rollout.max_turn_tokens, which the environment never "
        "sees",
        f"Raise --max-turn-tokens ({now(found.run, 'rollout.max_turn_tokens')}) or take a model "
        "that ends its turns: one that has imitated, or was trained for chat.",
    )


def context(found: Evidence, limit: float) -> Said | None:
    """Episodes end because the context is full."""
    return _stopped(
        found,
        limit,
        "max_context",
        "end because the next action does not fit into rollout.max_context",
        f"Raise --max-context ({now(found.run, 'rollout.max_context')}), lower --max-turn-tokens "
        f"({now(found.run, 'rollout.max_turn_tokens')}), or shorten the observations.",
    )


def turn_limit(found: Evidence, limit: float) -> Said | None:
    """Episodes end because they have too many turns."""
    if found.solved:
        return None
    return _stopped(
        found,
        limit,
        "max_turns",
        "are cut at rollout.max_turns before they come to an end",
        f"Raise --max-turns ({now(found.run, 'rollout.max_turns')}), or take the reward of turns "
        "that lead nowhere away.",
    )


def timeouts(found: Evidence, limit: float) -> Said | None:
    """Episodes end because the policy takes too long."""
    return _stopped(
        found,
        limit,
        "timeout",
        "end at rollout.episode_timeout while the policy acts",
        f"Raise --episode-timeout ({now(found.run, 'rollout.episode_timeout')}) or lower "
        f"--concurrency ({now(found.run, 'rollout.concurrency')}).",
    )


def _stopped(found: Evidence, limit: float, reason: str, what: str, advice: str) -> Said | None:
    rate = found.run.late(f"rollout/stop/{reason}")
    if rate is None or rate < limit:
        return None
    return f"{share(rate)} of the episodes {what} ({found.when}).", advice


def too_hard(found: Evidence, limit: float) -> Said | None:
    """No episode succeeds, and nothing rises."""
    run = found.run
    rates = [level.success for level in run.evaluations]
    trained = run.late("rollout/success")
    if not rates or trained is None or found.improved:
        return None
    if max(*rates, trained, run.early("rollout/success") or 0.0) > limit:
        return None
    return (
        f"The tasks are too hard: the highest success of {len(rates)} evaluations is "
        f"{share(max(rates))} and that of training {share(trained)} {found.when}, and the return "
        "does not rise either.",
        "Begin with easier tasks (arguments of the environment, --curriculum ladder), a stronger "
        "model or more imitation, or give rewards for parts of the way.",
    )


def too_easy(found: Evidence, limit: float) -> Said | None:
    """The first evaluation leaves nothing to gain."""
    levels = found.run.evaluations
    if not levels or levels[0].step > 0 or min(levels[0].success, levels[-1].success) < limit:
        return None
    return (
        f"The evaluation is too easy: its success is {share(levels[0].success)} before training "
        f"and {share(levels[-1].success)} at the end, so it cannot show a gain.",
        "Evaluate on harder tasks (arguments of the environment), or check what counts as a "
        "success: without `success` in the last `info`, every outcome above 0 does.",
    )


def clipped(found: Evidence, limit: float) -> Said | None:
    """Most tokens have no policy gradient because their ratio is clipped."""
    run = found.run
    series = run.series.get("train/clipped_fraction")
    if series is None:
        return None
    whole, late = float(series.values.mean()), run.late("train/clipped_fraction") or 0.0
    minibatches = run.number("learner.minibatches") or 1.0
    free = 1 / minibatches if minibatches > 1 else 0.0  # every ratio of the first one is 1
    if max(whole, late) < limit * (1 - free):
        return None
    ratios = [run.late(f"train/ratio_{end}") for end in ("min", "max")]
    spread = "" if None in ratios else f" Ratios go from {ratios[0]:.4g} to {ratios[1]:.4g}."
    never = f"; those of the first of {minibatches:.0f} minibatches never are" if free else ""
    settings = ("loss.clip_low", "loss.clip_high", "learner.learning_rate", "learner.minibatches")
    wide, close, rate, parts = (now(run, name) for name in settings)
    return (
        f"Most tokens are clipped: {share(late)} {found.when} ({share(whole)} over the run) have "
        f"no policy gradient{never}.{spread}",
        f"Widen the clip range ({wide}; {close}), or move less in a step: a lower learning rate "
        f"({rate}) or fewer minibatches ({parts}).",
    )


def no_gradient(found: Evidence, limit: float) -> Said | None:
    """The gradient is zero although advantages are not."""
    run = found.run
    norm, size = run.late("train/grad_norm"), run.late("train/advantage_rms")
    if norm is None or size is None or norm > limit or size <= 0:
        return None
    if (run.late("train/clipped_fraction") or 0.0) >= SOLVED:
        return None
    return (
        f"The gradient is 0 {found.when} although advantages are not (root mean square "
        f"{size:.3g}): no weight changes.",
        "Check that the model is not frozen and that a loss of your own depends on `logprobs_N`.",
    )


def entropy(found: Evidence, limit: float) -> Said | None:
    """The policy has become deterministic before it has learned the task."""
    run = found.run
    before, after = run.early("train/entropy"), run.late("train/entropy")
    flat = run.late("rollout/zero_variance_groups")
    if before is None or after is None or flat is None or found.solved:
        return None
    if after > limit * before or after > _MOST_NATS or flat < _FLAT:
        return None
    return (
        f"The entropy is gone: {after:.2g} nats a token {found.when}, {before:.2g} in the first. "
        f"{share(flat)} of the groups have episodes of equal rewards, so nothing is left to "
        f"compare, at a success of {share(run.late('rollout/success') or 0.0)}.",
        f"Lower the learning rate ({now(run, 'learner.learning_rate')}), add --loss.kl-coef 0.01, "
        f"widen the upper clip ({now(run, 'loss.clip_high')}), or sample hotter "
        f"({now(run, 'rollout.temperature')}); look for a small reward that is too easy to get.",
    )


def no_variance(found: Evidence, limit: float) -> Said | None:
    """The episodes of a group have equal rewards."""
    run = found.run
    flat = run.late("rollout/zero_variance_groups")
    if flat is None or flat < limit or found.solved:
        return None
    size = run.number("rollout.group_size")
    success = run.late("rollout/success") or 0.0
    text = (
        f"No variance in groups: in {share(flat)} of them every advantage is 0 {found.when}, so "
        f"nothing is learned from them (success {share(success)})."
    )
    if size == 1:
        return text, "Compare several episodes of a task: --group-size 8, now 1."
    alike = _alike(found.episodes)
    if alike is not None and alike >= _ALIKE:
        text += f" In {share(alike)} of the kept groups, all episodes have the same actions."
        return text, (
            f"Sample hotter ({now(run, 'rollout.temperature')}), or start from a model that is "
            f"less sure; larger groups ({now(run, 'rollout.group_size')}) help little."
        )
    return text, (
        "Take tasks that the policy solves sometimes (arguments of the environment, --curriculum "
        f"ladder), larger groups ({now(run, 'rollout.group_size')}), or rewards for parts of the "
        "way; check with --score which rewards the estimator reads."
    )


def _alike(episodes: Sequence[EpisodeRecord]) -> float | None:
    """Returns the share of the groups in which all episodes have the same actions."""
    groups: dict[str, set[tuple[str, ...]]] = {}
    sizes: dict[str, int] = {}
    for episode in episodes:
        actions = tuple(turn.action for turn in episode.turns)
        groups.setdefault(episode.group, set()).add(actions)
        sizes[episode.group] = sizes.get(episode.group, 0) + 1
    several = [len(actions) == 1 for name, actions in groups.items() if sizes[name] > 1]
    return float(np.mean(several)) if several else None


def few_turns(found: Evidence, limit: float) -> Said | None:
    """Only a few turns of an episode get credit."""
    shares, lengths, places = [], [], []
    for episode in found.episodes:
        sizes = np.abs(values_by_turn(episode)) if episode.trained else np.zeros(0)
        if len(sizes) < 3 or not sizes.max(initial=0.0) > 0:
            continue
        credited = np.flatnonzero(sizes >= _LITTLE * sizes.max())
        shares.append(len(credited) / len(sizes))
        lengths.append(len(sizes))
        places.append(float(credited.mean()) / (len(sizes) - 1))
    if len(shares) < _FEWEST or np.mean(shares) > limit:
        return None
    run, place = found.run, float(np.mean(places))
    where = "at the end" if place > 0.8 else "at the beginning" if place < 0.2 else "in between"
    gamma = run.number("advantage.gamma")
    more = "" if gamma is None or gamma >= 1 else f" (advantage.gamma is {gamma:g})"
    return (
        f"Credit reaches few turns: of the {np.mean(lengths):.1f} turns of an episode, "
        f"{np.mean(shares) * np.mean(lengths):.1f} have an advantage, mostly {where}, in "
        f"{len(shares)} kept episodes {found.when}{more}.",
        "Carry credit back to earlier turns: --advantage returns_to_go --gamma 1, --advantage "
        "outcome (one advantage for all turns), or rewards for turns on the way.",
    )


def hardly_moves(found: Evidence, limit: float) -> Said | None:
    """The update does not change the policy."""
    run = found.run
    low, high = run.late("train/ratio_min"), run.late("train/ratio_max")
    edge = run.number("loss.clip_low")
    if low is None or high is None or not edge or found.improved or found.solved:
        return None
    flat = run.late("rollout/zero_variance_groups")
    if flat is None or flat >= SOLVED or (run.number("learner.minibatches") or 1) < 2:
        return None
    moved = max(high - 1, 1 - low)
    if moved > limit * edge:
        return None
    return (
        f"The policy hardly moves: the ratios of a step are within {moved:.1g} of 1 {found.when}, "
        f"and the clip begins at {edge:g}; success has not risen ({_change(found.levels)}).",
        f"Raise the learning rate ({now(run, 'learner.learning_rate')}) by a factor of 3 to 10; "
        "a LoRA adapter needs about ten times that of a whole model.",
    )


def memorised(found: Evidence, limit: float) -> Said | None:
    """The few training tasks are learned by heart."""
    run = found.run
    episodes = [*found.first_episodes, *found.episodes]
    groups = {e.group: (e.env, e.task_key or str(e.seed), e.options) for e in episodes}
    evaluations = run.evaluations
    trained = run.late("rollout/success")
    if len(groups) < _FEWEST or not evaluations or trained is None:
        return None
    distinct = len(set(groups.values()))
    gap = trained - evaluations[-1].success
    if gap < limit or distinct > len(groups) / 2:
        return None
    return (
        f"The training tasks are learned by heart: success is {share(trained)} on them "
        f"{found.when} and {share(evaluations[-1].success)} in the evaluation, and {len(groups)} "
        f"kept groups have only {distinct} different tasks.",
        "Train on more tasks (a larger data set, other arguments of the environment), or stop "
        "earlier: checkpoints/best is the model of the best evaluation.",
    )


def no_progress(found: Evidence, limit: float) -> Said | None:
    """Neither success nor return has risen."""
    if len(found.run.steps) < limit or found.improved or found.solved or not found.levels:
        return None
    levels = found.levels
    return (
        f"No progress in {len(found.run.steps)} steps: success was {_change(levels)}, and the "
        f"return {levels[0].mean_return:.3g}, now {levels[-1].mean_return:.3g}; both may be chance "
        f"with {levels[-1].episodes} episodes. No other rule found the reason.",
        f"Train longer, raise the learning rate ({now(found.run, 'learner.learning_rate')}), or "
        f"take more episodes for a step ({now(found.run, 'tasks_per_step')}; "
        f"{now(found.run, 'rollout.group_size')}); read episodes with `gspo-env view RUN`.",
    )
