"""Parses what `reset`, `step` and `group_reward` return; later stages never see the raw `info`."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, get_args

import numpy as np

from gspo_env.env.base import MAX_OBSERVATION, TextEnvironment, attribute
from gspo_env.errors import EnvironmentContractError, RefusedError
from gspo_env.tools.tool import Tool
from gspo_env.types import (
    LARGEST_REWARD,
    Message,
    Prompt,
    ResetInfo,
    Score,
    StepInfo,
)

logger = logging.getLogger(__name__)

ParsedStep = tuple[str, float, bool, bool, StepInfo]
Reader = tuple[Callable[[Any], Any], str]
"""A function that returns the parsed value or raises, and a description of what it expects."""
_REFUSED = (TypeError, ValueError, LookupError, OverflowError)
"""What a reader raises for a value that is not allowed."""
_TYPO = 0.91
"""Similarity from which a key of `info` is a typo; that of `score` and `scored` is 0.909."""


def parse_reset(env_id: str, result: object) -> tuple[str, ResetInfo]:
    """Parses the result of `reset`.

    Raises:
        EnvironmentContractError: It is not a string and a dict, or a key has an invalid value.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise fault(env_id, "reset() result", result, "a tuple (observation, info)")
    observation = read_value(env_id, "reset() observation", result[0], _TEXT)
    return observation, ResetInfo(**_read(env_id, "reset()", result[1], _RESET))


def parse_step(env_id: str, result: object, tokens: int | None = None) -> ParsedStep:
    """Parses the result of `step`.

    Args:
        env_id: Names the environment in errors.
        result: The result of `step`.
        tokens: The number of sampled tokens of the action; None if it was not sampled.

    Raises:
        EnvironmentContractError: A part has the wrong type or an invalid value.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        expected = "a tuple (observation, reward, terminated, truncated, info)"
        raise fault(env_id, "step() result", result, expected)
    observation, reward, terminated, truncated, info = result
    observation = read_value(env_id, "step() observation", observation, _TEXT)
    terminated = read_value(env_id, "step() terminated", terminated, _FLAG)
    truncated = read_value(env_id, "step() truncated", truncated, _FLAG)
    reward = read_value(env_id, "step() reward", reward, REWARD)
    parsed = StepInfo(**_read(env_id, "step()", info, STEP))
    for name in ("token_advantages", "token_mask") if info else ():
        values = getattr(parsed, name)
        if tokens is not None and values is not None and len(values) != tokens:
            expected = f"{tokens} values, one per sampled token"
            raise fault(env_id, f"step() info[{name!r}]", values, expected)
    return observation, reward, terminated, truncated, parsed


def read_prompt(env: TextEnvironment, info: ResetInfo | None = None) -> Prompt:
    """Returns the prompt of the episode that `reset` has just begun.

    The environment's `system_prompt` and `tools` are looked up through wrappers; `info` overrides
    them.

    Raises:
        EnvironmentContractError: The system prompt is not text, or a tool is not a `Tool`.
    """
    info = info or ResetInfo()
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    system, messages = attribute(env, "system_prompt", None), info.messages
    if messages and messages[0].role == "system":
        system, messages = messages[0].content, messages[1:]
    if system is not None:
        system = read_value(name, "system_prompt", system, _TEXT)
    tools = attribute(env, "tools", ()) if info.tools is None else info.tools
    tools = read_value(name, "tools", tools, _RESET["tools"])
    return Prompt(system=system, tools=tools, messages=messages)


def check_length(env: TextEnvironment, env_id: str, method: str, observation: str) -> None:
    """Rejects an observation that is longer than its space.

    Raises:
        EnvironmentContractError: It is too long.
    """
    most = getattr(getattr(env, "observation_space", None), "max_length", None)
    if most is not None and len(observation) > most:
        raise EnvironmentContractError(
            f"{env_id}: {method} observation is {len(observation)} characters long; expected at "
            f"most {most}: shorten it, or set another limit with --env-kwargs max_observation=N"
        )


def declared_score(env_id: str, env: TextEnvironment) -> Score | None:
    """Returns the score that an environment declares, looked up through its wrappers.

    Raises:
        EnvironmentContractError: `credit_score` is not a score.
    """
    score: Score | None = attribute(env, "credit_score", None)
    if score is not None and score not in get_args(Score):
        raise fault(env_id, "credit_score", score, f"one of {get_args(Score)}")
    return score


def read_value(env_id: str, what: str, value: object, reader: Reader) -> Any:
    """Reads a value that an environment or a reward gave.

    Raises:
        EnvironmentContractError: It is not what the reader expects.
    """
    read, expected = reader
    try:
        return read(value)
    except RefusedError as error:
        raise fault(env_id, what, value, f"{expected}; {error}") from None
    except _REFUSED:
        raise fault(env_id, what, value, expected) from None


def _read(env_id: str, method: str, info: object, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Parses the fields of an `info`; keys without a reader go to `extra`."""
    if not isinstance(info, dict):
        raise fault(env_id, f"{method} info", info, "a dict")
    read: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in info.items():
        reader = readers.get(key)
        if reader is None:
            extra[key] = value
            _warn_of_typo(env_id, method, key)
        elif value is not None:
            read[key] = read_value(env_id, f"{method} info[{key!r}]", value, reader)
    return {**read, "extra": extra} if extra else read


