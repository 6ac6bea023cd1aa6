"""An environment in a process of its own, which may hang or crash without harm to ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from gspo_env import errors
from gspo_env.env.base import Action, Options, ResetResult, StepResult, TextEnv, UnicodeText
from gspo_env.env.pipe import receive, send
from gspo_env.env.tools import Tool
from gspo_env.errors import EnvironmentCrashError, EnvironmentHangError, ForeignError

ISOLATED = "GSPO_ENV_ISOLATED"
"""Variable of the process environment that is set in the child."""
_START = 120.0
"""Seconds for the imports of a new process, in addition to the time of its environment."""
_CLOSE = 5.0
"""Seconds that `close` of the environment may take before its process is killed, and the end of a
killed process."""


class IsolatedEnv(TextEnv):
    """Plays an environment in a child process; what crosses is JSON, never a pickle.

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
        self._pipes = (-1, -1)
        self._start()

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins an episode, in a new process if the last one ended."""
        if self._process is None:
            self._start()
        (observation, info), told = self._ask("reset", seed=seed, options=options)
        self._learn(told)
        return observation, _with_tools(info)

    def step(self, action: str) -> StepResult:
        """Takes a turn."""
        act = action if isinstance(action, Action) else Action(action)
        observation, reward, terminated, truncated, info = self._ask(
            "step",
            action=str(act),
            token_ids=[int(i) for i in act.token_ids],
            message=act.message,
            finish_reason=act.finish_reason,
            prompt_tokens=act.prompt_tokens,
        )
        return observation, reward, terminated, truncated, _with_tools(info)

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the demonstrator's next action."""
        return str(self._ask("expert_action", noise=noise))

    def close(self) -> None:
        """Closes the environment and ends the process."""
        try:
            if self._process is not None:
                self._ask("close", timeout=_CLOSE)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the process at once; may be called from any thread while another one waits."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _exit_code(process)

    def _start(self) -> None:
        ours, theirs = os.pipe(), os.pipe()
        command = [sys.executable, "-m", "gspo_env.env.child"]
        self._release()
        try:
            self._process = subprocess.Popen(
                [*command, str(ours[0]), str(theirs[1]), str(os.getpid())],
                pass_fds=(ours[0], theirs[1]),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the environment prints does not mix with the program's output
                env={**os.environ, ISOLATED: "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        finally:
            os.close(ours[0])
            os.close(theirs[1])
            self._pipes = ours[1], theirs[0]
        seconds = None if self._timeout is None else self._timeout + _START
        make = {"spec": self._spec, "kwargs": self._kwargs, "path": sys.path}
        self._learn(self._ask("make", timeout=seconds, **make))

    def _ask(self, call: str, timeout: float | None = None, **arguments: Any) -> Any:
        process = self._process
        if process is None:
            raise EnvironmentCrashError(f"{call}: the process of the environment has ended")
        seconds = timeout or self._timeout
        try:
            send(self._pipes[0], {"call": call, **arguments})
            reply = receive(self._pipes[1], seconds, lambda: process.poll() is None)
        except TimeoutError:
            self.kill()
            raise EnvironmentHangError(f"{call} did not return within {seconds:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            self.kill()
            code = _exit_code(process)
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            what = f", after it sent {error}" if isinstance(error, ValueError) else ""
            raise EnvironmentCrashError(
                f"{call}: the process of the environment ended with {how}{what}"
            ) from None
        if "error" in reply:
            raise _error(*reply["error"])
        return reply["value"]

    def _learn(self, told: Mapping[str, Any]) -> None:
        """Takes what the environment declares."""
        for name, value in told.items():
            setattr(self, name, value)
        self.tools = tuple(described_tool(**tool) for tool in told["tools"])
        self.observation_space = UnicodeText(told["longest"])

    def _release(self) -> None:
        for pipe in self._pipes:
            if pipe >= 0:
                os.close(pipe)
        self._pipes = (-1, -1)

    def __del__(self) -> None:
        """Ends the process of an environment that nobody closed."""
        self.kill()
        self._release()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Waits for the end of a killed process; None if it lasts, as in a call to a lost disk."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_CLOSE)
    return None


def _error(name: str, text: str, where: str, trace: str) -> Exception:
    """Returns an error that the child raised; ours and `NotImplementedError` as themselves."""
    kinds = ("ConfigError", "EnvironmentContractError", "UnknownEnvironmentError")
    if name in kinds:
        error: Exception = getattr(errors, name)(text)
        return error
    return (
        NotImplementedError(text)
        if name == "NotImplementedError"
        else ForeignError(name, text, where, trace)
    )


def _with_tools(info: dict[str, Any]) -> dict[str, Any]:
    """Returns the `info` with the tools that it lists."""
    if info.get("tools") is None:
        return info
    return {**info, "tools": [described_tool(**tool) for tool in info["tools"]]}


def described_tool(
    name: str, description: str, parameters: dict[str, Any], strict: bool = False
) -> Tool:
    """Returns a tool that the policy reads; the process of its environment calls it."""
    return Tool(
        name=name,
        description=description,
        parameters=parameters,
        function=_elsewhere,
        validator=TypeAdapter(dict[str, Any]),
        strict=strict,
    )


def _elsewhere(**arguments: Any) -> str:
    raise NotImplementedError(
        "the tools of an environment in another process are called by its step()"
    )
