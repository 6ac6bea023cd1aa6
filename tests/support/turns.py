"""Turns and episodes whose fields tests of several files change."""

from typing import Any

from gspo_env.types import Ending, Episode, Fault, StopReason, Task, Turn


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
    """An episode; `reason`, `outcome`, `success` and `error` are of its ending."""
    fields: dict[str, Any] = {"task": Task(env_id="test", seed=7), **changes}
    reason = fields.pop("reason", StopReason.TERMINATED)
    error = fields.pop("error", None)
    ending = Ending(
        reason=reason,
        outcome=fields.pop("outcome", 1.0),
        success=fields.pop("success", None),
        fault=error and Fault(reason=reason, message=error, where=error),
    )
    return Episode(turns=turns, ending=ending, **fields)
