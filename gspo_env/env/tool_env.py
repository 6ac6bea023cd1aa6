"""An environment whose actions call tools; a failed call has an error as its observation."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Sequence
from datetime import date, time, timedelta
from enum import Enum
from functools import cached_property
from numbers import Number
from pathlib import PurePath
from typing import Any, ClassVar, NamedTuple, Self
from uuid import UUID

import numpy as np

from gspo_env.env.base import Action, StepResult, TextEnv
from gspo_env.errors import (
    ConfigError,
    EnvironmentContractError,
    EnvironmentCrashError,
    SandboxUnavailableError,
)
from gspo_env.redaction import clean
from gspo_env.runtime.loops import settle
from gspo_env.runtime.threads import foreign, log_once
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.json_calls import ToolCallError
from gspo_env.tools.tool import Tool, as_tool, mark, place_of, tool_methods
from gspo_env.types import ToolCall

_TEXTS = (
    str,
    Number,
    np.generic,
    tuple,
    set,
    frozenset,
    date,
    time,
    timedelta,
    UUID,
    Enum,
    PurePath,
)
"""Types of a tool's result whose `str` is a text for the policy."""


class ToolEnv(TextEnv):
    """A text environment with its `@tool` methods, and the functions of `tools`, as tools.

    A subclass may list typed, documented functions: `tools = [price]`.

    The observation after a tool call is the tool's result or `Error: ...`. An action without a call
    goes to `on_final`, and so does every action if there are no tools. A subclass's `reset` calls
    `super().reset(seed=seed, options=options)` first.
    """

    max_calls_per_turn: int = 1
    """Maximum calls in one action; with more, none is made and the observation is an error."""
    error_reward: float = 0.0
    """Reward of the turn for each malformed, refused or failed call."""

    _tool_functions: ClassVar[Sequence[Any]] = ()
    """The functions that the class lists as `tools`."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Takes the functions that the class lists as `tools`."""
        super().__init_subclass__(**keywords)
        if isinstance(functions := vars(cls).get("tools"), (list, tuple)):
            cls._tool_functions = tuple(functions)
            delattr(cls, "tools")  # the property has them, with the methods

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Checks the tools, so that a fault blocks no other class of the file.

        Raises:
            ConfigError: A tool cannot be used.
        """
        cls.declared_tools()
        return super().__new__(cls)

    @classmethod
    def declared_tools(cls) -> tuple[Tool, ...]:
        """Returns the tools of the class, not bound to an environment, base classes first.

        Raises:
            ConfigError: A tool cannot be used, or two have one name.
        """
        return cls._tools(None)

    @cached_property
    def tools(self) -> tuple[Tool, ...]:  # type: ignore[override]
        """The tools, bound to this environment."""
        return type(self)._tools(self)

    @classmethod
    def _tools(cls, instance: object) -> tuple[Tool, ...]:
        methods = tool_methods(cls)
        functions = [f if isinstance(f, Tool) else as_tool(mark(f)) for f in cls._tool_functions]
        decorated = [each.function for each in methods]
        functions = [f for f in functions if not any(f.function is g for g in decorated)]
        names = [each.name for each in (*methods, *functions)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"{cls.__name__} has two tools {min(twice)!r}; expected a name of its own for each."
            )
        bound = methods if instance is None else tool_methods(cls, instance)
        return (*bound, *functions)

    def step(self, action: str) -> StepResult:
        """Calls the tools of an action, or passes the action to `on_final`.

        Raises:
            EnvironmentContractError: The episode has ended or has not begun.
        """
        self.require_episode()
        calls = self.parse_calls(action)
        info: dict[str, Any] = {}
        if calls:
            answers = self._answer_calls(calls)
            # how much a tool returns is often not known to its author
            longest = self.observation_space.max_length
            observation = "\n".join([answer.text for answer in answers])[:longest]
            reward = sum([self._reward(answer) for answer in answers])
            info["observation_role"] = "tool"
            if errors := sum([answer.error for answer in answers]):
                info["tool_errors"] = errors
            if malformed := sum([isinstance(call, ToolCallError) for call in calls]):
                info["malformed_calls"] = malformed
            terminated = self._ended
        else:
            observation, reward, terminated = self._final(action)
        terminated, truncated = self.end_turn(terminated)
        info.update(self.step_info(terminated, truncated))
        return observation, reward, terminated, truncated, info

    def parse_calls(self, action: str) -> list[ToolCall | ToolCallError]:
        """Returns the tool calls of an action, malformed ones included; none without tools."""
        if not self.tools:
            return []
        act = action if isinstance(action, Action) else Action(action)
        return parse_tool_calls(act, self.tools, act.message, in_reasoning=act.in_reasoning)

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Returns observation, reward and whether the episode ends, for an action without calls."""
        raise NotImplementedError(f"{type(self).__name__} must define on_final()")

    def _final(self, action: str) -> tuple[str, float, bool]:
        result: object = self.on_final(action)
        if not isinstance(result, tuple) or len(result) != 3:
            raise EnvironmentContractError(
                f"{type(self).__name__}: on_final() returned {reprlib.repr(result)}, expected a "
                "tuple (observation, reward, terminated); step_info() adds keys to info."
            )
        return result

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        """Returns the turn's reward for a call that succeeded; its arguments are validated."""
        return 0.0

    def on_tool_error(self, message: str) -> float:
        """Returns the turn's reward for a call that did not succeed."""
        return self.error_reward

    def step_info(self, terminated: bool, truncated: bool) -> dict[str, Any]:
        """Returns additional entries of the step's `info`."""
        return {}

    def _reward(self, answer: Answer) -> float:
        if not isinstance(answer.reward, Number):
            hook = "on_tool_error" if answer.error else "on_tool_result"
            got = f"{hook}() returned {reprlib.repr(answer.reward)}"
            raise EnvironmentContractError(f"{type(self).__name__}: {got}, expected a reward.")
        return answer.reward

    def end_episode(self) -> None:
        """Ends the episode after this turn; for tools to call."""
        self._ended = True

    def _answer_calls(self, calls: list[ToolCall | ToolCallError]) -> list[Answer]:
        if len(calls) > self.max_calls_per_turn:
            most = f"at most {self.max_calls_per_turn} may be made"
            return [self._error(f"{len(calls)} tool calls in one turn, {most}.")]
        return [self._answer_call(call) for call in calls]

    def _answer_call(self, call: ToolCall | ToolCallError) -> Answer:
        if isinstance(call, ToolCallError):
            return self._error(call.message)
        named = [tool for tool in self.tools if tool.name == call.name]
        if not named:
            return self._error(self._unknown_tool(call.name))
        tool = named[0]
        try:
            arguments = tool.validate(call.arguments)
        except ConfigError as error:
            return self._error(str(error))
        try:
            text = _as_text(tool, settle(tool.function(**arguments), f"tool {tool.name}"))
        except (EnvironmentContractError, EnvironmentCrashError, SandboxUnavailableError):
            raise  # the episode is lost
        except Exception as error:  # a tool may raise anything; the policy reads it
            failure = foreign(error)
            log_once(f"tool {tool.name}", error, "the policy reads it, and ")
            return self._error(f"{tool.name} failed: {failure.name}: {failure.text}")
        reward = self.on_tool_result(ToolCall(name=tool.name, arguments=arguments), text)
        return Answer(text, reward, error=False)

    def _unknown_tool(self, name: str) -> str:
        names = [tool.name for tool in self.tools]
        near = difflib.get_close_matches(name[:64], names, n=3) or names
        return f"unknown tool {clean(name[:64])!r}, tools are: {', '.join(near) or 'none'}."

    def _error(self, message: str) -> Answer:
        return Answer(f"Error: {clean(message)}", self.on_tool_error(message), error=True)


class Answer(NamedTuple):
    """The answer to a tool call."""

    text: str
    reward: float
    error: bool


def _as_text(tool: Tool, result: object) -> str:
    """Returns the text of a tool's result.

    Raises:
        EnvironmentContractError: It is none, such as an image.
    """
    if isinstance(result, (dict, list)):
        return clean(json.dumps(result, ensure_ascii=False))
    if result is not None and not isinstance(result, _TEXTS):
        raise EnvironmentContractError(
            f"tool {place_of(tool.function)}: its result is of type {type(result).__name__}, "
            "expected text, a number, None, or a dict or list of these."
        )
    return clean(str(result))
