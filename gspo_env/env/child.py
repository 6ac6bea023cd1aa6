"""The process of one environment; `gspo_env.env.isolated` starts it and sends it requests."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from gspo_env.env.base import MAX_TEXT_LENGTH, Action, TextEnvironment, attribute
from gspo_env.env.info import parse_reset, parse_step, read_message, read_prompt
from gspo_env.env.isolated import send
from gspo_env.env.registration import make_env
from gspo_env.runtime import loops
from gspo_env.runtime.processes import die_with_parent
from gspo_env.runtime.threads import attempt, foreign

_DECLARATIONS = (
    *("gives_outcome", "outcome_if_cut", "credit_score", "num_tasks", "takes_cut_actions"),
    *("max_turns", "max_calls_per_turn", "gives_reward", "replays", "rewards_by_agent"),
)
"""Attributes of an environment that are sent with each `reset`, besides its prompt."""


def serve(descriptor: int, parent: int) -> None:
    """Answers requests until the connection closes.

    Args:
        descriptor: This process's end of the connection.
        parent: Process id of the parent, with which this process ends.
    """
    die_with_parent(parent)
    host, connection = _Host(), Connection(descriptor)
    while True:
        loops.idle(partial(_arrival, connection))
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            reply = {"value": attempt(getattr(host, request.pop("call")), **request)}
        except Exception as error:
            raised = foreign(error)
            reply = {"error": [raised.name, raised.text, raised.where, raised.trace]}
        send(connection, reply)


async def _arrival(connection: Connection) -> None:
    """Waits until there is something to read; tasks of an asynchronous environment go on."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection)


class _Host:
    """The environment, called with plain data."""

    env: TextEnvironment
    name = ""

    def make(self, spec: str, kwargs: dict[str, Any], path: list[str]) -> dict[str, Any]:
        sys.path[:] = path
        self.name = spec
        self.env = make_env(spec, **kwargs)
        return self._declarations()

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        result = self.env.reset(seed=seed, options=options)
        _, info = parse_reset(self.name, result)
        read_prompt(self.env, info)
        return [_sendable(result), self._declarations()]

    def step(self, action: str, message: dict[str, Any] | None = None, **fields: Any) -> Any:
        parsed = None if message is None else read_message(message)
        result = self.env.step(Action(action, message=parsed, **fields))
        parse_step(self.name, result)
        return _sendable(result)

    def expert_action(self, noise: float) -> Any:
        if not self.env.has_wrapper_attr("expert_action"):
            raise NotImplementedError(f"{self.name} has no expert_action")
        return self.env.get_wrapper_attr("expert_action")(noise)

    def close(self) -> None:
        self.env.close()

    def _declarations(self) -> dict[str, Any]:
        values = {name: attribute(self.env, name, None) for name in _DECLARATIONS}
        return {name: value for name, value in values.items() if value is not None} | {
            "system_prompt": attribute(self.env, "system_prompt", None),
            "tools": [_description(tool) for tool in attribute(self.env, "tools", ())],
            "max_length": getattr(self.env.observation_space, "max_length", MAX_TEXT_LENGTH),
        }


def _description(tool: Any) -> dict[str, Any]:
    return {name: getattr(tool, name, None) for name in ("name", "description", "parameters")}


def _sendable(result: Any) -> list[Any]:
    """Returns a result whose keys of `info` are texts and whose tools are their schemas."""
    *rest, info = result
    info = {str(key): value for key, value in info.items()}
    if info.get("tools") is not None:
        info["tools"] = [_description(tool) for tool in info["tools"]]
    return [*rest, info]


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:3]))
