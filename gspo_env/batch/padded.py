"""Converts padded tensors of rollouts from other code to samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.credit.estimate import estimate
from gspo_env.credit.estimators import Outcome
from gspo_env.errors import BatchError
from gspo_env.types import BoolArray, Episode, FloatArray, Group, IntArray, Task, bare_episode


def from_padded(
    input_ids: Any,
    attention_mask: Any,
    response_mask: Any,
    *,
    rewards: Any = None,
    group_ids: Any = None,
    advantages: Any = None,
    token_advantages: Any = None,
    old_logprobs: Any = None,
    turn_ids: Any = None,
    estimator: Any = None,
) -> list[Sample]:
    """Makes samples for `Learner.update` from padded tensors, arrays or lists.

    Padding may be on either side. Credit is given in one of three ways: `rewards` with
    `group_ids`, which go through the estimator; `advantages` of sequences; or
    `token_advantages`, which reach the loss unchanged. Sequences without a response token are left
    out. The function is long because it describes and checks every argument.

    Args:
        input_ids: (B, T)
        attention_mask: (B, T) true on tokens that are not padding.
        response_mask: (B, T) true on tokens that the policy sampled.
        rewards: (B,) of episodes, or (B, K) of turns; values after a sequence's last turn are
            ignored.
        group_ids: (B,) equal for episodes of the same task.
        advantages: (B,)
        token_advantages: (B, T), read where `response_mask` is true.
        old_logprobs: (B, T) of the sampled tokens, each at the position of its token; a loss with
            `old_logprobs="engine"` takes them as pi_old.
        turn_ids: (B, T) turn of each response token, from 0; one turn by default.
        estimator: `gspo_env.credit.Outcome()` by default.

    Raises:
        BatchError: Shapes, masks, groups or turns do not fit together.

    Example:
        samples = from_padded(ids, attention, response, rewards=scores, group_ids=prompts)
        metrics = learner.update(samples)
    """
    ids = _array("input_ids", input_ids, None, np.int64)
    if ids.ndim != 2:
        raise BatchError(f"input_ids has shape {ids.shape}; expected (B, T)")
    real = _mask("attention_mask", attention_mask, ids.shape)
    model = _mask("response_mask", response_mask, ids.shape)
    given = 0 if turn_ids is None else _array("turn_ids", turn_ids, ids.shape, np.int64)
    turns = np.where(model, given, -1)
    _check_rows(real, model, turns)
    logprobs: FloatArray | None = None
    if old_logprobs is not None:
        logprobs = _array("old_logprobs", old_logprobs, ids.shape, np.float64)
        _check_finite("old_logprobs", logprobs[model])
    if sum(way is not None for way in (rewards, advantages, token_advantages)) != 1:
        raise BatchError("expected exactly one of rewards, advantages and token_advantages")
    if rewards is not None:
        credit = _from_rewards(rewards, group_ids, turns, estimator)
    elif advantages is not None:
        values = _array("advantages", advantages, ids.shape[:1], np.float64)
        credit = np.repeat(values[:, None], ids.shape[1], axis=1)
    else:
        credit = _array("token_advantages", token_advantages, ids.shape, np.float64)
    _check_finite("the advantages", credit[model])
    return [
        Sample(
            token_ids=ids[b][real[b]],
            turn_ids=turns[b][real[b]],
            advantages=credit[b][model[b]],
            engine_logprobs=None if logprobs is None else logprobs[b][model[b]],
        )
        for b in range(len(ids))
        if model[b].any()
    ]


def _from_rewards(rewards: Any, group_ids: Any, turns: IntArray, estimator: Any) -> FloatArray:
    """Computes the advantages by the estimator, (B, T)."""
    if group_ids is None:
        raise BatchError("rewards were given without group_ids; expected both")
    groups = _array("group_ids", group_ids, turns.shape[:1], np.int64)
    values = _array("rewards", rewards, None, np.float64)
    if values.ndim not in (1, 2) or len(values) != len(turns):
        raise BatchError(
            f"rewards has shape {values.shape}; expected ({len(turns)},) or ({len(turns)}, K)"
        )
    episodes = [_episode(b, row, values[b]) for b, row in enumerate(turns)]
    members = [np.flatnonzero(groups == key) for key in np.unique(groups)]
    batch = [
        Group(task=episodes[place[0]].task, episodes=tuple(episodes[b] for b in place))
        for place in members
    ]
    rows = estimate(batch, estimator or Outcome()).advantages
    credit = np.zeros(turns.shape)
    for place, row in zip(members, rows, strict=True):
        for b, advantage in zip(place, row, strict=True):
            is_model = turns[b] >= 0
            by_turn = len(advantage) == len(episodes[b].turns)
            credit[b, is_model] = advantage[turns[b, is_model]] if by_turn else advantage
    return credit


def _episode(place: int, turns: IntArray, rewards: FloatArray) -> Episode:
    """Makes the record that estimators read, with the lengths and rewards of turns."""
    count = int(turns.max(initial=-1)) + 1
    sizes = [int((turns == k).sum()) for k in range(count)]
    if rewards.ndim == 0:
        emitted = [0.0] * (count - 1) + [float(rewards)] if count else []
    elif len(rewards) < count:
        raise BatchError(
            f"rewards has {len(rewards)} turns; expected {count}, as turn_ids of sequence {place}"
        )
    else:
        emitted = rewards[:count].tolist()
    _check_finite(f"rewards of sequence {place}", np.array(emitted))
    return bare_episode(Task(env_id="batch", seed=place), sizes, emitted)


def _check_rows(real: BoolArray, model: BoolArray, turns: IntArray) -> None:
    for b in range(len(real)):
        places = np.flatnonzero(real[b])
        if (model[b] & ~real[b]).any():
            raise BatchError(f"response_mask of sequence {b} is true on padding")
        if len(places) and model[b, places[0]]:
            raise BatchError(
                f"the first token of sequence {b} is a response; expected a prompt before it"
            )
        ids = np.unique(turns[b][model[b]]).tolist()
        if ids != list(range(len(ids))):
            raise BatchError(
                f"turn_ids of sequence {b} are {ids}; expected 0, 1, ... without a gap"
            )


def _array(name: str, values: Any, shape: Sequence[int] | None, dtype: Any) -> Any:
    """Converts a list, an array or a tensor, with any device and gradient."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if dtype is np.int64 and array.dtype.kind not in "iu":
        raise BatchError(f"{name} has dtype {array.dtype}; expected integers")
    if shape is not None and array.shape != tuple(shape):
        raise BatchError(f"{name} has shape {array.shape}; expected {tuple(shape)}")
    return array.astype(dtype)


def _mask(name: str, values: Any, shape: Sequence[int]) -> BoolArray:
    array = _array(name, values, shape, np.float64)
    if not np.isin(array, (0, 1)).all():
        raise BatchError(f"{name} holds other values than 0 and 1")
    return np.asarray(array, dtype=bool)


def _check_finite(name: str, values: FloatArray) -> None:
    if not np.isfinite(values).all():
        raise BatchError(f"{name} hold NaN or infinity; expected finite numbers")
