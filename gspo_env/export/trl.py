"""Environments for `GRPOTrainer` of TRL: `environment_factory`, its rows and its reward function.

    Story = environment_class("gspo/Story-v0")
    GRPOTrainer(..., environment_factory=Story, reward_funcs=reward,
                train_dataset=Dataset.from_list(rows(Story, seeds(1000))))

A tool of the environment is a method; its other actions are the argument of the method `act`,
unless a text without a call ends the episode: that text is the completion's last message, which
`reward` plays. A completion that TRL cuts is an episode that the rollout cut.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from gspo_env.errors import ConfigError, EnvironmentContractError
from gspo_env.export.limits import look
from gspo_env.export.stepper import Stepper, conversation, record
from gspo_env.export.stepper import seeds as seeds
from gspo_env.runtime.threads import log_once
from gspo_env.tools.tool import Tool, format_tool_call

_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict}
_RESERVED = ("reset", "get_reward")
_OVER = "The episode has ended."


class TRLEnvironment:
    """Base of the classes that `environment_class` makes."""

    _env: ClassVar[str | type]
    _env_kwargs: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        """Makes the environment, which plays one completion after another."""
        self._stepper = Stepper(self._env, **self._env_kwargs)

    def reset(self, *, seed: int | None = None, **row: Any) -> str:
        """Begins the episode of a row and returns its first observation.

        Raises:
            ConfigError: The row has no seed, so the completions of a group would differ in tasks.
        """
        if seed is None:
            raise ConfigError("the row has no column `seed`; expected train_dataset of rows(...)")
        return conversation(self._stepper.reset(seed))[-1].content

    def _act(self, action: str) -> str:
        if self._stepper.now is None:
            return _OVER
        now = self._stepper.step(action)
        if now is not None and (now.info.messages is not None or now.info.tools is not None):
            error = EnvironmentContractError("its conversation or tools change during the episode")
            log_once(type(self).__name__, error, "TRL cannot follow it: the policy reads on, and ")
        return self._stepper.observation

    def _finish(self, completion: Sequence[Any]) -> dict[str, Any] | None:
        """Plays the last message, and returns the record of the episode; None if it failed."""
        last = completion[-1] if completion else {}
        is_text = last.get("role") == "assistant" and not last.get("tool_calls")
        if is_text and self._stepper.now is not None:
            self._act(last.get("content") or "")
        episode = self._stepper.cut()
        return None if episode is None or episode.failed else record(episode)


def environment_class(env: str | type, **env_kwargs: Any) -> type[TRLEnvironment]:
    """Returns the class for `environment_factory`.

    Args:
        env: A registered id, `FILE.py:CLASS`, `MODULE:CLASS` or a class.
        env_kwargs: Arguments of the environment.

    Raises:
        ConfigError: A tool has a name that TRL reserves.
    """
    facts = look(env, env_kwargs)
    methods: dict[str, Any] = {tool.name: _method(tool) for tool in facts.tools}
    if facts.goes_on:
        methods["act"] = _method(_ACT, lambda arguments: str(arguments["action"]))
    if reserved := [n for n in methods if n in _RESERVED or n.startswith("_")]:
        raise ConfigError(f"the tool {reserved[0]!r} has a name that TRL reserves; rename it")
    name = (env if isinstance(env, str) else env.__name__).rpartition("/")[2].rpartition(":")[2]
    about = {"_env": env, "_env_kwargs": env_kwargs, "__doc__": f"{name}, for TRL."}
    return type(name.partition("-")[0], (TRLEnvironment,), {**methods, **about})


def rows(kind: type[TRLEnvironment], seeds: Iterable[int]) -> list[dict[str, Any]]:
    """Returns the rows of `train_dataset`: the prompt up to the first observation, and the seed."""
    from gspo_env.chat.messages import write_message

    stepper, written = Stepper(kind._env, **kind._env_kwargs), []
    for seed in seeds:
        messages = [write_message(message) for message in conversation(stepper.reset(seed))]
        written.append({"prompt": [*messages[:-1], {**messages[-1], "content": ""}], "seed": seed})
    stepper.close()
    return written


def reward(
    environments: Sequence[TRLEnvironment],
    completions: Sequence[Any],
    *,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Ends the episodes and returns their outcomes; None for one whose environment failed."""
    records = [env._finish(done) for env, done in zip(environments, completions, strict=True)]
    if log_extra is not None:
        for name in ("turn_rewards", "reward_parts", "success", "stop_reason"):
            log_extra(name, [str((each or {}).get(name)) for each in records])
    for each in records:
        if log_metric is not None and each is not None:
            log_metric("success", float(each["success"]))
            for name, value in each["reward_parts"].items():
                log_metric(f"reward_parts/{name}", value)
    return [None if each is None else each["outcome"] for each in records]


_ACT = Tool(
    name="act",
    description="Take your next action; the answer is what follows it.",
    parameters={
        "properties": {"action": {"type": "string", "description": "The text of the action."}},
        "required": ["action"],
    },
)


def _method(tool: Tool, write: Callable[[dict[str, Any]], str] | None = None) -> Any:
    """Returns the method of a tool, of which TRL reads the types and the docstring."""

    def method(self: TRLEnvironment, **arguments: Any) -> str:
        return self._act(write(arguments) if write else format_tool_call(tool.name, arguments))

    required = tool.parameters.get("required", ())
    properties = tool.parameters.get("properties", {})
    method.__annotations__ = {name: _type(schema) for name, schema in properties.items()}
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, schema in properties.items():
        default = inspect.Parameter.empty if name in required else schema.get("default")
        annotation = method.__annotations__[name]
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    method.__name__ = method.__qualname__ = tool.name
    described = [f"    {n}: {_about(n, schema)}" for n, schema in properties.items()]
    about = " ".join((tool.description or tool.name).split())
    method.__doc__ = "\n".join([about, *(["", "Args:", *described] if described else [])])
    return method


def _type(schema: dict[str, Any]) -> Any:
    if schema.get("type") == "array":
        return list[_type(schema.get("items", {}))]  # type: ignore[misc]
    return _TYPES.get(str(schema.get("type")), Any)


def _about(name: str, schema: dict[str, Any]) -> str:
    text = " ".join(str(schema.get("description") or name).split())
    return f"{text} (choices: {json.dumps(schema['enum'])})" if "enum" in schema else text
