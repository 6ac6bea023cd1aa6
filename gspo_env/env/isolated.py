"""An environment in its own process, which may hang or crash without harm to ours."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from gspo_env import errors
from gspo_env.env.base import Action, Options, ResetResult, StepResult, TextEnv, UnicodeText
from gspo_env.errors import EnvironmentCrashError, EnvironmentHangError, ForeignError
from gspo_env.tools.tool import Tool
from gspo_env.types import Episode, Group, Turn

ISOLATED = "GSPO_ENV_ISOLATED"
"""The environment variable that is set in the child."""
_START_SECONDS = 120.0
"""Seconds for the imports of a new process, in addition to the time of its environment."""
_CLOSE_SECONDS = 5.0
"""Seconds that `close` of the environment may take, and then the end of the killed process."""
_MAX_BYTES = 64 * 2**20
"""Maximum size of a message."""
_LOOK_SECONDS = 0.5
"""Seconds between two looks at whether the other process still runs."""

DECLARED = (
    *("system_prompt", "tools", "gives_outcome", "gives_reward", "outcome_if_cut", "credit_score"),
    *("takes_cut_actions", "max_turns", "num_tasks", "num_eval_tasks", "max_calls_per_turn"),
    *("rewards_by_agent", "expert_solves", "max_copies"),
)
"""Values of an environment that its process sends with each `reset`."""
FORWARDED = ("expert_action", "abandon", "group_reward", "snapshot", "restore")
"""Methods that run in the process of the environment, beside those of Gymnasium, if it has them."""
LOCAL = (
    *("blocking", "blocks", "limits_steps", "require_episode", "end_turn", "turns_played"),
    "count_tokens",
)
"""Names that are not sent: all calls wait for the process, and its `step` uses its own methods."""


class IsolatedEnv(TextEnv):
    """Plays an environment in a child process; messages are JSON, never pickles.

    A child that hangs or crashes is killed, and the next `reset` starts a new one. The child ends
    with the thread that started it. Keys of `info` that JSON cannot hold arrive as their `repr`.

    Args:
        spec: The environment, as for `make_env`; its class is imported in the child.
        kwargs: Its arguments.
        timeout: Seconds that one call may take.

    Raises:
        ConfigError: The environment does not take the arguments.
        UnknownEnvironmentError: Nothing has that name.
        EnvironmentHangError: A call took longer; the child is killed.
        EnvironmentCrashError: The child ended.
        ForeignError: The environment raised.
    """

    def __init__(
        self, spec: str, kwargs: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> None:
        """Starts the process and makes the environment."""
        self._spec, self._kwargs, self._timeout = spec, dict(kwargs or {}), timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins an episode, in a new process if the last one ended."""
        if self._process is None:
            self._start()
        (observation, info), declarations = self._call("reset", seed=seed, options=options)
        self._declare(declarations)
        return observation, _with_tools(info)

    def step(self, action: str) -> StepResult:
        """Takes a turn."""
        fields = vars(action) if isinstance(action, Action) else {}
        *result, info = self._call("step", action=str(action), **fields)
        observation, reward, terminated, truncated = result
        return observation, reward, terminated, truncated, _with_tools(info)

    def expert_action(self, noise: float = 0.0) -> Any:
        """Returns the demonstrator's next action."""
        if "expert_action" not in self._methods:
            raise NotImplementedError(f"{self._spec} has no expert_action")
        return self._call("expert_action", noise=noise)

    def abandon(self) -> None:
        """Frees what the running episode holds."""
        if self._process is not None and "abandon" in self._methods:
            self._call("abandon")

    def close(self) -> None:
        """Closes the environment and ends the process."""
        try:
            if self._process is not None:
                self._call("close", timeout=_CLOSE_SECONDS)
        finally:
            self.kill_process()

    def kill_process(self) -> None:
        """Ends the process at once; may be called from any thread while another one waits."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _exit_code(process)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gspo_env.env.child", str(descriptor), str(os.getpid())],
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the environment prints does not mix with the program's output
                env={**os.environ, ISOLATED: "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        timeout = None if self._timeout is None else self._timeout + _START_SECONDS
        arguments = {"spec": self._spec, "kwargs": self._kwargs, "path": sys.path}
        self._declare(self._call("make", timeout=timeout, **arguments))

    def _call(self, name: str, timeout: float | None = None, **arguments: Any) -> Any:
        process = self._process
        if process is None:
            raise EnvironmentCrashError(f"{name}: the process of the environment has ended")
        seconds = timeout or self._timeout or math.inf
        end, connection = time.monotonic() + seconds, self._connection
        try:
            send(connection, {"call": name, **arguments})
            while not connection.poll(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
                if time.monotonic() >= end:
                    raise TimeoutError
                if process.poll() is not None:  # others may hold its end open
                    raise EOFError
            reply = json.loads(connection.recv_bytes(_MAX_BYTES))
        except TimeoutError:
            self.kill_process()
            raise EnvironmentHangError(f"{name} did not return within {seconds:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            self.kill_process()
            code = _exit_code(process)
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            what = f" ({error})" if str(error) else ""
            raise EnvironmentCrashError(
                f"{name}: the process of the environment ended with {how}{what}"
            ) from None
        if "error" in reply:
            raise _error(*reply["error"])
        return reply["value"]

    def _declare(self, declarations: Mapping[str, Any]) -> None:
        """Takes over what the environment declares, and the optional methods that it has."""
        for name in DECLARED:
            setattr(self, name, declarations[name])
        self.tools = tuple(Tool(**tool) for tool in declarations["tools"])
        self.observation_space = UnicodeText(declarations["max_length"])
        self._methods = methods = declarations["methods"]
        self.group_reward = self._group_reward if "group_reward" in methods else None
        if "snapshot" in methods:
            self.snapshot = partial(self._call, "snapshot")
        if "restore" in methods:
            self.restore = lambda state: self._call("restore", state=state)

    def _group_reward(self, group: Group) -> Group:
        """Returns the group with the rewards, infos and endings that the environment gives it."""
        scored = read_group(self._call("group_reward", group=group))
        return replace(
            group,
            episodes=tuple(
                replace(old, turns=tuple(map(_scored, old.turns, new.turns)), ending=new.ending)
                for old, new in zip(group.episodes, scored.episodes, strict=True)
            ),
        )

    def __del__(self) -> None:
        """Ends the process of an environment that nobody closed."""
        self.kill_process()


def send(connection: Connection, message: object) -> None:
    """Writes a message.

    Raises:
        OSError: Nobody reads.
    """
    connection.send_bytes(json.dumps(message, default=_plain).encode())


def read_group(value: Any) -> Group:
    """Returns a group that the other process sent; its tools are descriptions."""

    def with_tools(episode: Episode) -> Episode:
        tools = tuple(Tool(**tool) for tool in episode.prompt.tools)
        return replace(episode, prompt=replace(episode.prompt, tools=tools))

    group = TypeAdapter(Group).validate_python(value)
    return replace(group, episodes=tuple(map(with_tools, group.episodes)))


def _scored(turn: Turn, scored: Turn) -> Turn:
    """Returns a turn with the reward of another one, and its `info` as far as it crosses."""
    info = replace(scored.info, tools=turn.info.tools, extra=turn.info.extra)
    return replace(turn, reward=scored.reward, info=info)


def _plain(value: Any) -> Any:
    """Returns what JSON can hold of a value; an object without such a form is its `repr`."""
    if isinstance(value, Tool):
        return describe_tool(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return list(value)
    return repr(value)[:1000]


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Waits for the end of a killed process; None if it lasts, as in a call to a lost disk."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_CLOSE_SECONDS)
    return None


def _error(name: str, text: str, where: str, trace: str) -> Exception:
    """Returns an error that the child raised; ours and `NotImplementedError` as themselves."""
    if name == "NotImplementedError":
        return NotImplementedError(text)
    if name in ("ConfigError", "EnvironmentContractError", "UnknownEnvironmentError"):
        error: Exception = getattr(errors, name)(text)
        return error
    return ForeignError(name, text, where, trace)


def _with_tools(info: dict[str, Any]) -> dict[str, Any]:
    """Returns the `info` with the tools that it lists."""
    if info.get("tools") is None:
        return info
    return {**info, "tools": [Tool(**tool) for tool in info["tools"]]}


def describe_tool(tool: Tool) -> dict[str, Any]:
    """Returns what another process needs to know of a tool, as the fields of `Tool`."""
    return {n: getattr(tool, n) for n in ("name", "description", "parameters", "strict")}
