"""The process of one environment; `gspo_env.env.isolated` starts it and sends it requests."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from gspo_env.chat.messages import read_message
from gspo_env.env.base import (
    MAX_TEXT_LENGTH,
    Action,
    TextEnv,
    TextEnvironment,
    attribute,
    overrides,
)
from gspo_env.env.info import parse_reset, parse_step, read_prompt
from gspo_env.env.isolated import DECLARED, FORWARDED, describe_tool, read_group, send
from gspo_env.env.registration import make_env
from gspo_env.runtime import loops
from gspo_env.runtime.processes import die_with_parent
from gspo_env.runtime.threads import call_env, foreign


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
            reply = {"value": call_env(getattr(host, request.pop("call")), **request)}
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
        return self.env.get_wrapper_attr("expert_action")(noise)

    def abandon(self) -> None:
        self.env.get_wrapper_attr("abandon")()

    def group_reward(self, group: Any) -> Any:
        reward = self.env.get_wrapper_attr("group_reward")
        return loops.settle(reward(read_group(group)), "group_reward()")

    def snapshot(self) -> str:
        return base64.b85encode(pickle.dumps(self.env.get_wrapper_attr("snapshot")())).decode()

    def restore(self, state: str) -> None:
        self.env.get_wrapper_attr("restore")(pickle.loads(base64.b85decode(state)))

    def close(self) -> None:
        self.env.close()

    def _declarations(self) -> dict[str, Any]:
        env = self.env
        declared = {n: attribute(env, n, getattr(TextEnv, n, None)) for n in DECLARED}
        return declared | {
            "tools": [describe_tool(tool) for tool in declared["tools"]],
            "max_length": getattr(env.observation_space, "max_length", MAX_TEXT_LENGTH),
            "methods": [name for name in FORWARDED if overrides(env, name)],
        }


def _sendable(result: Any) -> list[Any]:
    """Returns a result whose keys of `info` are texts and whose tools are their schemas."""
    *rest, info = result
    info = {str(key): value for key, value in info.items()}
    if info.get("tools") is not None:
        info["tools"] = [describe_tool(tool) for tool in info["tools"]]
    return [*rest, info]


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:3]))
