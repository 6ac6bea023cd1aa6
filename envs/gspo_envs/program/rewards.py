"""Rewards of a program's episode: what it posts, what it returns, and what functions say of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_env.errors import EnvironmentContractError
from gspo_env.types import Message
from gspo_envs.data.rewards import Attempt
from gspo_envs.data.rows import Message as PlainMessage

Exchange = tuple[tuple[Message, ...], Message]
"""The conversation of a request, and the answer."""


class TurnRewards:
    """Rewards that the program posts for the turn whose step has not returned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: str | None = None
        self._sum: float | None = None

    def begin(self, completion: str) -> None:
        """Takes rewards for this answer from now on."""
        with self._lock:
            self._open, self._sum = completion, None

    def post(self, completion: str, reward: float) -> None:
        """Adds a reward; called in the thread of the address.

        Raises:
            LateRewardError: The step of this answer has returned.
        """
        from gspo_env.serving import LateRewardError

        with self._lock:
            if completion != self._open:
                raise LateRewardError(
                    f"the turn of {completion!r} is over; expected its reward before the next "
                    "request of the program and before its end"
                )
            self._sum = (self._sum or 0.0) + reward

    def finish(self) -> float | None:
        """Returns the sum, or None without any; later rewards of the answer are late."""
        with self._lock:
            self._open = None
            return self._sum


def read_result(value: Any) -> tuple[float | None, bool | None, dict[str, float]]:
    """Reads the result of a program: a number, true or false, a dictionary, or no reward.

    Returns:
        The reward, None without one; whether the episode succeeded, if the result says so; and
        further numbers.

    Raises:
        EnvironmentContractError: A number is not finite, or "success" is neither true nor false.
    """
    if isinstance(value, bool):
        return float(value), value, {}
    if (number := _number("the result", value)) is not None:
        return number, None, {}
    if not isinstance(value, Mapping):
        return None, None, {}
    success = value.get("success")
    if success is not None and not isinstance(success, bool):
        raise EnvironmentContractError(
            f"Program: the result's 'success' is {success!r}, expected true or false."
        )
    numbers = {
        str(name): number
        for name, item in value.items()
        if name != "success" and (number := _number(f"the result's {name!r}", item)) is not None
    }
    reward = numbers.pop("reward", None)
    return 0.0 if reward is None and success is not None else reward, success, numbers


def _number(what: str, value: Any) -> float | None:
    """Returns a number, or None for other values."""
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvironmentContractError(f"Program: {what} is {value!r}, expected a finite number.")
    return number


def to_attempt(
    exchanges: Sequence[Exchange], row: Mapping[str, Any], token_ids: tuple[int, ...], result: Any
) -> Attempt:
    """Returns an episode as reward functions get it.

    The prompt is the first request. The completion has all answers in the order of time, and
    between them the messages of each request that the conversation before it did not have.
    """
    prompt, completion = exchanges[0][0], list[Message]()
    before = prompt
    for messages, answer in exchanges:
        shared = _common(before, messages)
        completion += [*messages[shared:], answer]
        before = (*messages, answer)
    return Attempt(
        prompt=tuple(map(_plain, prompt)),
        completion=tuple(map(_plain, completion)),
        row=row,
        token_ids=token_ids,
        result=result,
    )


def _common(before: Sequence[Message], messages: Sequence[Message]) -> int:
    """Returns how many messages both have in common at the start; an answer is equal to itself."""
    count = 0
    for one, two in zip(before, messages, strict=False):
        same = one.role == two.role and (one.role == "assistant" or one.content == two.content)
        if not same:
            break
        count += 1
    return count


def _plain(message: Message) -> PlainMessage:
    return {"role": message.role, "content": message.content}
