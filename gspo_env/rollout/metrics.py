"""Statistics of episodes and their names as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from gspo_env.types import Episode, Fork, Group, StopReason


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

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> EpisodeStats:
        """Summarises episodes."""
        returns = [e.rewards.sum() for e in episodes]
        return cls(
            episodes=len(episodes),
            mean_return=_mean(returns),
            return_std=float(np.std(returns)),
            outcome=_mean(e.outcome for e in episodes),
            success=_mean(bool(e.success) for e in episodes),
            turns=_mean(len(e.turns) for e in episodes),
            reward_parts=_reward_parts(episodes),
        )

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns the metrics by name."""
        parts = {f"{prefix}/reward/{name}": value for name, value in self.reward_parts.items()}
        return parts | {
            f"{prefix}/return": self.mean_return,
            f"{prefix}/return_std": self.return_std,
            f"{prefix}/outcome": self.outcome,
            f"{prefix}/success": self.success,
            f"{prefix}/turns": self.turns,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultStats:
    """Failures of environments: `errors + timeouts == retried + lost`."""

    errors: int
    """Attempts at an episode that an exception, a broken contract or a crash ended."""
    timeouts: int
    """Attempts in which the environment did not return in time."""
    retried: int
    """Failed attempts after which the episode was played again."""
    lost: int
    """Episodes whose last attempt failed."""
    lone_groups: int
    """Groups of several episodes of which fewer than two are left, so that none is compared."""

    @classmethod
    def of(cls, groups: Sequence[Group], unused: Sequence[Group] = ()) -> FaultStats:
        """Counts the failures of one collection; see `RolloutStats.of`."""
        episodes = _episodes([*groups, *unused])
        reasons = [fault.reason for e in episodes for fault in e.faults]
        timeouts, lost = reasons.count(StopReason.ENV_TIMEOUT), sum(e.failed for e in episodes)
        counts = [sum(not e.failed for e in g.episodes) for g in groups]
        return cls(
            errors=len(reasons) - timeouts,
            timeouts=timeouts,
            retried=len(reasons) - lost,
            lost=lost,
            lone_groups=sum(n < 2 <= len(g.episodes) for n, g in zip(counts, groups, strict=True)),
        )

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns the metrics by name."""
        return {
            f"{prefix}/env_errors": float(self.errors),
            f"{prefix}/env_timeouts": float(self.timeouts),
            f"{prefix}/retried": float(self.retried),
            f"{prefix}/lost_episodes": float(self.lost),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """Statistics of the episodes of one training step."""

    played: EpisodeStats
    """Statistics without the episodes whose environment failed."""
    faults: FaultStats
    stops: Mapping[StopReason, float]
    """Share of the episodes that ended for each reason."""
    tokens: int
    """Sampled tokens."""
    sequences: float
    """Mean number of token sequences of an episode with turns."""
    forks: Mapping[Fork, float]
    """Mean number of sequences that an episode adds for each reason."""
    malformed_calls: float
    """Mean number of tool calls of an episode that could not be read."""
    seconds: float
    redrawn: int | None = None
    """Tasks that were drawn again because they are held out; None if none are, by key."""
    environments: Mapping[str, EpisodeStats] = field(default_factory=dict)
    """Statistics of the episodes of each environment; empty if all are of one."""

    @classmethod
    def of(
        cls, groups: Sequence[Group], seconds: float, unused: Sequence[Group] = ()
    ) -> RolloutStats:
        """Summarises the episodes of one collection.

        Args:
            groups: The groups to train on.
            seconds: Time in which they were played.
            unused: Other groups that were played, of which only the failures count.
        """
        episodes, played = _episodes(groups), _played(groups)
        filled = [e for e in episodes if e.turns]
        redrawn = [g.redrawn for g in groups if g.redrawn is not None]
        return cls(
            played=EpisodeStats.of(played),
            faults=FaultStats.of(groups, unused),
            stops={r: _mean(e.stop_reason is r for e in episodes) for r in StopReason},
            tokens=sum(e.model_tokens for e in episodes),
            sequences=_mean(map(_sequences, filled)) if filled else 0.0,
            forks={r: _mean(_forks(e, r) for e in episodes) for r in get_args(Fork)},
            malformed_calls=_mean(map(_malformed, played)) if played else 0.0,
            seconds=seconds,
            redrawn=sum(redrawn) if redrawn else None,
            environments=by_environment(groups),
        )

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name."""
        forks = {f"rollout/forks/{reason}": count for reason, count in self.forks.items()}
        stops = {f"rollout/stop/{reason}": share for reason, share in self.stops.items()}
        redrawn = {} if self.redrawn is None else {"rollout/redrawn_tasks": float(self.redrawn)}
        return {
            **self.played.metrics("rollout"),
            **_named(self.environments, "rollout"),
            **stops,
            **forks,
            "rollout/sequences_per_episode": self.sequences,
            "rollout/malformed_calls": self.malformed_calls,
            **redrawn,
            **self.faults.metrics("rollout"),
            "rollout/lone_groups": float(self.faults.lone_groups),
            "rollout/tokens": float(self.tokens),
            "rollout/tokens_per_second": self.tokens / self.seconds,
            "time/rollout": self.seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Results on the tasks of the evaluation."""

    sampled: EpisodeStats
    """Played at the training temperature."""
    greedy: EpisodeStats
    faults: FaultStats
    """Failures in both; an episode that failed is not in the statistics."""
    seconds: float
    groups: tuple[Group, ...]
    """The sampled episodes."""
    greedy_groups: tuple[Group, ...] = ()
    """The greedy episodes of the same tasks."""
    environments: Mapping[str, EpisodeStats] = field(default_factory=dict)
    """Statistics of the sampled episodes of each environment; empty if all are of one."""
    greedy_environments: Mapping[str, EpisodeStats] = field(default_factory=dict)

    @classmethod
    def of(cls, sampled: Sequence[Group], greedy: Sequence[Group], seconds: float) -> Evaluation:
        """Summarises the sampled and the greedy episodes of the same tasks."""
        return cls(
            sampled=EpisodeStats.of(_played(sampled)),
            greedy=EpisodeStats.of(_played(greedy)),
            faults=FaultStats.of([*sampled, *greedy]),
            seconds=seconds,
            groups=tuple(sampled),
            greedy_groups=tuple(greedy),
            environments=by_environment(sampled),
            greedy_environments=by_environment(greedy),
        )

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name."""
        extra = {"eval/success_greedy": self.greedy.success, "time/eval": self.seconds}
        for name, stats in self.greedy_environments.items():
            extra[f"eval/{name}/success_greedy"] = stats.success
        extra |= _named(self.environments, "eval")
        return self.sampled.metrics("eval") | self.faults.metrics("eval") | extra


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


def _named(environments: Mapping[str, EpisodeStats], prefix: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, stats in environments.items():
        metrics |= stats.metrics(f"{prefix}/{name}")
        metrics[f"{prefix}/{name}/episodes"] = float(stats.episodes)
    return metrics


def _episodes(groups: Sequence[Group]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]


def _played(groups: Sequence[Group]) -> list[Episode]:
    return [episode for episode in _episodes(groups) if not episode.failed]


def _sequences(episode: Episode) -> int:
    """Returns the number of turns that no other turn continues."""
    return len(episode.turns) - len({p for p in episode.parents if p is not None})


def _malformed(episode: Episode) -> int:
    return sum(turn.info.malformed_calls for turn in episode.turns)


def _forks(episode: Episode, reason: Fork) -> int:
    return sum(turn.fork == reason for turn in episode.turns)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


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
