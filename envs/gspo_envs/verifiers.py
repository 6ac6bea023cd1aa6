"""Tasksets of verifiers: `gym.make("gspo/Verifiers-v0", taskset="mine.py:MathTaskset")`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from types import ModuleType
from typing import Any

from gspo_env import background
from gspo_env.errors import ConfigError
from gspo_env.importing import load_function
from gspo_env.text_env import ResetResult, StepResult
from gspo_envs.foreign import ForeignEnv, load
from gspo_envs.rows import TaskRows, read_chat

_LOOP = "verifiers"


class VerifiersEnv(ForeignEnv):
    """A taskset of verifiers: its prompts, judged by its rewards, metrics and judges.

    verifiers calls the model itself; here the policy answers, and the answer is put into a trace
    that the task scores. So a task is one turn, and what needs a runtime, a container or tool
    servers of the task is refused.

    Args:
        taskset: Id of an installed taskset, or `module:Class` or `file.py:Class`.
        config: Fields of the taskset's configuration.
        limit: The most tasks to read; an infinite taskset needs one.
        held_out: Share of the tasks that only evaluation sees.
        render_mode: Must be None.

    Raises:
        ConfigError: The taskset cannot be loaded, or its tasks need more than an answer.
        MissingExtraError: verifiers is not installed.
    """

    blocking = None
    draws = False

    def __init__(
        self,
        taskset: str,
        *,
        config: Mapping[str, Any] | None = None,
        limit: int | None = None,
        held_out: float = 0.1,
        render_mode: str | None = None,
    ) -> None:
        """Load the tasks."""
        super().__init__(None, render_mode)
        self._vf = load("verifiers.v1", "verifiers", "verifiers")
        tasks = _load_tasks(taskset, json.dumps(config or {}, sort_keys=True), limit)
        self._rows = TaskRows(tasks, held_out=held_out)
        self._task: Any = None
        self._prompt: list[Any] = []
        self._seed: int | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult:
        """Pick a task; `options={"row": 3}` names it."""
        self._seed = seed
        return super().reset(seed=seed, options=options)

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Give the prompt of a task."""
        self._task, index = self._rows.pick(self.np_random, self._seed, options.get("row"))
        data = self._task.data
        prompt = data.prompt if isinstance(data.prompt, str) else _plain(data.prompt)
        system, messages = read_chat(prompt, f"verifiers: prompt of task {index}")
        self.system_prompt = data.system_prompt or system
        info: dict[str, Any] = {"row": index}
        if len(messages) > 1:
            info["chat_history"] = messages[:-1]
        self._prompt = [self._message(m["role"], m["content"]) for m in messages]
        if self.system_prompt is not None:
            self._prompt.insert(0, self._message("system", self.system_prompt))
        return messages[-1]["content"], info

    def act(self, action: str) -> StepResult:
        """Let the task score the answer."""
        trace = self._trace(action)
        background.run(self._task.score(trace), _LOOP)
        parts = {name: float(r.score) for name, r in trace.rewards.items() if r is not None}
        parts |= {name: float(m) for name, m in trace.metrics.items() if m is not None}
        return "", float(trace.reward), True, False, {"reward_parts": parts}

    def _trace(self, answer: str) -> Any:
        """Give the trace that verifiers' own rollout would have made of one model call."""
        from verifiers.v1.state import state_cls

        vf, task = self._vf, self._task
        messages = [*self._prompt, self._message("assistant", answer)]
        last = len(messages) - 1
        nodes = [
            vf.MessageNode(parent=n - 1 if n else None, message=message, sampled=n == last)
            for n, message in enumerate(messages)
        ]
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        return vf.Trace(
            task=about,
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
            state=state_cls(type(task))(),
            is_completed=True,
            ok=True,
        )

    def _message(self, role: str, content: str) -> Any:
        vf = self._vf
        kinds = {"system": vf.SystemMessage, "assistant": vf.AssistantMessage}
        return kinds.get(role, vf.UserMessage)(content=content)


@lru_cache(maxsize=16)
def _load_tasks(name: str, config: str, limit: int | None) -> list[Any]:
    """Load once for all environments of the process; `config` is JSON."""
    vf = load("verifiers.v1", "verifiers", "verifiers")
    try:
        taskset = _taskset(vf, name, json.loads(config))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"verifiers: taskset {name!r} cannot be loaded: {reason}") from error
    if limit is None and not taskset.bounded:
        raise ConfigError(f"verifiers: taskset {name!r} is infinite, give a limit.")
    tasks = list(islice(taskset, limit))
    for task in tasks:
        if reason := _beyond(vf, taskset, task):
            raise ConfigError(
                f"verifiers: taskset {name!r} cannot be bridged: {reason}. Expected tasks whose "
                "prompt is answered in one turn and whose rewards need only the trace."
            )
    return tasks


def _taskset(vf: ModuleType, name: str, settings: dict[str, Any]) -> Any:
    if ":" not in name:
        kind = vf.taskset_config_type(name)
        return vf.load_taskset(kind.model_validate({"id": name, **settings}))
    from verifiers.v1.utils.generic import concrete_type

    made: Any = load_function(name, "taskset")
    kind = concrete_type(made, vf.TasksetConfig) or vf.TasksetConfig
    return made(kind.model_validate(settings))


def _beyond(vf: ModuleType, taskset: Any, task: Any) -> str:
    """Give what a task needs beyond an answer, if anything."""
    kind = type(task)
    for hook in ("setup", "finalize", "stage_verifier"):
        if getattr(kind, hook) is not getattr(vf.Task, hook):
            return f"{kind.__name__}.{hook} needs a runtime"
    if kind.NEEDS_CONTAINER:
        return f"{kind.__name__} needs a container"
    if kind.toolsets(task.config) or type(taskset).toolsets(taskset.config):
        return f"{kind.__name__} brings tool servers"
    for function in (*task.hooks("reward"), *task.hooks("metric")):
        wanted = inspect.signature(function).parameters.get("runtime")
        if wanted is not None and wanted.default is wanted.empty:
            return f"{kind.__name__}.{function.__name__} needs a runtime"
    if not task.data.prompt:
        return f"task {task.data.idx} has no prompt"
    return ""


def _plain(messages: Any) -> list[dict[str, Any]]:
    return [message.model_dump(include={"role", "content"}) for message in messages]
