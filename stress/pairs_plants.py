"""Ten faults for `pairs.py --plant`: each is put into a process before it trains.

A plant names the settings of the rows that could notice it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gspo_env import config
from gspo_env.env.isolated import IsolatedEnv
from gspo_env.learner import learner, losses
from gspo_env.learner.learner import Learner
from gspo_env.model import adapters
from gspo_env.training import loop
from gspo_env.types import Episode


@dataclass(frozen=True)
class Plant:
    """A fault, and the settings of rows that could notice it."""

    put: Callable[[], None]
    needs: dict[str, Any]


def _mask() -> None:
    inner: Any = Episode.sequences

    def shifted(self: Episode) -> Any:
        rows = inner.fget(self)
        return tuple(replace(s, turn_ids=np.roll(s.turn_ids, -1)) for s in rows)

    Episode.sequences = property(shifted)  # type: ignore[assignment,method-assign]


def _neighbour() -> None:
    inner: Any = loop.to_samples
    loop.to_samples = lambda episodes, rows: inner(episodes, [np.roll(row, 1) for row in rows])


def _reference() -> None:
    Learner.reference_logprobs = Learner.logprobs  # type: ignore[method-assign]


def _old() -> None:
    inner = Learner.backward

    def backward(self: Learner, minibatch: Any) -> Any:
        return inner(self, minibatch if minibatch.first else self._score_rows(minibatch))

    Learner.backward = backward  # type: ignore[method-assign]


def _aggregation() -> None:
    inner = losses.aggregate

    def aggregate(values: Any, ids: Any, count: int, settings: Any, normaliser: Any) -> Any:
        other = replace(settings, aggregation="token_mean")
        return inner(values, ids, count, other, float(max(1, len(values))))

    losses.aggregate = aggregate


def _twice() -> None:
    inner = loop.Loop._samples

    def samples(self: Any, groups: Any, advantages: Any) -> Any:
        made, places = inner(self, groups, advantages)
        cut = {n for n, (p, g) in enumerate(places) if groups[p].episodes[g].truncated}
        again = [replace(s, episode=1000 + s.episode) for s in made if s.episode in cut]
        return [*made, *again], places

    loop.Loop._samples = samples  # type: ignore[method-assign]


def _stale() -> None:
    def never(loss: Any, max_staleness: int) -> Any:
        return replace(loss, correction="none") if hasattr(loss, "correction") else loss

    config.decide_correction = never


def _position() -> None:
    inner = learner.pack

    def pack(*args: Any, **kwargs: Any) -> Any:
        row = inner(*args, **kwargs)
        if not row.runs:
            return row
        return replace(row, positions_T=row.positions_T + (row.uses_T == 1).long())

    learner.pack = pack


def _merge() -> None:
    inner = adapters._merge

    def merge(layer: Any, name: str) -> Any:
        base = layer.get_base_layer().state_dict()
        return {key: 2 * w - base[key] for key, w in inner(layer, name).items()}

    adapters._merge = merge


def _drop() -> None:
    IsolatedEnv._group_reward = lambda self, group: group  # type: ignore[method-assign]


PLANTS = {
    "a mask that is shifted by one": Plant(_mask, {}),
    "the credit of one turn for its neighbour": Plant(_neighbour, {"env": "Words"}),
    "KL against the wrong reference": Plant(
        _reference, {"loss.kl_coef": 0.05, "learner.lora_rank": 0, "loss": "gspo grpo dr_grpo"}
    ),
    "old log-probabilities of the wrong weights": Plant(
        _old,
        {"learner.minibatches": (2, 4), "loss.old_logprobs": "trainer", "loss": "grpo gspo"},
    ),
    "an aggregation of the other kind": Plant(
        _aggregation, {"loss.aggregation": "sequence_mean", "loss": "gspo grpo"}
    ),
    "a truncated episode that counts twice": Plant(
        _twice, {"credit.train_on_truncated": True, "env": "Words Masked Both Edited"}
    ),
    "stale episodes that are not corrected": Plant(
        _stale,
        {"supply.max_staleness": (1, 2), "loss.correction": "auto", "loss.old_logprobs": "trainer",
         "loss": "gspo grpo dr_grpo luspo"},
    ),
    "a shared prefix with the position of a sibling": Plant(
        _position, {"env": "lookup dialogue Words Both"}
    ),
    "an adapter that is merged twice": Plant(
        _merge, {"learner.lora_rank": 2, "engine.own_weights": True}
    ),
    "a reward that a child process drops": Plant(
        _drop, {"env": "Ranked", "rollout.isolation": "process"}
    ),
}  # fmt: skip
