"""What the training episodes were, by metric name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspo_env.types import Episode, Group, StopReason


def rollout_metrics(groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """The metrics of one collection, named as in the tracking contract."""
    episodes = [e for group in groups for e in group.episodes]
    played = [e for e in episodes if e.stop_reason is not StopReason.ERROR] or episodes
    tokens = sum(e.model_tokens for e in episodes)
    metrics = {
        "train/return": float(np.mean([e.rewards.sum() for e in played])),
        "train/outcome": float(np.mean([e.outcome for e in played])),
        "train/success": float(np.mean([bool(e.success) for e in played])),
        "train/turns": float(np.mean([len(e.turns) for e in played])),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_second": tokens / seconds,
        "rollout/env_errors": float(len(episodes) - len(played)),
        "time/rollout": seconds,
    }
    for reason in StopReason:
        share = np.mean([e.stop_reason is reason for e in episodes])
        metrics[f"rollout/stop/{reason}"] = float(share)
    return metrics | reward_metrics(played, "train")


def reward_metrics(episodes: Sequence[Episode], prefix: str) -> dict[str, float]:
    """The mean of each named part of the reward, over the episodes that have the part."""
    totals: dict[str, list[float]] = {}
    for episode in episodes:
        parts: dict[str, float] = {}
        for turn in episode.turns:
            for name, value in turn.info.get("reward_parts", {}).items():
                parts[name] = parts.get(name, 0.0) + value
        for name, value in parts.items():
            totals.setdefault(name, []).append(value)
    return {f"{prefix}/reward/{name}": float(np.mean(all_)) for name, all_ in totals.items()}
