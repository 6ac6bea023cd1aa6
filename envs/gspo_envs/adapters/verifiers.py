"""Tasksets of verifiers: `gym.make("gspo/Verifiers-v0", taskset="mine.py:MathTaskset")`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import lru_cache
from itertools import islice
from types import ModuleType
from typing import Any

from gspo_env.env.base import StepResult
from gspo_env.errors import ConfigError, raised_as
from gspo_env.registry import load_function
from gspo_env.runtime import loops
from gspo_envs.adapters.foreign import RowEnv, load
from gspo_envs.data.rows import TaskRows

_LOOP = "verifiers"


class VerifiersEnv(RowEnv):
    """A taskset of verifiers with its prompts, rewards, metrics, judges and conversations.

    verifiers calls the model itself; here the policy answers. A plain taskset is one turn. An
    installed taskset with its own environment (`vf.Env.run`) is a conversation: each time its agent
    would call the model, the policy acts. Tasks that need a runtime, a container, tool servers or
    more than one agent are refused.

    Args:
        taskset: Id of an installed taskset, or `module:Class` or `file.py:Class`.
        config: Fields of the taskset's configuration.
        limit: Maximum tasks to read; an infinite taskset needs a limit.
        held_out: Share of the tasks reserved for evaluation.
        max_turns: Turns before truncation; the conversation is then scored as it is.

    Raises:
        ConfigError: The taskset cannot be loaded, or its tasks need more than answers.
        MissingExtraError: verifiers is not installed.
    """

    def __init__(
        self,
        taskset: str,
        *,
        config: Mapping[str, Any] | None = None,
        limit: int | None = None,
        held_out: float = 0.1,
        max_turns: int | None = None,
    ) -> None:
        """Loads the tasks."""
        super().__init__(max_turns)
        settings = json.dumps(config or {}, sort_keys=True)
        self._play, tasks = _load_tasks(taskset, settings, limit)
        self._rows = TaskRows(tasks, held_out=held_out)
        self.num_tasks, self.num_eval_tasks = len(self._rows), self._rows.num_held_out
        self._conversation: _Conversation | None = None

    def open(self, row: Any, index: int, seed: int) -> Any:
        """Begins the conversation of a task."""
        self._conversation = _Conversation(row)
        messages = loops.run(self._conversation.begin(self._play), _LOOP)
        if messages is None:
            raise ConfigError(f"verifiers: task {index} ended before its agent was asked anything.")
        system = row.data.system_prompt
        opening = [{"role": "system", "content": system}] if system else []
        return [*opening, *_plain(messages)]

    def act(self, action: str) -> StepResult:
        """Answers; at the end of the conversation the task and its environment score it."""
        if self._conversation is None:
            raise RuntimeError("the conversation was closed")
        messages = loops.run(self._conversation.answer(action), _LOOP)
        cut = messages is not None and self.turns_played + 1 == self.max_turns
        if messages is not None and not cut:
            return "\n".join(m["content"] for m in _plain(messages)), 0.0, False, False, {}
        if cut:
            loops.run(self._conversation.answer(None), _LOOP)
        trace = self._conversation.trace
        parts = {name: float(r.score) for name, r in trace.rewards.items() if r is not None}
        scored = bool(parts)
        parts |= {name: float(m) for name, m in trace.metrics.items() if m is not None}
        info = {"reward_parts": parts, "scored": scored}
        return "", float(trace.reward), not cut, cut, info

    def close(self) -> None:
        """Ends the running conversation."""
        if self._conversation is not None:
            loops.run(self._conversation.leave(), _LOOP)
            self._conversation = None


Play = Callable[[Any, Any], Awaitable[None]]
"""Plays a task with agents: `vf.Env.run` with its set-up and scoring."""


class _Conversation:
    """Replaces verifiers' agents and their only agent; runs on the background loop.

    When the agent would call the model, `turn` passes on the new messages and waits.
    """

    def __init__(self, task: Any) -> None:
        self.task = task
        self.trace: Any = None
        self._requests: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._answer: asyncio.Future[str | None]
        self._playing: asyncio.Task[None]

    def __getattr__(self, name: str) -> _Conversation:
        """Returns itself as the agent, under any name that the environment uses."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    async def begin(self, play: Play) -> list[Any] | None:
        self._playing = asyncio.ensure_future(play(self.task, self))
        return await self._next()

    async def answer(self, action: str | None) -> list[Any] | None:
        """Returns the next messages, or None at the end; the action None ends the conversation."""
        self._answer.set_result(action)
        return await self._next()

    async def leave(self) -> None:
        self._playing.cancel()
        await asyncio.wait({self._playing})

    async def run(self, task: Any, **borrowed: Any) -> Any:
        """Plays one answer and scores it, as `vf.Agent.run`."""
        async with self.interaction(task, **borrowed):
            await self.turn()
        return self.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **borrowed: Any) -> AsyncIterator[_Conversation]:
        """Opens a conversation and scores it on exit, as `vf.Agent.interaction`."""
        if self.trace is not None or any(value is not None for value in borrowed.values()):
            raise ConfigError(
                "verifiers: an episode here is one conversation, without a runtime or tools; this "
                "environment begins another or lends some."
            )
        self.task, self.trace = task, _new_trace(task)
        yield self
        self.trace.is_completed = self.trace.ok = True
        await task.score(self.trace)

    async def turn(self, message: Any = None) -> Any:
        """Returns the policy's answer or the end, as `vf.Interaction.turn`."""
        import verifiers.v1 as vf

        data = self.task.data
        opening = message if message is not None else data.prompt
        new = [vf.UserMessage(content=opening)] if isinstance(opening, str) else list(opening or [])
        if not self.trace.nodes and data.system_prompt is not None:
            self._note(vf.SystemMessage(content=data.system_prompt))
        for one in new:
            self._note(vf.UserMessage(content=one["content"]) if isinstance(one, dict) else one)
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(new)
        answer = await self._answer
        if answer is None:
            return vf.Segment(messages=[], terminated=True)
        reply = vf.AssistantMessage(content=answer)
        self._note(reply, sampled=True)
        return vf.Segment(messages=[reply])

    def _note(self, message: Any, *, sampled: bool = False) -> None:
        import verifiers.v1 as vf

        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))

    async def _next(self) -> list[Any] | None:
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        self._playing.result()  # raises what the environment or a reward raised
        return None


