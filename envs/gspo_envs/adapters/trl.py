"""Classes for TRL's `environment_factory`: `gspo-env train --env shop.py:Shop`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from gspo_env.env.base import Action, Options, ResetResult
from gspo_env.env.tool_env import Answer
from gspo_env.errors import ConfigError, EnvironmentContractError, raised_as
from gspo_env.redaction import clean
from gspo_env.runtime.loops import settle
from gspo_env.runtime.threads import foreign, log_once
from gspo_env.tools.json_calls import ToolCallError
from gspo_env.tools.request import read_action
from gspo_env.tools.tool import Tool
from gspo_env.types import ToolCall
from gspo_envs.adapters.foreign import PrivateRandom
from gspo_envs.data.dataset import DatasetEnv
from gspo_envs.data.rewards import Attempt
from gspo_envs.data.rows import Message, prompt_column

_NO_PROMPT = {"prompt": [{"role": "user", "content": ""}]}
"""TRL's row where the class makes the tasks."""
_NOT_TOOLS = ("reset", "get_reward")


class TRLEnv(DatasetEnv):
    """A class for `environment_factory`, played as `GRPOTrainer` of TRL 1.16 plays it.

    `reset` receives the columns of a row; the text that it returns is appended to the last message
    of the prompt. The other public methods are tools: what they return is shown as `str`, and what
    they raise as `{'error': '...'}`. An action without a call ends the episode. The reward is that
    of `get_reward`, added to `rewards`; without both, it is the attribute `reward`.

    Args:
        data: Rows, as for `DatasetEnv`; by default an empty prompt, where `reset` makes the tasks.
        rewards: Reward functions, as for `DatasetEnv`; a function of TRL also gets `environments`.
        settings: The other arguments of `DatasetEnv`. In turn `max_turns` no tool is called, so it
            is TRL's `max_tool_calling_iterations` + 1.

    Raises:
        ConfigError: A method lacks the types or the docstring of a tool.
    """

    factory: ClassVar[Callable[[], Any]]
    """The class, or a function that makes its instances."""
    rescore = None  # type: ignore[assignment]

    def __init__(self, data: Any = None, rewards: Any = (), **settings: Any) -> None:
        """Makes an instance, which plays all episodes."""
        self._instance = type(self).factory()
        kind = type(self._instance)
        self._methods = [
            name
            for name, _ in inspect.getmembers(kind, inspect.isfunction)
            if name not in _NOT_TOOLS and not name.startswith("_")
        ]
        specs = [*rewards] if isinstance(rewards, list | tuple) else [rewards]
        self._owns_reward = hasattr(kind, "get_reward") or not specs
        if self._owns_reward:
            specs.append(_own_reward(self._instance))
            if settings.get("weights"):
                settings["weights"] = [*settings["weights"], 1.0]
        waits = map(inspect.iscoroutinefunction, (getattr(kind, n, None) for n in dir(kind)))
        if any(waits):
            settings.setdefault("blocking", True)
        super().__init__([_NO_PROMPT] if data is None else data, specs, **settings)
        self._makes_tasks = data is None
        if self._makes_tasks:
            self.num_tasks = self.num_eval_tasks = None
        self._random: PrivateRandom | None = None
        self.tools = self._make_tools()

    def _make_tools(self) -> tuple[Tool, ...]:
        """Returns the functions of the argument `tools`, then the methods by name."""
        methods = [getattr(self._instance, name) for name in self._methods]
        return tuple(map(_tool, (*(tool.function for tool in self._functions), *methods)))

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Picks a row and resets the instance to it.

        Raises:
            ConfigError: The row does not exist or has no chat, or nothing gives a reward.
        """
        self._completion: list[Message] = []
        observation, info = super().reset(seed=seed, options=options)
        if self._makes_tasks:  # they are not those of the row
            info = {}
        return observation, info

    def parse_calls(self, action: str) -> list[ToolCall | ToolCallError]:
        """Returns the calls, those of asynchronous tools last, as TRL answers them."""
        act = action if isinstance(action, Action) else Action(action)
        message, _ = read_action(act, self.tools, act.message, in_reasoning=act.in_reasoning)
        self._completion.append(_write(message))
        return sorted(super().parse_calls(action), key=self._waits)

    def _read_prompt(self, index: int) -> list[Message]:
        columns = dict(self._row)
        if prompt_column(columns, self.column) not in columns:
            self._row = {**columns, **_NO_PROMPT}
        prompt = super()._read_prompt(index)
        self._plain = False
        self._random = PrivateRandom(int(self.np_random.integers(2**31)))
        with self._random.installed():
            shown = settle(self._instance.reset(**columns), "reset")
        if not (self._owns_reward and _lacks_reward(self._instance)):
            last = prompt[-1]
            return [*prompt[:-1], {**last, "content": last["content"] + _text(shown, "reset")}]
        raise ConfigError(
            f"{type(self._instance).__name__} has no get_reward() and sets no attribute reward; "
            "expected one of them, or --env-kwargs rewards=FILE.py:FUNCTION"
        )

    def _answer_calls(self, calls: list[ToolCall | ToolCallError]) -> list[Answer]:
        is_last = self.max_turns == self.turns_played + 1
        return [] if is_last else [self._answer_call(call) for call in calls]

    def _answer_call(self, call: ToolCall | ToolCallError) -> Answer:
        if isinstance(call, ToolCallError):
            return super()._answer_call(call)
        functions = {tool.name: tool.function for tool in self.tools}
        result: Any = {"error": f"Tool {call.name} not found."}
        is_error = True
        if call.name in functions:
            try:
                with self._privately():
                    result = settle(functions[call.name](**call.arguments), f"tool {call.name}")
                is_error = False
            except EnvironmentContractError:
                raise
            except Exception as error:  # a tool may raise anything; the policy reads it
                log_once(f"tool {call.name}", error, "the policy reads it, and ")
                result = {"error": foreign(error).text}
        text = clean(_text(result, call.name))
        self._completion.append({"role": "tool", "name": call.name, "content": text})
        return Answer(text, 0.0, is_error)

    def _waits(self, call: ToolCall | ToolCallError) -> bool:
        named = {t.name: t.function for t in self.tools}.get(getattr(call, "name", ""))
        return inspect.iscoroutinefunction(named)

    def _privately(self) -> contextlib.AbstractContextManager[None]:
        """Installs the generators of the episode, unless others would wait for a slow tool."""
        if self.blocking or self._random is None:
            return contextlib.nullcontext()
        return self._random.installed()

    def _attempt(self) -> Attempt:
        row = {name: value for name, value in self._row.items() if name != "prompt"}
        return replace(
            super()._attempt(),
            completion=tuple(self._completion),
            row={**row, "environments": self._instance},
        )


@cache
def environment_class(factory: Any) -> type[TRLEnv]:
    """Returns the environment that plays a class, under its name."""
    names = ("__module__", "__qualname__", "__doc__")
    about = {name: getattr(factory, name) for name in names}
    return type(factory.__name__, (TRLEnv,), {**about, "factory": factory})


def _own_reward(instance: Any) -> Callable[[Attempt], Any]:
    def reward(attempt: Attempt) -> Any:
        return instance.get_reward() if hasattr(instance, "get_reward") else instance.reward

    reward.__name__ = type(instance).__name__
    return reward


def _lacks_reward(instance: Any) -> bool:
    return not hasattr(instance, "get_reward") and not hasattr(instance, "reward")


def _tool(function: Callable[..., Any]) -> Tool:
    """Returns the tool of a method, with the schema that `transformers` shows of it.

    Raises:
        ConfigError: It has no schema.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    faults = (DocstringParsingException, TypeHintParsingException, NameError)
    with raised_as(ConfigError, f"tool {getattr(function, '__qualname__', function)}", *faults):
        schema = get_json_schema(function)["function"]
    name, about, parameters = (schema[key] for key in ("name", "description", "parameters"))
    return Tool(name=name, description=about, parameters=parameters, function=function)


def _write(message: Any) -> Message:
    """Returns an action as TRL passes it to reward functions."""
    written: Message = {"role": "assistant", "content": message.content}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return written


def _text(result: Any, name: str) -> str:
    """Returns what `reset` or a tool returned as text.

    Raises:
        EnvironmentContractError: It has an image.
    """
    if result is None and name == "reset":
        return ""
    if not isinstance(result, list):
        return str(result)
    kinds = [part.get("type") if isinstance(part, dict) else None for part in result]
    if "image" in kinds:
        raise EnvironmentContractError(f"{name} returned an image; expected text")
    is_content = bool(kinds) and set(kinds) == {"text"}
    return "".join(part["text"] for part in result) if is_content else str(result)
