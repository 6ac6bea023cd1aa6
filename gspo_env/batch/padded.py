"""Converts padded tensors of rollouts from other code to samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_env.batch.sample import Sample
from gspo_env.credit.estimate import estimate
from gspo_env.credit.estimators import Outcome
from gspo_env.errors import BatchError
from gspo_env.types import (
    BoolArray,
    Ending,
    Episode,
    FloatArray,
    Group,
    IntArray,
    StopReason,
    Task,
    Turn,
)


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
    episode_ids: Any = None,
    estimator: Any = None,
) -> list[Sample]:
    """Makes samples for `Learner.update` from padded tensors, arrays or lists.

    Padding may be on either side. Credit is given in one of three ways: `rewards` with
    `group_ids`, which go through the estimator; `advantages` of sequences; or
    `token_advantages`, which reach the loss unchanged. Sequences without a response token are left
    out.

    Args:
        input_ids: (B, T)
        attention_mask: (B, T) true on tokens that are not padding.
        response_mask: (B, T) true on tokens that the policy sampled.
        rewards: (B,) of episodes, or (B, K) of turns; values after an episode's last turn are
            ignored. Rows of one episode have the same.
        group_ids: (B,) equal for episodes of the same task.
        advantages: (B,)
        token_advantages: (B, T), read where `response_mask` is true.
        old_logprobs: (B, T) of the sampled tokens, each at the position of its token; a loss with
            `old_logprobs="engine"` takes them as pi_old.
        turn_ids: (B, T) turn of each response token in its episode, from 0; by default each row is
            one turn.
        episode_ids: (B,) equal for the rows of one episode, whose turns are in order of time; by
            default each row is an episode.
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
    owners = np.arange(len(ids))
    if episode_ids is not None:
        owners = _array("episode_ids", episode_ids, ids.shape[:1], np.int64)
    rows = [np.flatnonzero(owners == owner) for owner in np.unique(owners)]
    turns = _turns(turn_ids, rows, model)
    _check_rows(real, model)
    _check_turns(rows, turns)
    logprobs = None
    if old_logprobs is not None:
        logprobs = _array("old_logprobs", old_logprobs, ids.shape, np.float64)
        _check_finite("old_logprobs", logprobs[model])
    if sum(way is not None for way in (rewards, advantages, token_advantages)) != 1:
        raise BatchError("expected exactly one of rewards, advantages and token_advantages")
    if rewards is not None:
        credit = _from_rewards(rewards, group_ids, rows, turns, estimator)
    elif advantages is not None:
        values = _array("advantages", advantages, ids.shape[:1], np.float64)
        credit = np.broadcast_to(values[:, None], ids.shape)
    else:
        credit = _array("token_advantages", token_advantages, ids.shape, np.float64)
    _check_finite("the advantages", credit[model])
    return _samples(ids, real, turns, credit, logprobs, owners)


def _turns(turn_ids: Any, rows: Sequence[IntArray], model: BoolArray) -> IntArray:
    """Returns the turn of each response token, -1 elsewhere: by default each row is one turn."""
    if turn_ids is not None:
        turns = _array("turn_ids", turn_ids, model.shape, np.int64)
    else:
        turns = np.zeros(model.shape, dtype=np.int64)
        for place in rows:
            spoke = model[place].any(axis=1)
            turns[place] = np.maximum(np.cumsum(spoke) - 1, 0)[:, None]
    return np.where(model, turns, -1)


def _samples(
    ids: IntArray,
    real: BoolArray,
    turns: IntArray,
    credit: FloatArray,
    logprobs: FloatArray | None,
    owners: IntArray,
) -> list[Sample]:
    model = turns >= 0
    return [
        Sample(
            token_ids=ids[b][real[b]],
            turn_ids=turns[b][real[b]],
            advantages=credit[b][model[b]],
            engine_logprobs=None if logprobs is None else logprobs[b][model[b]],
            episode=int(owners[b]),
        )
        for b in np.flatnonzero(model.any(axis=1))
    ]


