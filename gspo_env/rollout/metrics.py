"""Statistics of episodes and their names as metrics."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import get_args

import numpy as np

from gspo_env.tools.marks import REPEATABLE, control_marks
from gspo_env.types import Episode, Fork, Group, StopReason

_NEARLY = 0.9
"""Share of the highest reward of a step that is nearly the highest."""
_FEWEST = 4
"""Different tasks, successes and failures from which rewards are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeStats:
    """Means over episodes."""

    episodes: int
    mean_return: float
    """Mean sum of the turns' rewards."""
    return_std: float
    """Standard deviation of the returns."""
    outcome: float
    """Mean outcome."""
    success: float
    turns: float
    reward_parts: Mapping[str, float]
    """Mean of each named part of the reward, over the episodes that have the part."""
    tool_calls: float | None
    """Mean number of turns that a tool answered; None without tools."""

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> EpisodeStats:
        """Summarises episodes."""
        returns = [e.rewards.sum() for e in episodes]
        return cls(
            episodes=len(episodes),
            mean_return=_mean(returns),
            return_std=float(np.std(returns)) if returns else 0.0,
            outcome=_mean(e.outcome for e in episodes),
            success=_mean(bool(e.success) for e in episodes),
            turns=_mean(len(e.turns) for e in episodes),
            reward_parts=_reward_parts(episodes),
            tool_calls=_mean(map(_tool_calls, episodes))
            if any(e.prompt.tools for e in episodes)
            else None,
        )

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns the metrics by name."""
        rewards = {f"{prefix}/reward/{name}": value for name, value in self.reward_parts.items()}
        return {
            f"{prefix}/success": self.success,
            f"{prefix}/return": self.mean_return,
            f"{prefix}/return_std": self.return_std,
            f"{prefix}/outcome": self.outcome,
            f"{prefix}/turns": self.turns,
            **rewards,
        }


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Statistics of the episodes of one training step."""

    groups: Sequence[Group]
    """The groups to train on."""
    seconds: float
    """Time in which they were played."""
    unused: Sequence[Group] = ()
    """Other groups that were played, of which only the failures count."""
    supply: Mapping[str, float] = field(default_factory=dict)
    """Metrics of what played them."""

    @property
    def played(self) -> EpisodeStats:
        """Statistics without the episodes whose environment failed."""
        return EpisodeStats.of(_played(self.groups))

    @property
    def lost(self) -> int:
        """Episodes whose environment failed in every attempt."""
        return _lost([*self.groups, *self.unused])

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(episode.model_tokens for episode in _episodes(self.groups))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name."""
        episodes, played = _episodes(self.groups), _played(self.groups)
        with_turns = [e for e in episodes if e.turns]
        redrawn = [group.redrawn for group in self.groups if group.redrawn is not None]
        stops = {reason: _mean(e.stop_reason is reason for e in episodes) for reason in StopReason}
        forks = {reason: _mean(_forks(e, reason) for e in episodes) for reason in get_args(Fork)}
        return {
            **self.played.metrics("rollout"),
            **_environment_metrics(self.groups, "rollout"),
            **{f"rollout/stop/{reason}": share for reason, share in stops.items()},
            **{f"rollout/forks/{reason}": count for reason, count in forks.items()},
            "rollout/sequences_per_episode": _mean(map(_sequences, with_turns)),
            "rollout/malformed_calls": _mean(map(_malformed, played)),
            **({"rollout/redrawn_tasks": float(sum(redrawn))} if redrawn else {}),
            **_fault_metrics([*self.groups, *self.unused], "rollout"),
            "rollout/lone_groups": float(sum(map(_is_lone, self.groups))),
            **_reward_metrics(played),
            "rollout/tokens": float(self.tokens),
            "rollout/tokens_per_second": self.tokens / self.seconds,
            "time/rollout": self.seconds,
            **self.supply,
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results on the tasks of the evaluation, without the episodes whose environment failed."""

    groups: Sequence[Group]
    """The episodes that were sampled at the training temperature."""
    greedy_groups: Sequence[Group]
    """The greedy episodes of the same tasks."""
    seconds: float

    @property
    def sampled(self) -> EpisodeStats:
        """Statistics of the sampled episodes."""
        return EpisodeStats.of(_played(self.groups))

    @property
    def greedy(self) -> EpisodeStats:
        """Statistics of the greedy episodes."""
        return EpisodeStats.of(_played(self.greedy_groups))

    @property
    def lost(self) -> int:
        """Episodes whose environment failed in every attempt."""
        return _lost([*self.groups, *self.greedy_groups])

    @property
    def tasks(self) -> int:
        """The number of different tasks that were played: of keys, or of seeds without a key."""
        keys = {
            (e.task.env_id, e.task.seed if e.reset.task_key is None else e.reset.task_key)
            for e in _played(self.groups)
        }
        return len(keys)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name."""
        greedy = by_environment(self.greedy_groups).items()
        return {
            **self.sampled.metrics("eval"),
            **_fault_metrics([*self.groups, *self.greedy_groups], "eval"),
            "eval/success_greedy": self.greedy.success,
            "eval/tasks": float(self.tasks),
            "time/eval": self.seconds,
            **{f"eval/{name}/success_greedy": stats.success for name, stats in greedy},
            **_environment_metrics(self.groups, "eval"),
        }


def control_metrics(groups: Sequence[Group], controls: Collection[str]) -> dict[str, float]:
    """Returns how often the policy samples control tokens and marks of calls.

    Args:
        groups: The groups of a step.
        controls: The texts of the tokenizer's control tokens.
    """
    episodes = [e for e in _played(groups) if e.turns]
    pattern = control_marks(controls)
    marks = [pattern.findall(turn.text) for e in episodes for turn in e.turns]
    pairs = [pair for each in marks for pair in pairwise(each)]
    repeated = sum(a == b and a not in REPEATABLE for a, b in pairs)
    return {
        "rollout/control_tokens": sum(map(len, marks))
        / max(1, sum(episode.model_tokens for episode in episodes)),
        "rollout/repeated_marks": repeated / max(1, len(marks)),
    }


def by_environment(groups: Sequence[Group]) -> dict[str, EpisodeStats]:
    """Summarises the episodes of each environment that has played any; empty if all are of one.

    It is by the tasks' `env_id`, which in a run of several environments is a short name.
    """
    by_id: dict[str, list[Episode]] = {}
    for group in groups:
        by_id.setdefault(group.task.env_id, []).extend(_played([group]))
    if len(by_id) < 2:
        return {}
    return {name: EpisodeStats.of(episodes) for name, episodes in by_id.items() if episodes}


def _environment_metrics(groups: Sequence[Group], prefix: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, stats in by_environment(groups).items():
        metrics |= stats.metrics(f"{prefix}/{name}")
        metrics[f"{prefix}/{name}/episodes"] = float(stats.episodes)
    return metrics


def _fault_metrics(groups: Sequence[Group], prefix: str) -> dict[str, float]:
    """Returns the failures of environments: `errors + timeouts == retried + lost`."""
    reasons = [fault.reason for e in _episodes(groups) for fault in e.faults]
    timeouts, lost = reasons.count(StopReason.ENV_TIMEOUT), _lost(groups)
    return {
        f"{prefix}/env_errors": float(len(reasons) - timeouts),
        f"{prefix}/env_timeouts": float(timeouts),
        f"{prefix}/retried": float(len(reasons) - lost),
        f"{prefix}/lost_episodes": float(lost),
    }


def _episodes(groups: Sequence[Group]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]


def _played(groups: Sequence[Group]) -> list[Episode]:
    return [episode for episode in _episodes(groups) if not episode.failed]


def _lost(groups: Sequence[Group]) -> int:
    return sum(episode.failed for episode in _episodes(groups))


def _is_lone(group: Group) -> bool:
    """Returns whether failures left fewer than two episodes, so that none is compared."""
    return sum(not e.failed for e in group.episodes) < 2 <= len(group.episodes)


def _reward_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns what `_pays` says of the environment of which it says most."""
    most = {"rollout/paid_alike": 0.0}
    for env_id in {episode.task.env_id for episode in episodes}:
        for name, value in _pays([e for e in episodes if e.task.env_id == env_id]).items():
            most[name] = max(value, most.get(name, value))
    return most


