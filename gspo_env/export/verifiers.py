"""Environments for verifiers: a taskset of seeds, and a harness that plays their episodes.

A package exports a subclass of each; `class StoryTaskset(EnvTaskset): env = "gspo/Story-v0"`. The
harness runs in the process of verifiers and calls the model through its interception, so traces
have the tokens, and every turn is a model call with the environment's own tools and conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx2
import verifiers.v1 as vf

from gspo_env.chat.messages import read_message, write_message
from gspo_env.env.base import overrides
from gspo_env.errors import EnvironmentContractError
from gspo_env.export.stepper import Stepper, conversation, record, seeds
from gspo_env.rollout.play import PolicyInput, PolicyOutput, demonstrator, play_now
from gspo_env.tools.tool import format_tool_call
from gspo_env.types import Message, StopReason, Task

_KEY = "gspo_env"
"""Where a trace's `info` has the record of the episode."""


class EnvData(vf.TaskData):  # type: ignore[misc]
    """A task: the seed of an episode."""

    seed: int


class EnvTask(vf.Task[EnvData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """Scores an episode with its outcome."""

    env: ClassVar[str | type]
    env_kwargs: ClassVar[dict[str, Any]]

    @vf.reward  # type: ignore[untyped-decorator]
    async def outcome(self, trace: vf.Trace) -> float:
        """Returns the outcome; 0 for an untouched task."""
        return float(trace.info.get(_KEY, {}).get("outcome", 0.0))

    @vf.metric  # type: ignore[untyped-decorator]
    async def episode(self, trace: vf.Trace) -> dict[str, float]:
        """Returns the success and the parts of the rewards."""
        played = trace.info.get(_KEY)
        if played is None:
            return {}
        parts = {f"reward_parts/{name}": value for name, value in played["reward_parts"].items()}
        return {"success": float(played["success"]), **parts}

    async def validate(self, runtime: Any) -> bool | None:
        """Returns whether the environment's demonstrator succeeds; None if it has none."""
        return await asyncio.to_thread(self._demonstrate)

    def _demonstrate(self) -> bool | None:
        stepper = Stepper(self.env, **self.env_kwargs)
        try:
            if not overrides(stepper.env, "expert_action"):
                return None
            task = Task(env_id=stepper.env_id, seed=self.data.seed)
            return play_now(stepper.env, task, demonstrator(), max_turns=_MOST_TURNS).success
        except NotImplementedError:
            return None
        finally:
            stepper.close()


class EnvTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Which tasks there are."""

    num_tasks: int = 100
    """Number of seeds."""
    held_out: bool = False
    """Whether the tasks are those of `gspo-env evaluate`, which training does not play."""


class EnvTaskset(vf.Taskset[EnvTask, EnvTasksetConfig]):  # type: ignore[misc]
    """The tasks of successive seeds."""

    env: ClassVar[str | type]
    env_kwargs: ClassVar[dict[str, Any]] = {}

    def load(self) -> Iterator[EnvTask]:
        """Yields a task for each seed, with its first message."""
        about = {"env": self.env, "env_kwargs": self.env_kwargs}
        kind = type("EnvTask", (EnvTask,), about)
        stepper = Stepper(self.env, **self.env_kwargs)
        try:
            for seed in seeds(self.config.num_tasks, held_out=self.config.held_out):
                first = conversation(stepper.reset(seed))
                system = first[0].content if first[0].role == "system" else None
                yield kind(
                    EnvData(prompt=first[-1].content, system_prompt=system, seed=seed),
                    self.config.task,
                )
        finally:
            stepper.close()


class EnvHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Plays the episode of a task with the model behind verifiers' interception."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    env: ClassVar[str | type]
    env_kwargs: ClassVar[dict[str, Any]] = {}

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: EnvData,
    ) -> vf.ProgramResult:
        """Plays the episode, and keeps its record in `trace.info`.

        Raises:
            EnvironmentContractError: The environment failed; the episode has no reward.
        """
        stepper = await asyncio.to_thread(Stepper, self.env, **self.env_kwargs)
        headers = {"Authorization": f"Bearer {secret}"}
        try:
            async with httpx2.AsyncClient(headers=headers, timeout=None) as client:
                now: PolicyInput | None = await asyncio.to_thread(stepper.reset, data.seed)
                messages: list[Message] = []
                while now is not None:
                    messages = _next_messages(messages, now)
                    body = _body(ctx.model, messages, now)
                    answer = await client.post(f"{endpoint}/chat/completions", json=body)
                    if trace.stop_condition is not None:  # a limit of verifiers
                        break
                    message, action = _read(answer)
                    messages.append(message)
                    now = await asyncio.to_thread(stepper.step, action)
            episode = await asyncio.to_thread(stepper.cut)
            if episode is not None:
                trace.info[_KEY] = record(episode)
        finally:
            await asyncio.to_thread(stepper.close)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class EnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The one agent; the episode is played in this process, so it needs no container."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class SingleEnv(vf.Env[EnvConfig]):  # type: ignore[misc]
    """One agent that plays one task."""

    async def run(self, task: EnvTask, agents: Any) -> None:
        """Plays the episode."""
        await agents.agent.run(task)


_MOST_TURNS = 1000


def _next_messages(before: list[Message], now: PolicyInput) -> list[Message]:
    """Returns the conversation that the model answers."""
    if now.turn == 0:
        return list(conversation(now))
    if now.info.messages:
        system = before[:1] if before[0].role == "system" else []
        return [*system, *(m for m in now.info.messages if m.role != "system")]
    calls = before[-1].tool_calls
    if now.role != "tool" or not calls:
        return [*before, Message(role="user", content=now.observation)]
    # one text answers all calls of a turn
    texts = [now.observation, *[""] * (len(calls) - 1)]
    pairs = zip(calls, texts, strict=True)
    results = [Message(role="tool", content=t, tool_call_id=c.id, name=c.name) for c, t in pairs]
    return [*before, *results]


def _body(model: str, messages: list[Message], now: PolicyInput) -> dict[str, Any]:
    tools = now.prompt.tools if now.info.tools is None else now.info.tools
    body: dict[str, Any] = {"model": model, "messages": [write_message(m) for m in messages]}
    if tools:
        body["tools"] = [tool.schema for tool in tools]
    if now.info.max_tokens is not None:
        body["max_tokens"] = now.info.max_tokens
    if now.info.stop:
        body["stop"] = list(now.info.stop)
    return body


def _read(answer: httpx2.Response) -> tuple[Message, PolicyOutput]:
    """Returns the model's message, and as an action.

    Raises:
        EnvironmentContractError: There is none.
    """
    if answer.status_code != 200:
        text = answer.text[:200]
        raise EnvironmentContractError(
            f"the model's answer has status {answer.status_code}: {text}"
        )
    choice = answer.json()["choices"][0]
    fields = choice["message"]
    names = ("role", "content", "reasoning_content", "reasoning", "tool_calls")
    message = read_message({n: fields[n] for n in names if fields.get(n)} | {"role": "assistant"})
    calls = [format_tool_call(call.name, call.arguments) for call in message.tool_calls]
    text = "\n".join([*([message.content] if message.content else []), *calls])
    cut = StopReason.MAX_TURN_TOKENS if choice.get("finish_reason") == "length" else None
    return message, PolicyOutput(text=text, message=message if calls else None, stop=cut)
