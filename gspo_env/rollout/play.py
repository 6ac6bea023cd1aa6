"""Plays one episode of an environment with a policy; the only loop over turns."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gspo_env.env.base import Action, Finish, TextEnvironment, attribute
from gspo_env.env.info import check_length, parse_reset, parse_step, read_prompt
from gspo_env.errors import EnvironmentContractError, EnvironmentHangError, RolloutError
from gspo_env.rollout.failures import EnvironmentFailed, describe, hang
from gspo_env.runtime.loops import ActiveTimeout
from gspo_env.runtime.threads import call_env
from gspo_env.types import (
    ENDED,
    Ending,
    Episode,
    Fault,
    PolicyAction,
    Prompt,
    ResetInfo,
    Role,
    StepInfo,
    StopReason,
    Task,
    Timing,
    Turn,
)

_CUTS: dict[StopReason, Finish] = {
    StopReason.MAX_TURN_TOKENS: "length",
    StopReason.MAX_CONTEXT: "context",
}
"""The limits of which an environment with `takes_cut_actions` hears."""
_OF_ACTION = tuple(each.name for each in fields(PolicyAction))
"""What a turn has of the policy's move."""
_MOST_REFUSED = 8
"""Prompts in a row that do not fit, after which such an environment's episode ends."""


@dataclass(kw_only=True, slots=True)
class PolicyInput:
    """What a policy sees when it chooses an action."""

    env: TextEnvironment
    prompt: Prompt
    observation: str
    role: Role
    """Source of the observation."""
    turn: int
    """The number of turns before this one."""
    reward: float = 0.0
    """The reward of the turn before."""
    info: ResetInfo | StepInfo = field(default_factory=StepInfo)
    """The `info` that came with the observation: the conversation, tools and limits of the next
    action, as far as the environment gives them."""
    takes_cuts: bool = False
    """Whether the environment has `takes_cut_actions`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOutput(PolicyAction):
    """The action of a policy that works with token ids."""

    text: str = ""
    stop_text: str | None = None
    """See `Action.stop_text`."""
    prompt_tokens: int = 0
    """See `Action.prompt_tokens`."""
    seconds: float = 0.0
    """Time that the policy took."""
    stop: StopReason | None = None
    """The limit that the action exceeded: the episode ends, and only an environment with
    `takes_cut_actions` sees the action, and goes on."""
    question: str | None = None
    """The request for a summary that the policy answered in place of the observation, which follows
    again; the environment does not see the answer."""
    info: StepInfo | None = None
    """The `info` that follows the answer to a `question`."""


Policy = Callable[[PolicyInput], "str | PolicyOutput | Awaitable[str | PolicyOutput]"]
"""Chooses an action, as text or a `PolicyOutput`. For a human player: `lambda now: input(...)`."""
Call = Callable[..., Awaitable[Any]]
"""Calls an environment's method with its arguments, such as `EnvPool.call` in a thread."""
Redraw = Callable[[Task, ResetInfo], Task | None]
"""Judges a task after its `reset`: returns the task to play instead, or None to play it."""


async def play(
    env: TextEnvironment,
    task: Task,
    policy: Policy,
    *,
    max_turns: int | None = None,
    timeout: float | None = None,
    call: Call | None = None,
    redraw: Redraw | None = None,
    count: Callable[[ResetInfo | StepInfo], int] | None = None,
) -> Episode:
    """Plays one episode.

    An exception of the environment, a result that breaks the contract, or a call that is not over
    when the time is, ends the episode with one of `gspo_env.types.FAILURES`; an exception of the
    policy propagates.

    Args:
        env: The environment.
        task: The seed and the options of `reset`.
        policy: Chooses the actions.
        max_turns: Turns after which the episode is cut.
        timeout: Seconds after which the episode is cut; needs a running event loop.
        call: Calls the environment's methods; directly by default.
        redraw: Replaces tasks that are not to be played; by default all are.
        count: Counts the tokens of a prompt; see `TextEnv.count_tokens`.
    """
    run, fault = EpisodeRun(env, task, call, redraw), None
    if run.takes_cuts:
        env.set_wrapper_attr("count_tokens", count)
    limit = ActiveTimeout(timeout, lambda: run.calling)
    try:
        async with limit:
            stop = await run.play(policy, max_turns)
    except TimeoutError:
        if not limit.expired():
            raise
        stop = StopReason.TIMEOUT
        if limit.hanging:
            fault = hang(str(limit.hanging), timeout)
    except EnvironmentFailed as failure:
        fault = failure.fault
    return run.episode(fault.reason if fault else stop, fault)


def play_now(
    env: TextEnvironment, task: Task, policy: Policy, *, max_turns: int | None = None
) -> Episode:
    """Plays one episode with a policy that never waits, without an event loop; see `play`."""
    return run_now(play(env, task, policy, max_turns=max_turns))