def _new_trace(task: Any) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = vf.AgentInfo(config=vf.AgentConfig())
    return vf.Trace(task=about, agent=agent, state=state_cls(type(task))())


@lru_cache(maxsize=16)
def _load_tasks(name: str, config: str, limit: int | None) -> tuple[Play, list[Any]]:
    """Loads a taskset once for all environments of the process; `config` is JSON."""
    vf = load("verifiers.v1", "verifiers", "verifiers")
    faults = (ImportError, AttributeError, TypeError, ValueError)
    with raised_as(ConfigError, f"verifiers: taskset {name!r} cannot be loaded", *faults):
        play, taskset = _taskset(vf, name, json.loads(config))
    if limit is None and not taskset.bounded:
        raise ConfigError(f"verifiers: taskset {name!r} is infinite, give a limit.")
    tasks = list(islice(taskset, limit))
    for task in tasks:
        reason = _beyond(vf, taskset, task)
        if play is _answer_once and not task.data.prompt:
            reason = f"task {task.data.idx} has no prompt"
        if reason:
            raise ConfigError(
                f"verifiers: taskset {name!r} cannot be bridged: {reason}. Expected tasks whose "
                "rewards need only the trace of one agent's answers."
            )
    return play, tasks


def _taskset(vf: ModuleType, name: str, settings: dict[str, Any]) -> tuple[Play, Any]:
    """Returns the function that plays a taskset, and the taskset."""
    if ":" in name:
        from verifiers.v1.utils.generic import concrete_type

        taskset_class: Any = load_function(name, "taskset")
        kind = concrete_type(taskset_class, vf.TasksetConfig) or vf.TasksetConfig
        return _answer_once, taskset_class(kind.model_validate(settings))
    fields = {"id": name, **settings}
    if vf.environment_class(name) is vf.SingleAgentEnv:
        kind = vf.taskset_config_type(name)
        return _answer_once, vf.load_taskset(kind.model_validate(fields))
    env = vf.load_environment(vf.resolve_env_config({"taskset": fields}))
    return _player(vf, env), env.taskset


async def _answer_once(task: Any, agents: Any) -> None:
    await agents.agent.run(task)


def _player(vf: ModuleType, env: Any) -> Play:
    from verifiers.v1.configs.agent import agent_config_fields

    names = list(agent_config_fields(env.config))
    if len(names) != 1 or type(env).start is not vf.Env.start:
        raise ValueError(f"{type(env).__name__} has the agents {names}, or resources of its own")

    async def play(task: Any, agents: Any) -> None:
        await env.setup(agents)
        await env.run(task, agents)
        about = agents.trace.task
        await env.finalize(task, vf.Episode(task=about, traces=[agents.trace], ok=True))

    return play


def _beyond(vf: ModuleType, taskset: Any, task: Any) -> str:
    """Names what a task needs beyond an answer, if anything."""
    kind = type(task)
    for hook in ("setup", "finalize", "stage_verifier"):
        if getattr(kind, hook) is not getattr(vf.Task, hook):
            return f"{kind.__name__}.{hook} needs a runtime"
    if kind.NEEDS_CONTAINER:
        return f"{kind.__name__} needs a container"
    if kind.toolsets(task.config) or type(taskset).toolsets(taskset.config):
        return f"{kind.__name__} brings tool servers"
    for function in (*task.hooks("reward"), *task.hooks("metric")):
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            return f"{kind.__name__}.{function.__name__} needs a runtime"
    return ""


def _plain(messages: Any) -> list[dict[str, Any]]:
    return [message.model_dump(include={"role", "content"}) for message in messages]
