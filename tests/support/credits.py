"""Episodes of rewards alone, for tests of estimators."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gspo_env.batch.padded import bare_episode
from gspo_env.types import (
    Ending,
    Episode,
    FloatArray,
    Group,
    StepInfo,
    StopReason,
    Task,
)

TASK = Task(env_id="test", seed=0)


def episode(
    *rewards: float,
    keys: Sequence[str | None] = (),
    outcome: float | None = None,
    stop: StopReason = StopReason.TERMINATED,
    last_key: str | None = None,
) -> Episode:
    """An episode whose turns have two tokens; `last_key` is the state after its last turn."""
    bare = bare_episode(TASK, [2] * len(rewards), rewards, keys)
    return replace(
        bare,
        turns=tuple(replace(turn, info=StepInfo(state_key=last_key)) for turn in bare.turns),
        ending=Ending(reason=stop, outcome=outcome),
    )


def group(*episodes: Episode) -> Group:
    return Group(task=TASK, episodes=episodes)


def check(rows: Sequence[FloatArray], *expected: Sequence[float]) -> None:
    assert len(rows) == len(expected)
    for row, values in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row, values, atol=1e-12)
