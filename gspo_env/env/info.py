"""Reads what `reset` and `step` returned; later stages never see the raw `info`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.env.tools import Tool
from gspo_env.errors import EnvironmentContractError
from gspo_env.types import Message, Prompt, ResetInfo, StepInfo

ParsedStep = tuple[str, float, bool, bool, StepInfo]
Reader = Callable[[Any], Any]
"""Returns the value of a key, or raises `ValueError` with what is expected instead."""


def parse_reset(env_id: str, result: object) -> tuple[str, ResetInfo]:
    """Reads what `reset` returned.

    Raises:
        EnvironmentContractError: It is not a text and a dict, or a key has an impossible value.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise _fault(env_id, "reset() result", result, "a tuple (observation, info)")
    observation, info = result
    if not isinstance(observation, str):
        raise _fault(env_id, "reset() observation", observation, "a str")
    return observation, ResetInfo(**_read(env_id, "reset()", info, _RESET))


def parse_step(env_id: str, result: object, tokens: int | None = None) -> ParsedStep:
    """Reads what `step` returned.

    Args:
        env_id: Names the environment in errors.
        result: What `step` returned.
        tokens: The number of sampled tokens of the action; None if it was not sampled.

    Raises:
        EnvironmentContractError: A part has the wrong type or an impossible value.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        expected = "a tuple (observation, reward, terminated, truncated, info)"
        raise _fault(env_id, "step() result", result, expected)
    observation, reward, terminated, truncated, info = result
    if not isinstance(observation, str):
        raise _fault(env_id, "step() observation", observation, "a str")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise _fault(env_id, f"step() {name}", flag, "a bool")
    try:
        value = _number(reward)
    except ValueError as error:
        raise _fault(env_id, "step() reward", reward, str(error)) from None
    parsed = StepInfo(**_read(env_id, "step()", info, _STEP))
    for name in ("token_advantages", "token_mask"):
        values = getattr(parsed, name)
        if tokens is not None and values is not None and len(values) != tokens:
            expected = f"{tokens} values, one per sampled token"
            raise _fault(env_id, f"step() info[{name!r}]", values, expected)
    return observation, value, bool(terminated), bool(truncated), parsed


def read_prompt(env: TextEnvironment, info: ResetInfo | None = None) -> Prompt:
    """Returns what the policy is told in the episode that `reset` has just begun.

    The environment's `system_prompt` and `tools` are found through wrappers; `info` replaces them.
    """
    info = info or ResetInfo()
    system, messages = attribute(env, "system_prompt", None), info.messages
    if messages and messages[0].role == "system":
        system, messages = messages[0].content, messages[1:]
    tools = attribute(env, "tools", ()) if info.tools is None else info.tools
    return Prompt(system=system, tools=tuple(tools), messages=messages)


def try_out(env_id: str, env: TextEnvironment) -> None:
    """Plays one turn, so that a broken environment is found before anything is built on it.

    Raises:
        EnvironmentContractError: `reset` or `step` raised, or broke the contract.
    """
    method = "reset(seed=0)"
    try:
        parse_reset(env_id, env.reset(seed=0))
        method = "step('')"
        parse_step(env_id, env.step(""))
    except EnvironmentContractError:
        raise
    except Exception as error:
        raise EnvironmentContractError(
            f"{env_id}: {method} raised {type(error).__name__}: {error}."
        ) from error


def _read(env_id: str, method: str, info: object, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Returns the fields of an info; keys without a reader go to `extra`."""
    if not isinstance(info, dict):
        raise _fault(env_id, f"{method} info", info, "a dict")
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for key, value in info.items():
        reader = readers.get(key) if isinstance(key, str) else None
        if reader is None:
            extra[key] = value
        elif value is not None:
            try:
                fields[key] = reader(value)
            except ValueError as error:
                raise _fault(env_id, f"{method} info[{key!r}]", value, str(error)) from None
    if extra:
        fields["extra"] = extra
    return fields


def _number(value: object) -> float:
    if type(value) is not float:
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        number = isinstance(value, (int, float, np.integer, np.floating))
        if not number or isinstance(value, bool):
            raise ValueError("a finite number")
        try:
            value = float(value)  # type: ignore[arg-type]
        except OverflowError:
            value = math.inf
    if not math.isfinite(value):
        raise ValueError("a finite number")
    return value


def _instance(kinds: type | tuple[type, ...], expected: str, made: Reader = str) -> Reader:
    def read(value: object) -> Any:
        if not isinstance(value, kinds):
            raise ValueError(expected)
        return made(value)

    return read


def _role(value: object) -> str:
    if not isinstance(value, str) or value not in ("user", "tool"):
        raise ValueError("'user' or 'tool'")
    return value


def _parts(value: object) -> dict[str, float]:
    expected = "a dict of finite numbers by name"
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(expected)
    try:
        return {name: _number(number) for name, number in value.items()}
    except ValueError:
        raise ValueError(expected) from None


def _per_token(kind: type[float] | type[bool], value: object) -> tuple[Any, ...]:
    expected = "one finite number per sampled token"
    try:
        values = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(expected) from None
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(expected)
    return tuple(values.astype(kind).tolist())


def _messages(value: object) -> tuple[Message, ...]:
    expected = "messages of user and assistant in turn, each with a role and a text"
    if not isinstance(value, Sequence) or not all(isinstance(m, (Mapping, Message)) for m in value):
        raise ValueError(expected)
    pairs = [
        (m.role, m.content) if isinstance(m, Message) else (m.get("role"), m.get("content"))
        for m in value
    ]
    talk = [role for role, _ in pairs]
    talk = talk[talk[:1] == ["system"] :]
    if not all(isinstance(content, str) for _, content in pairs):
        raise ValueError(expected)
    if talk != ["user", "assistant"] * (len(talk) // 2):
        raise ValueError(f"{expected}, assistant last (the observation follows)")
    return tuple(Message(role=role, content=content) for role, content in pairs)


def _tools(value: object) -> tuple[Tool, ...]:
    if not isinstance(value, Sequence) or not all(isinstance(tool, Tool) for tool in value):
        raise ValueError("a list of gspo_env.Tool")
    return tuple(value)


_KEY = _instance((str, int, np.integer), "a str or an int")
_NAME = _instance(str, "a str")
_RESET: dict[str, Reader] = {
    "state_key": _KEY,
    "task_key": _KEY,
    "messages": _messages,
    "tools": _tools,
    "agent": _NAME,
}
_STEP: dict[str, Reader] = {
    "episodic_reward": _number,
    "success": _instance((bool, np.bool_), "a bool", bool),
    "state_key": _KEY,
    "observation_role": _role,
    "reward_parts": _parts,
    "token_advantages": partial(_per_token, float),
    "token_mask": partial(_per_token, bool),
    "agent": _NAME,
}


def _fault(env_id: str, what: str, got: object, expected: str) -> EnvironmentContractError:
    shown = repr(got)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return EnvironmentContractError(
        f"{env_id}: {what} is {shown} of type {type(got).__name__}, expected {expected}."
    )