def run_now(playing: Coroutine[Any, Any, Episode]) -> Episode:
    """Runs a coroutine that never waits, without an event loop.

    Raises:
        RolloutError: It waits.
    """
    try:
        playing.send(None)
    except StopIteration as done:
        episode: Episode = done.value
        return episode
    playing.close()
    raise RolloutError("this policy waits, so it needs an event loop: use `play`")


def look(inputs: PolicyInput) -> PolicyOutput:
    """A policy that ends the episode before its first turn, to see what `reset` gives."""
    return PolicyOutput(stop=StopReason.MAX_TURNS)


def try_out(env_id: str, env: TextEnvironment, retries: int = 0) -> None:
    """Plays one turn, so that a broken environment fails before training is set up.

    Args:
        env_id: Names the environment in errors.
        env: The environment.
        retries: Times that it may fail before.

    Raises:
        EnvironmentContractError: `reset` or `step` raised, or broke the contract.
        EnvironmentHangError: The process of the environment did not answer in time.
    """
    action = PolicyOutput(action_ids=(0, 0, 0))  # to see how many values a step returns for them
    for _ in range(retries + 1):
        episode = play_now(env, Task(env_id=env_id, seed=0), lambda inputs: action, max_turns=1)
        if not episode.failed:
            return
    text = (episode.error or "").removeprefix(f"{env_id}: ")
    hangs = episode.stop_reason is StopReason.ENV_TIMEOUT
    raise (EnvironmentHangError if hangs else EnvironmentContractError)(f"{env_id}: {text}")


def demonstrator(noise: float = 0.0) -> Policy:
    """Returns the policy that plays the environment's own `expert_action`.

    The policy raises `NotImplementedError` if the environment has none. Any other exception is a
    failure of the environment.
    """

    def act(inputs: PolicyInput) -> str:
        if not inputs.env.has_wrapper_attr("expert_action"):
            raise NotImplementedError(f"{inputs.env} has no expert_action")
        try:
            action = call_env(inputs.env.get_wrapper_attr("expert_action"), noise)
            if not isinstance(action, str):
                text = f"{reprlib.repr(action)} of type {type(action).__name__}, expected a str."
                raise EnvironmentContractError(f"expert_action() is {text}")
            return action
        except NotImplementedError:
            raise
        except Exception as error:
            raise EnvironmentFailed(describe("expert_action()", error)) from error

    return act


def conclude(
    turns: Sequence[Turn],
    stop: StopReason,
    gives_outcome: bool,
    outcome_if_cut: float,
    fault: Fault | None = None,
) -> Ending:
    """Decides the outcome of an episode, and whether it succeeded.

    The outcome is the `episodic_reward` of the last step. Without one it is `outcome_if_cut` if the
    environment gives outcomes but the episode was cut (a wrapper such as `TimeLimit` cuts too),
    else the sum of the turns' rewards. An episode that the rollout cut did not succeed.

    Args:
        turns: Every turn.
        stop: How the episode ended.
        gives_outcome: Whether finished episodes of the environment have an `episodic_reward`.
        outcome_if_cut: The outcome of a cut episode of such an environment.
        fault: How the environment failed, if it did.
    """
    last = turns[-1].info if turns and stop in ENDED else StepInfo()
    outcome, success = last.episodic_reward, last.success if stop in ENDED else False
    if outcome is None and gives_outcome and stop is not StopReason.TERMINATED:
        outcome = outcome_if_cut
    return Ending(reason=stop, outcome=outcome, success=success, fault=fault)


@dataclass(slots=True)
class _StepName:
    """The name of a call of `step`, which is written only where a fault names it."""

    action: Action

    def __str__(self) -> str:
        return f"step({reprlib.repr(self.action)})"


