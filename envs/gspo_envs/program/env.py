"""Any program that asks a language model over HTTP, as an environment."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gspo_env.env.base import (
    MAX_OBSERVATION,
    Action,
    Options,
    ResetResult,
    StepResult,
    TextEnv,
    UnicodeText,
    clean,
)
from gspo_env.errors import (
    ChatTemplateError,
    ConfigError,
    EnvironmentContractError,
    EnvironmentCrashError,
    EnvironmentHangError,
    ForeignError,
    RefusedError,
    raised_as,
)
from gspo_env.registry import load_function
from gspo_env.tools.tool import Tool
from gspo_env.types import Message, StepInfo
from gspo_envs.data.rewards import Rewards, check_success
from gspo_envs.data.rows import TaskRows, begin_chat
from gspo_envs.program.commands import read_sandbox, start_command
from gspo_envs.program.functions import start_function
from gspo_envs.program.rewards import Exchange, read_result, to_attempt
from gspo_envs.program.runs import PendingRequest, ProgramEnd, RunningProgram

if TYPE_CHECKING:
    from gspo_env.serving import Reply

LIMITS = ("MaxTurnsExceeded", "ModelBehaviorError", "GraphRecursionError")
"""What the OpenAI Agents SDK and LangGraph raise at a limit on turns or at what the policy wrote"""
_LATE = ("timeout", "silence")
_SHOWN = 400
"""Characters of a command's standard error that an error shows."""


