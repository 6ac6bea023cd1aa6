"""What episodes were, as records that name their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gspo_env.types import Episode, Group, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """What the episodes of one training step were; means leave out failed environments."""

    mean_return: float
    """Mean sum of the turns' rewards."""
    outcome: float
    success: float
    turns: float
    tokens: int
    """Sampled tokens."""
    seconds: float
    env_errors: int
    """Episodes whose environment raised."""
    stops: Mapping[StopReason, float]
    """Share of the episodes that ended for each reason."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Sequence[Group], seconds: float) -> RolloutStats:
        """Summarises the episodes of one collection."""
        episodes = _episodes(groups)
        played = [e for e in episodes if e.stop_reason is not StopReason.ERROR] or episodes
        return cls(
            mean_return=_mean(played, _return),
            outcome=_mean(played, lambda e: e.outcome),
            success=_mean(played, _success),
            turns=_mean(played, _turns),
            tokens=sum(e.model_tokens for e in episodes),
            seconds=seconds,
            env_errors=len(episodes) - len(played),
            stops={r: _mean(episodes, lambda e, r=r: e.stop_reason is r) for r in StopReason},  # type: ignore[misc]
            reward_parts=_reward_parts(played),
        )

    def metrics(self) -> dict[str, float]:
        """Names the metrics."""
        return {
            "rollout/return": self.mean_return,
            "rollout/outcome": self.outcome,
            "rollout/success": self.success,
            "rollout/turns": self.turns,
            "rollout/tokens": float(self.tokens),
            "rollout/tokens_per_second": self.tokens / self.seconds,
            "rollout/env_errors": float(self.env_errors),
            "time/rollout": self.seconds,
            **{f"rollout/stop/{reason}": share for reason, share in self.stops.items()},
            **{f"rollout/reward/{name}": value for name, value in self.reward_parts.items()},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What an evaluation found on the held-out tasks."""

    success: float
    """Share of episodes that succeeded, sampled at the training temperature."""
    success_greedy: float
    mean_return: float
    turns: float
    seconds: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    """The sampled episodes."""

    @classmethod
    def of(cls, sampled: Sequence[Group], greedy: Sequence[Group], seconds: float) -> Evaluation:
        """Summarises the same tasks played twice."""
        episodes = _episodes(sampled)
        return cls(
            success=_mean(episodes, _success),
            success_greedy=_mean(_episodes(greedy), _success),
            mean_return=_mean(episodes, _return),
            turns=_mean(episodes, _turns),
            seconds=seconds,
            reward_parts=_reward_parts(episodes),
            groups=tuple(sampled),
        )

    def metrics(self) -> dict[str, float]:
        """Names the metrics."""
        return {
            "eval/success": self.success,
            "eval/success_greedy": self.success_greedy,
            "eval/return": self.mean_return,
            "eval/turns": self.turns,
            "time/eval": self.seconds,
            **{f"eval/reward/{name}": value for name, value in self.reward_parts.items()},
        }


def _episodes(groups: Sequence[Group]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]


def _return(episode: Episode) -> float:
    return float(episode.rewards.sum())


def _success(episode: Episode) -> float:
    return float(bool(episode.success))


def _turns(episode: Episode) -> float:
    return float(len(episode.turns))


def _mean(episodes: Sequence[Episode], value: Callable[[Episode], float]) -> float:
    return float(np.mean([value(episode) for episode in episodes]))


def _reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    """The mean of each named part of the reward, over the episodes that have the part."""
    totals: dict[str, list[float]] = {}
    for episode in episodes:
        parts: dict[str, float] = {}
        for turn in episode.turns:
            for name, value in turn.info.reward_parts.items():
                parts[name] = parts.get(name, 0.0) + value
        for name, value in parts.items():
            totals.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in totals.items()}
