"""Turns and episodes whose fields tests of several files change."""

from typing import Any

from gspo_env.types import Episode, StopReason, Task, Turn


def turn(**changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "prompt_ids": (1, 2, 3),
        "action_ids": (4, 5),
        "logprobs": (-0.5, -1.5),
        "text": "act",
        "observation": "see",
        "reward": 0.5,
    }
    return Turn(**{**fields, **changes})


def episode(*turns: Turn, **changes: Any) -> Episode:
    fields: dict[str, Any] = {
        "task": Task(env_id="test", seed=7),
        "outcome": 1.0,
        "stop_reason": StopReason.TERMINATED,
        "terminated": True,
        "truncated": False,
    }
    return Episode(turns=turns, **{**fields, **changes})