class EpisodeRun:
    """The state of one running episode."""

    def __init__(
        self, env: TextEnvironment, task: Task, call: Call | None, redraw: Redraw | None
    ) -> None:
        self.env, self.task, self.call, self.redraw = env, task, call, redraw
        self.turns: list[Turn] = []
        self.prompt, self.reset, self.observation = Prompt(), ResetInfo(), ""
        self.info: ResetInfo | StepInfo = self.reset
        """What the environment, or a summary, said last."""
        self.gives_outcome = bool(attribute(env, "gives_outcome", False))
        self.takes_cuts = bool(attribute(env, "takes_cut_actions", False))
        self.state_key: str | None = None
        """The state that the environment is in."""
        self.refused = 0
        """Prompts in a row that did not fit."""
        self.calling: str | _StepName = ""
        """The call that the environment has not returned from."""

    async def play(self, policy: Policy, max_turns: int | None) -> StopReason:
        """Plays turns until the episode ends and returns the reason."""
        await self._begin()
        while max_turns is None or len(self.turns) < max_turns:
            move = policy(
                PolicyInput(
                    env=self.env,
                    prompt=self.prompt,
                    observation=self.observation,
                    role=getattr(self.info, "observation_role", "user"),
                    turn=len(self.turns),
                    reward=self.turns[-1].reward if self.turns else 0.0,
                    info=self.info,
                    takes_cuts=self.takes_cuts,
                )
            )
            if not isinstance(move, (str, PolicyOutput)):
                move = await move
            stop = await self._turn(PolicyOutput(text=move) if isinstance(move, str) else move)
            if stop is not None:
                return stop
        return StopReason.MAX_TURNS

    async def _begin(self) -> None:
        while True:
            task = self.task
            options = dict(task.options)
            result = await self._call(
                f"reset(seed={task.seed})", self.env.reset, seed=task.seed, options=options
            )
            reading = "reading its prompt"
            try:
                self.observation, self.reset = parse_reset(task.env_id, result)
                self.info = self.reset
                check_length(self.env, task.env_id, "reset()", self.observation)
            except Exception as error:
                raise EnvironmentFailed(describe(reading, error)) from error
            self.prompt = await self._call(reading, read_prompt, self.env, self.reset)
            self.state_key = self.reset.state_key
            other = self.redraw(task, self.reset) if self.redraw else None
            if other is None:
                return
            self.task = other

    async def _turn(self, move: PolicyOutput) -> StopReason | None:
        stop, before = move.stop, self.observation
        reward, info, seconds = 0.0, move.info, 0.0
        key = self.state_key
        finish: Finish | None = "stop"
        if move.question is not None:
            before, finish, key = move.question, None, None
            self.info = info or self.info
        elif stop is not None:
            finish = _CUTS.get(stop) if self.takes_cuts else None
        if finish == "context":
            return await self._refuse(move)
        if finish is not None:
            self.refused = 0
            started = time.perf_counter()
            action = Action(
                move.text,
                move.action_ids,
                move.message,
                finish,
                move.prompt_tokens,
                move.in_reasoning,
                move.stop_text,
            )
            stop, reward, info = await self._step(action, len(move.action_ids) or None)
            seconds = time.perf_counter() - started
        elif not move.action_ids:
            return stop
        turn = Turn(
            **{name: getattr(move, name) for name in _OF_ACTION},
            kind="action" if move.question is None else "summary",
            observation=before,
            reward=reward,
            info=StepInfo() if info is None else info,
            timing=Timing(
                generate=move.seconds, step=seconds, began=time.time() - seconds - move.seconds
            ),
            state_key=key,
        )
        self.turns.append(turn)
        return stop

    async def _step(
        self, action: Action, tokens: int | None
    ) -> tuple[StopReason | None, float, StepInfo]:
        """Steps the environment; returns why the episode ends, if it does, and what it gave."""
        result = await self._call(_StepName(action), self.env.step, action)
        try:
            self.observation, reward, terminated, truncated, info = parse_step(
                self.task.env_id, result, tokens
            )
            check_length(self.env, self.task.env_id, "step()", self.observation)
        except Exception as error:
            raise EnvironmentFailed(describe("reading its step", error)) from error
        self.info, self.state_key = info, info.state_key
        if terminated:
            return StopReason.TERMINATED, reward, info
        return StopReason.TRUNCATED if truncated else None, reward, info

    async def _refuse(self, move: PolicyOutput) -> StopReason | None:
        """Tells the environment that its prompt does not fit; no turn, since nothing is sampled.

        What the step says of the end of the episode belongs to the last turn.
        """
        self.refused += 1
        if self.refused > _MOST_REFUSED:
            return move.stop
        stop, reward, info = await self._step(
            Action(move.text, finish_reason="context", prompt_tokens=move.prompt_tokens), None
        )
        if reward != 0:
            error = EnvironmentContractError(
                f"{self.task.env_id}: step() reward is {reward} for an action that was not sampled "
                "because its prompt did not fit, expected 0."
            )
            raise EnvironmentFailed(describe("reading its step", error)) from error
        if stop is not None and self.turns:
            last = self.turns[-1]
            ending = replace(last.info, episodic_reward=info.episodic_reward, success=info.success)
            self.turns[-1] = replace(last, info=ending)
        return stop

    async def _call(
        self, name: str | _StepName, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.calling = name
        try:
            if self.call is None:
                result = call_env(function, *args, **kwargs)
            else:
                result = await self.call(function, *args, **kwargs)
        except Exception as error:
            raise EnvironmentFailed(describe(str(name), error)) from error
        self.calling = ""
        return result

    def episode(self, stop: StopReason, fault: Fault | None) -> Episode:
        """Returns the record of the turns so far."""
        if_cut = 0.0 if fault else float(attribute(self.env, "outcome_if_cut", 0.0))
        return Episode(
            task=self.task,
            prompt=self.prompt,
            turns=tuple(self.turns),
            ending=conclude(self.turns, stop, self.gives_outcome, if_cut, fault),
            final_observation=self.observation,
            reset=self.reset,
        )