def _from_rewards(
    rewards: Any, group_ids: Any, rows: Sequence[IntArray], turns: IntArray, estimator: Any
) -> FloatArray:
    """Computes the advantages by the estimator, (B, T)."""
    if group_ids is None:
        raise BatchError("rewards were given without group_ids; expected both")
    groups = _array("group_ids", group_ids, turns.shape[:1], np.int64)
    values = _array("rewards", rewards, None, np.float64)
    if values.ndim not in (1, 2) or len(values) != len(turns):
        raise BatchError(
            f"rewards has shape {values.shape}; expected ({len(turns)},) or ({len(turns)}, K)"
        )
    for name, array in (("rewards", values), ("group_ids", groups)):
        for place in rows:
            if len(np.unique(array[place], axis=0)) > 1:
                raise BatchError(
                    f"{name} of rows {place.tolist()} are {array[place].tolist()}; expected the "
                    "same, because they are one episode"
                )
    first = np.array([place[0] for place in rows])
    episodes = [_episode(place, turns[place], values[place[0]]) for place in rows]
    members = [np.flatnonzero(groups[first] == key) for key in np.unique(groups)]
    batch = [
        Group(task=episodes[m[0]].task, episodes=tuple(episodes[e] for e in m)) for m in members
    ]
    advantages = estimate(batch, estimator or Outcome()).advantages
    credit = np.zeros(turns.shape)
    of_episode = [values for row in advantages for values in row]
    for e, values_K in zip(np.concatenate(members).tolist(), of_episode, strict=True):
        turns_of_rows = turns[rows[e]]
        turn_N = turns_of_rows[turns_of_rows >= 0]
        by_turn = len(values_K) == len(episodes[e].turns)
        # values of tokens are in order of time, which the rows of an episode need not be
        index_N = turn_N if by_turn else np.argsort(np.argsort(turn_N, kind="stable"))
        rows_N, columns_N = np.nonzero(turns_of_rows >= 0)
        credit[rows[e][rows_N], columns_N] = values_K[index_N]
    return credit


def _episode(place: IntArray, turns: IntArray, rewards: FloatArray) -> Episode:
    """Makes the record that estimators read, with the lengths and rewards of turns.

    Args:
        place: The rows of the episode.
        turns: (rows, T)
        rewards: () or (K,)
    """
    count = int(turns.max(initial=-1)) + 1
    sizes = [int((turns == k).sum()) for k in range(count)]
    if rewards.ndim == 0:
        emitted = [0.0] * (count - 1) + [float(rewards)] if count else []
    elif len(rewards) < count:
        raise BatchError(
            f"rewards has {len(rewards)} turns; expected {count}, as turn_ids of {_rows(place)}"
        )
    else:
        emitted = rewards[:count].tolist()
    _check_finite(f"rewards of {_rows(place)}", np.array(emitted))
    return bare_episode(Task(env_id="batch", seed=int(place[0])), sizes, emitted)


def bare_episode(
    task: Task,
    lengths: Sequence[int],
    rewards: Sequence[float],
    state_keys: Sequence[str | None] = (),
    texts: Sequence[str] = (),
) -> Episode:
    """Returns an episode with only the fields of its K turns that advantage estimators read.

    Args:
        task: Its task.
        lengths: (K,) sampled tokens of each turn.
        rewards: (K,) reward of each turn; their sum is the outcome.
        state_keys: (K,) equal for equal states; none by default.
        texts: (K,) the actions; all equal by default.
    """
    keys = state_keys or [None] * len(lengths)
    actions = texts or [""] * len(lengths)
    turns = tuple(
        Turn(
            action_ids=(0,) * length,
            logprobs=(0.0,) * length,
            text=text,
            observation="",
            reward=reward,
            state_key=key,
        )
        for length, reward, key, text in zip(lengths, rewards, keys, actions, strict=True)
    )
    return Episode(
        task=task,
        turns=turns,
        ending=Ending(reason=StopReason.TERMINATED),
    )


def _rows(place: IntArray) -> str:
    return f"sequence {place[0]}" if len(place) == 1 else f"sequences {place.tolist()}"


def _check_rows(real: BoolArray, model: BoolArray) -> None:
    for b in range(len(real)):
        places = np.flatnonzero(real[b])
        if (model[b] & ~real[b]).any():
            raise BatchError(f"response_mask of sequence {b} is true on padding")
        if len(places) and model[b, places[0]]:
            raise BatchError(
                f"the first token of sequence {b} is a response; expected a prompt before it"
            )


def _check_turns(rows: Sequence[IntArray], turns: IntArray) -> None:
    for place in rows:
        by_row = [np.unique(turns[b][turns[b] >= 0]) for b in place]
        ids = sorted(np.concatenate(by_row).tolist())
        if ids != list(range(len(ids))):
            raise BatchError(
                f"turn_ids of {_rows(place)} are {ids}; expected 0, 1, ... without a gap, each in "
                "one sequence"
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