class ProgramEnv(TextEnv):
    """A program that asks a model over HTTP; the policy answers in the model's place.

    `reset` starts the program with an address of its own. Its first request is the first
    observation; `step` answers the request and returns the next one, or the end. Requests that are
    made at the same time become turns one after the other, in the order of arrival.

    The program's return, or exit code 0, ends the episode. An exception, another exit code, too
    much time, and no request at all are failures of the environment: the episode is neither scored
    nor trained on. `ends` lists those that are scored all the same. See docs/programs.md.

    Args:
        program: A function, or its place as `module:function` or `file.py:function`. It is called
            as `program(task, base_url=..., api_key=...)` with a row of the data as a dictionary, in
            a thread; it may be asynchronous.
        data: Tasks; see `gspo_envs.data.dataset.DatasetEnv`.
        rewards: Rewards of the finished episode; see
            `gspo_envs.data.rewards.load_reward`. Without any,
            the result of the program is the reward: a number, true or false, or a dictionary with
            "reward", "success" and further numbers. The result of a function is what it returns,
            that of a command the last line of its output, as JSON.
        command: In place of `program`, a command and its arguments, in which `{column}` stands for
            the task's value of that column. It finds the address in OPENAI_BASE_URL and
            OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and the task as JSON on its
            standard input.
        weights: One for each reward; 1 by default.
        split: Split of a Hugging Face dataset.
        subset: Configuration of a Hugging Face dataset.
        held_out: See `gspo_envs.data.dataset.DatasetEnv`.
        success: Minimum reward of the last turn that counts as success; by default the result says
            so, or any return above 0 is one.
        timeout: Seconds that the program may take in one episode, without those in which it waits
            for the policy.
        silence: Seconds from the start or an answer to the next request or the end.
        ends: Errors that end an episode with a score: names of exceptions, exit codes, "timeout"
            and "silence". An error that follows from the policy's actions belongs here, or the
            policy does not learn to avoid it.
        max_turns: Requests before the episode is truncated.
        env: Additional environment variables of a command.
        sandbox: Run a command in the sandbox: True, or limits that differ from `LIMITS` of
            `gspo_envs.program.commands`, such as `{"readable": ["agent"]}`; or in a container that
            has it, `podman:IMAGE` or `docker:IMAGE`. See docs/tools.md.

    Raises:
        ConfigError: An argument is invalid.
        SandboxUnavailableError: `sandbox` is set, and this machine cannot isolate commands.
    """

    observation_space = UnicodeText(MAX_OBSERVATION)
    blocking = True
    credit_score = "turns"
    takes_cut_actions = True
    """Actions that were cut are answers too, and a prompt that does not fit is refused."""

    def __init__(
        self,
        program: str | Callable[..., Any] | None = None,
        data: Any = None,
        rewards: Any = (),
        *,
        command: Sequence[str] = (),
        weights: Sequence[float] = (),
        split: str = "train",
        subset: str | None = None,
        held_out: Any = 0.1,
        success: float | None = None,
        timeout: float = 600.0,
        silence: float = 120.0,
        ends: Sequence[str | int] = LIMITS,
        max_turns: int | None = None,
        env: Mapping[str, str] | None = None,
        sandbox: bool | str | Mapping[str, Any] = False,
    ) -> None:
        """Loads the program, the tasks and the rewards."""
        super().__init__(max_turns)
        if data is None:
            raise ConfigError("Program: data is missing, expected tasks, such as a .jsonl file.")
        for name, value in (("timeout", timeout), ("silence", silence)):
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ConfigError(f"Program: {name} is {value!r}, expected seconds above 0.")
        self.timeout, self.silence, self.success_from = timeout, silence, success
        self._start, box = _read_program(program, command, dict(env or {}), sandbox)
        self.max_copies = getattr(box, "at_once", None)
        self._ends = _read_ends(ends)
        check_success("Program", success)
        self.rewards = Rewards("Program", rewards, weights)
        self.group_reward = self.rewards.of_group(success)
        self._rows = TaskRows(data, split=split, subset=subset, held_out=held_out)
        self.num_tasks, self.num_eval_tasks = len(self._rows), self._rows.num_held_out
        self._running: RunningProgram | None = None

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Picks a row, starts the program and waits for its first request.

        `options={"row": 3}` selects row 3.

        Raises:
            ConfigError: The row does not exist.
            EnvironmentContractError: The program ended without a request.
            EnvironmentCrashError: The command ended with another exit code than 0.
            EnvironmentHangError: The program made no request in time.
            Exception: What the program raised.
        """
        self.abandon()
        super().reset(seed=seed, options=options)
        self._ended = True
        self._row, index = self._rows.pick(self.np_random, seed, (options or {}).get("row"))
        self._exchanges: list[Exchange] = []
        self._token_ids: tuple[int, ...] = ()
        self._seconds_left = self.timeout
        self._running = RunningProgram(partial(self._start, self._row), self)
        event = self._next()
        if not isinstance(event, PendingRequest):
            self.abandon()
            raise self._failure(event) or EnvironmentContractError(
                "Program: the number of its requests is 0, expected one before its end."
            )
        self._ended = False
        _, info = begin_chat([{"role": "user", "content": ""}], index, self._row)
        observation, request_info = self._observe(event)
        return observation, info | request_info

    def step(self, action: str) -> StepResult:
        """Answers the request and waits for the next one, or the end.

        Raises:
            EnvironmentContractError: No episode is running, or a reward is not a finite number.
            EnvironmentCrashError: The command ended with another exit code than 0.
            EnvironmentHangError: The program took too long.
            Exception: What the program raised.
        """
        self.require_episode()
        assert self._running is not None
        reply, malformed = to_reply(action, self._pending.request.tools)
        refused = reply.finish_reason == "context"
        if not refused:
            answer = Message(role="assistant", content=clean(str(action)))
            self._exchanges.append((self._pending.request.messages, answer))
        self._token_ids += tuple(getattr(action, "token_ids", ()))
        self._running.rewards.begin(self._pending.request.id)
        self._pending.answer(reply)
        try:
            observation, reward, terminated, truncated, info = self._advance(refused)
        except BaseException:
            self.abandon()
            raise
        if terminated or truncated:
            self.abandon()
        return observation, reward, terminated, truncated, {**info, "malformed_calls": malformed}

    def _advance(self, refused: bool) -> StepResult:
        """Waits for what follows an answer, or the refusal of a prompt that did not fit."""
        assert self._running is not None
        event = self._next()
        posted = self._running.rewards.finish()
        failure = None if refused else self._failure(event)
        if failure is not None:
            raise failure
        regular = isinstance(event, ProgramEnd) and event.error is None and event.code == 0
        over = not isinstance(event, PendingRequest)
        terminated, truncated = self.end_turn(regular and not refused, over)
        if isinstance(event, PendingRequest) and not truncated:
            observation, info = self._observe(event)
            scored = {} if posted is None else {"scored": True}
            return observation, posted or 0.0, False, False, info | scored
        if refused:
            return "", 0.0, False, True, {"success": False}
        reward, info = self._judge(event.result if isinstance(event, ProgramEnd) else None)
        if reward is None and posted is None:
            info["scored"] = False if terminated or self.rewards else None
        else:
            info["scored"] = True
        reward = (reward or 0.0) + (posted or 0.0)
        if self.success_from is not None:
            info["success"] = reward >= self.success_from
        return "", reward, terminated, truncated, info

    def abandon(self) -> None:
        """Ends the running program, if there is one: its requests, and its processes."""
        self._ended = True
        if self._running is not None:
            self._running.end()
            self._running = None

    def close(self) -> None:
        """Ends the running program."""
        self.abandon()

    def _next(self) -> PendingRequest | ProgramEnd | str:
        """Waits for the program; returns its next request, its end, or the limit that it passed."""
        assert self._running is not None
        while True:
            began = time.monotonic()
            event = self._running.inbox.next(min(self.silence, self._seconds_left))
            self._seconds_left -= time.monotonic() - began
            if event is None:
                return "timeout" if self._seconds_left <= 0 else "silence"
            if not (isinstance(event, PendingRequest) and event.request.counts):
                return event
            self._count(event)

    def _count(self, pending: PendingRequest) -> None:
        """Answers a request that asks only how many tokens its prompt has."""
        from gspo_env.serving import Reply

        request = pending.request
        info = StepInfo(messages=request.messages, tools=request.tools, stop=request.stop)
        try:
            if self.count_tokens is None:
                raise ChatTemplateError("nothing counts tokens here; expected isolation 'thread'")
            tokens = self.count_tokens(info)
        except ChatTemplateError as error:
            pending.refuse(RefusedError(str(error), param="messages"))
            return
        answer = Message(role="assistant", content="")
        pending.answer(Reply(message=answer, prompt_tokens=tokens))

    def _observe(self, pending: PendingRequest) -> tuple[str, dict[str, Any]]:
        """Returns the observation and the keys of `info` of a request."""
        self._pending, request = pending, pending.request
        last = request.messages[-1]
        info: dict[str, Any] = {
            "messages": request.messages,
            "tools": request.tools,
            "max_tokens": request.max_tokens,
            "stop": request.stop,
            "agent": request.agent,
        }
        if last.role == "tool" and self._exchanges:
            info["observation_role"] = "tool"
        return clean(last.content, self.observation_space.max_length), info

    def _failure(self, event: PendingRequest | ProgramEnd | str) -> Exception | None:
        """Returns the failure that ends the episode without a score; None if there is none."""
        if isinstance(event, str):
            if event in self._ends:
                return None
            limit = f"{getattr(self, event):g} s"
            return EnvironmentHangError(f"Program: its time is over ({event}={limit}).")
        if isinstance(event, PendingRequest):
            return None
        if event.error is not None:
            return None if _is_listed(event.error, self._ends) else event.error
        if event.code == 0 or event.code in self._ends:
            return None
        stderr = " ".join(event.stderr.split())[-_SHOWN:] or "nothing"
        return EnvironmentCrashError(
            f"Program: its exit code is {event.code}, expected 0; the end of its standard error: "
            f"{stderr}"
        )

    def _judge(self, result: Any) -> tuple[float | None, dict[str, Any]]:
        """Scores the episode; returns the reward, None if nothing gives one, and the `info`."""
        if not self.rewards:
            reward, success, parts = read_result(result)
            return reward, {"reward_parts": parts, "success": success}
        attempt = to_attempt(self._exchanges, self._row, self._token_ids, result)
        reward, parts = self.rewards.judge(attempt)
        return reward, {"reward_parts": parts}


def to_reply(action: str, tools: Sequence[Tool]) -> tuple[Reply, int]:
    """Returns the answer of an action, and how many of its calls are malformed."""
    from gspo_env.serving import Reply
    from gspo_env.tools.request import read_action

    act = action if isinstance(action, Action) else Action(action)
    message, malformed = read_action(
        clean(str(act)), tools, act.message, in_reasoning=act.in_reasoning
    )
    reply = Reply(
        message=message,
        finish_reason=act.finish_reason,
        prompt_tokens=act.prompt_tokens,
        completion_tokens=len(act.token_ids),
        stop_text=act.stop_text,
    )
    return reply, malformed


def _read_program(
    program: str | Callable[..., Any] | None,
    command: Sequence[str],
    variables: dict[str, str],
    sandbox: bool | str | Mapping[str, Any],
) -> tuple[Callable[..., Callable[[], None]], Any]:
    """Returns what starts the program, given a task, a session and an inbox, and its sandbox.

    Raises:
        ConfigError: There is not exactly one program, it does not take the address, or it cannot
            run in the sandbox.
        SandboxUnavailableError: This machine has no sandbox for it.
    """
    if (program is None) == (not command):
        count = "neither" if program is None else "both"
        raise ConfigError(f"Program: {count} of program and command is given, expected one.")
    if program is None:
        if isinstance(command, str) or not all(isinstance(part, str) for part in command):
            raise ConfigError(
                f'Program: command is {command!r}, expected a list such as ["node", "agent.js"].'
            )
        box = None
        if sandbox is not False:
            box, command = read_sandbox(sandbox, command)
        return partial(start_command, tuple(command), box, variables=variables), box
    if sandbox is not False or variables:
        raise ConfigError(
            f"Program: sandbox is {sandbox!r} and env {sorted(variables)}; expected neither, "
            "because a function runs in this process."
        )
    function = load_function(program, "program") if isinstance(program, str) else program
    name = getattr(function, "__name__", repr(function))
    what = f"Program: {name} cannot be called as {name}(task, base_url=..., api_key=...)"
    hint = "; add these parameters, for its client: OpenAI(base_url=base_url, api_key=api_key)."
    with raised_as(ConfigError, what, TypeError, ValueError, mend=hint):
        inspect.signature(function).bind({}, base_url="", api_key="")
    return partial(start_function, function), None


def _read_ends(ends: Sequence[str | int]) -> tuple[str | int, ...]:
    if isinstance(ends, str) or not all(type(end) in (str, int) for end in ends):
        raise ConfigError(
            f"Program: ends is {ends!r}, expected a list of names of exceptions, exit codes, "
            f"{' and '.join(map(repr, _LATE))}."
        )
    return tuple(ends)


def _is_listed(error: BaseException, ends: Sequence[str | int]) -> bool:
    """Returns whether the class of an exception, or of all in a group, has a listed name."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_listed(one, ends) for one in error.exceptions)
    if isinstance(error, ForeignError):
        return error.name in ends
    return any(base.__name__ in ends for base in type(error).__mro__)