def _reward(value: Any) -> float:
    number = _number(value)
    if abs(number) > LARGEST_REWARD:
        raise ValueError
    return number


@lru_cache
def _warn_of_typo(env_id: str, method: str, key: Any) -> None:
    """Logs that a key of `info` is nearly one that training reads; once for each key."""
    readers = _RESET if method == "reset()" else STEP
    if near := difflib.get_close_matches(str(key), readers, n=1, cutoff=_TYPO):
        logger.warning(
            "%s: %s info has the key %r, which training does not read; do you mean %r?",
            *(env_id, method, key, near[0]),
        )


def _number(value: Any) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    kinds = (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _instance(
    kinds: type | tuple[type, ...], expected: str, convert: Callable[[Any], Any] = str
) -> Reader:
    def read(value: object) -> Any:
        if not isinstance(value, kinds):
            raise TypeError
        return convert(value)

    return read, expected


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    if len(value) > MAX_OBSERVATION:
        raise ValueError
    return str(value)


def _role(value: str) -> str:
    return {"user": "user", "tool": "tool"}[value]


def _parts(value: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return {name: _reward(value[name]) for name in value}


def _per_token(kind: type[float] | type[bool], value: Any) -> tuple[Any, ...]:
    values = np.asarray(value, dtype=np.float64)
    if values.ndim != 1 or not (np.abs(values) <= LARGEST_REWARD).all():
        raise ValueError
    return tuple(values.astype(kind).tolist())


def _conversation(value: Any) -> tuple[Message, ...]:
    messages = _read_messages(value)
    if not messages or messages[-1].role == "assistant":
        raise ValueError
    return messages


def _read_messages(value: Any) -> tuple[Message, ...]:
    from gspo_env.chat.messages import read_messages

    messages = tuple(read_messages(value))
    for message in messages:
        _text(message.content)
    return messages


def _messages(value: Any) -> tuple[Message, ...]:
    messages = _read_messages(value)
    if messages and messages[-1].role in ("user", "tool"):
        return messages
    roles = [message.role for message in messages]
    roles = roles[roles[:1] == ["system"] :]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError
    return messages


def _integer(least: int) -> Reader:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError
        return int(value)

    return read, f"an int of at least {least}"


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(text, str) and text for text in value):
        raise TypeError
    return tuple(value)


def _tools(value: Any) -> tuple[Tool, ...]:
    if not all(isinstance(tool, Tool) for tool in value):
        raise TypeError
    return tuple(value)


_TEXT: Reader = _text, "a str"
_FLAG = _instance((bool, np.bool_), "a bool", bool)
_KEY = _instance((str, int, np.integer), "a str or an int")
REWARD: Reader = _reward, f"a finite number up to {LARGEST_REWARD:g} in size"
PARTS: Reader = _parts, f"a dict of finite numbers by name, up to {LARGEST_REWARD:g} in size"
_TOKENS = "one finite number per sampled token"
_CHAT = (
    "messages of user and assistant in turn, assistant last, each with a role and a text, or a "
    "whole conversation with a user's or a tool's message last"
)
_REQUEST: dict[str, Reader] = {
    "tools": (_tools, "a list of gspo_env.Tool"),
    "max_tokens": _integer(1),
    "stop": (_texts, "a list of texts that are not empty"),
    "agent": _TEXT,
}
_RESET: dict[str, Reader] = {
    "state_key": _KEY,
    "task_key": _KEY,
    "messages": (_messages, _CHAT),
    **_REQUEST,
}
STEP: dict[str, Reader] = {
    "episodic_reward": REWARD,
    "success": _FLAG,
    "scored": _FLAG,
    "state_key": _KEY,
    "observation_role": (_role, "'user' or 'tool'"),
    "reward_parts": PARTS,
    "malformed_calls": _integer(0),
    "token_advantages": (partial(_per_token, float), _TOKENS),
    "token_mask": (partial(_per_token, bool), _TOKENS),
    "messages": (_conversation, "a whole conversation with a user's or a tool's message last"),
    **_REQUEST,
}


def fault(env_id: str, what: str, got: object, expected: str) -> EnvironmentContractError:
    """Returns the error for a value that breaks the contract."""
    kind = type(got).__name__
    if isinstance(got, str) and len(got) > 80:
        if len(got) > MAX_OBSERVATION:
            expected = f"at most {MAX_OBSERVATION:,} characters"
        kind, got = f"{kind} with {len(got):,} characters", got[:80]
    try:
        shown = repr(got)
    except Exception:  # a `__repr__` that raises is not a second fault
        shown = "a value"
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return EnvironmentContractError(
        f"{env_id}: {what} is {shown} of type {kind}, expected {expected}."
    )