def _pays(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns how much a reward pays for the same actions everywhere, and for failure."""
    pays = [float(e.rewards.sum()) + (e.ending.outcome or 0.0) for e in episodes]
    prompts = [_first_prompt(e) for e in episodes]
    paid: dict[tuple[str, ...], set[str]] = {}
    for episode, prompt, pay in zip(episodes, prompts, pays, strict=True):
        if episode.success and pay >= _NEARLY * max(pays):
            paid.setdefault(_actions(episode), set()).add(prompt)
    tasks = len(set(prompts))
    alike = max(map(len, paid.values()), default=0) / tasks if tasks >= _FEWEST else 0.0
    won, lost = (
        [pay for e, pay in zip(episodes, pays, strict=True) if e.ending.success is verdict]
        for verdict in (True, False)
    )
    compared = min(len(won), len(lost)) >= _FEWEST and np.ptp(pays) > 0 and _mean(won) > 0
    failure = {"rollout/failure_pay": _mean(lost) / _mean(won)} if compared else {}
    return {"rollout/paid_alike": alike} | failure


def _first_prompt(episode: Episode) -> str:
    """Returns what the policy reads before its first action."""
    messages = [message.content for message in episode.prompt.messages]
    return "\n".join([*messages, *(turn.observation for turn in episode.turns[:1])])


def _actions(episode: Episode) -> tuple[str, ...]:
    """Returns the words of the actions; all echoes of the observation are alike."""
    return tuple(
        "<echo>" if turn.text == turn.observation else " ".join(re.findall(r"\w+", turn.text))
        for turn in episode.turns
    )


def _sequences(episode: Episode) -> int:
    """Returns the number of turns that no other turn continues."""
    return len(episode.turns) - len({p for p in episode.parents if p is not None})


def _malformed(episode: Episode) -> int:
    return sum(turn.info.malformed_calls for turn in episode.turns)


def _tool_calls(episode: Episode) -> int:
    actions = [turn for turn in episode.turns if turn.kind == "action"]
    return sum(turn.info.observation_role == "tool" for turn in actions)


def _forks(episode: Episode, reason: Fork) -> int:
    return sum(turn.fork == reason for turn in episode.turns)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return float(np.mean(numbers)) if numbers else 0.0


def _reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    totals: dict[str, list[float]] = {}
    for episode in episodes:
        parts: dict[str, float] = {}
        for turn in episode.turns:
            for name, value in turn.info.reward_parts.items():
                parts[name] = parts.get(name, 0.0) + value
        for name, value in parts.items():
            totals.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in totals.items()}
