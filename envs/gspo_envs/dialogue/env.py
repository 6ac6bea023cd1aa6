"""Serve a simulated user with tools on a database."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from gspo_env.env.tools import Tool, ToolCall, format_tool_call
from gspo_env.errors import ConfigError
from gspo_env.redaction import resolve
from gspo_env.registry import load_function
from gspo_env.rewards.client import ChatClient
from gspo_env.seeding import fingerprint
from gspo_envs.dialogue.task import DialogueTask, Domain, read_tau2
from gspo_envs.dialogue.users import ModelUser, ScriptedUser
from gspo_envs.text.answer import AnswerEnv, probability

_DOMAINS = {
    "orders": "gspo_envs.dialogue.domains:Orders",
    "bookings": "gspo_envs.dialogue.domains:Bookings",
}
_DONE, _REFUSE = "It is done.", "I am sorry, I cannot do that."


class DialogueEnv(AnswerEnv):
    """Serve a user with a hidden goal: ask, look up, change a database or refuse, and say so.

    An action with a tool call changes or reads the database; any other one is a message to the
    user. The first time the user says a fact, and the first time each needed call is made, earn
    0.1. When the user leaves, the outcome is 1.0 if the database is as it should be, the agent has
    looked up what the rules demand, and has refused where it must.

    Args:
        domain: `orders`, `bookings`, or the `module:Class` or `file.py:Class` of a `Domain`.
        user: `scripted`, or the address of chat completions, such as `http://localhost:8000/v1`,
            whose model plays the user.
        user_model: The name of the model at the address.
        headers: Headers of the requests; `${NAME}` stands for an environment variable.
        tasks: A task file of tau2-bench for your own `domain`; by default the domain draws tasks.
        max_turns: Turns before the episode is truncated.
        early_answer: Probability that the noisy demonstrator says that it is done without looking.
    """

    def __init__(
        self,
        domain: Literal["orders", "bookings"] | str = "orders",
        user: Literal["scripted"] | str = "scripted",
        user_model: str = "",
        headers: Mapping[str, str] | None = None,
        tasks: str | None = None,
        max_turns: int = 12,
        early_answer: float = 0.4,
    ) -> None:
        """Makes the domain and reads the tasks."""
        super().__init__(max_turns)
        place = _DOMAINS.get(domain, domain)
        instance: Any = load_function(place, "domain")() if ":" in place else None
        if not isinstance(instance, Domain):
            raise ConfigError(
                f"domain is {domain!r}; expected {', '.join(_DOMAINS)}, or the module:Class or "
                "file.py:Class of a Domain"
            )
        if user != "scripted" and not user.startswith(("http://", "https://")):
            raise ConfigError(f"user is {user!r}; expected 'scripted' or an http address")
        self.domain, self.system_prompt = instance, instance.rules
        self.early_answer = probability("early_answer", early_answer)
        self._client = None
        if user != "scripted":
            self._client = ChatClient(
                url=user,
                model=user_model,
                key_variable="",
                headers={name: resolve(value) for name, value in (headers or {}).items()},
                request={"temperature": 0, "max_tokens": 256},
                timeout=120.0,
                retries=1,
                cache="",
            )
        self.blocking, self.replays = self._client is not None, self._client is None
        self._tasks: list[DialogueTask] = []
        if tasks is not None:
            if domain in _DOMAINS:
                raise ConfigError(
                    f"tasks is {tasks!r}, and the domain {domain!r} draws its own; expected your "
                    "own domain, as module:Class or file.py:Class"
                )
            self._tasks = read_tau2(tasks, instance.script())
            self.num_tasks = len(self._tasks)

    @property
    def tools(self) -> tuple[Tool, ...]:  # type: ignore[override]
        """The tools of the domain."""
        return self.domain.tools

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a task and lets the user begin; `options={"task": n}` selects one of a file."""
        if self._tasks:
            n = options.get("task", int(self.np_random.integers(len(self._tasks))))
            if type(n) is not int or not 0 <= n < len(self._tasks):
                raise ConfigError(f"task is {n!r}; expected 0 to {len(self._tasks) - 1}")
            self._task = self._tasks[n]
        else:
            self._task = self.domain.draw(self.np_random)
        self._expected = self.domain.solve(self._task)
        self._pending = list(self._task.actions)
        calls = [format_tool_call(call.name, call.arguments) for call in self._pending]
        self.solution = "\n".join([f"The user says: {self._task.goal}", *calls])
        self._matched: set[str] = set()
        self._user: ScriptedUser | ModelUser = (
            ModelUser(self._task, self._client) if self._client else ScriptedUser(self._task)
        )
        return self._user.opening

    def close(self) -> None:
        """Frees the database and ends a running episode."""
        self.end_episode()
        self.domain.close()

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        """Rewards the first time that a needed call is made."""
        if call not in self._pending:
            return 0.0
        self._pending.remove(call)
        return 0.1

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Passes a message to the user, who answers or leaves."""
        plain = text.replace(",", "")
        self._matched |= {p for p in self._task.says if re.search(p, plain, re.IGNORECASE)}
        reply = self._user.reply(text)
        if not reply.leaves:
            return reply.text, 0.1 * reply.facts, False
        self.outcome = float(self.is_right(text))
        return reply.text, self.outcome, True

    def is_right(self, text: str) -> bool:
        """Returns whether the database, the calls and what the agent said are right."""
        task = self._task
        if self._matched != set(task.says) or (task.requires_calls and self._pending):
            return False
        return self.domain.state() == self._expected

    def expert_action(self, noise: float = 0.0) -> str:
        """Asks, looks up, changes and closes; with noise, closes early or wrongly."""
        early = self._is_early(noise)
        slips = noise > 0.0 and self.np_random.random() < noise
        for n, fact in enumerate(self._task.facts):
            if n not in self._user.revealed and fact.question and not slips:
                return fact.question
        if self._pending and not early and not slips:
            return format_tool_call(self._pending[0].name, self._pending[0].arguments)
        refuses = bool(self._task.says) and not early
        return _REFUSE if refuses != slips else _DONE

    @property
    def _task_key(self) -> str:
        return fingerprint(repr(self._task))

    @property
    def _state_key(self) -> str:
        parts = (self._user.state, self._pending, sorted(self._matched), self.domain.state())
        return fingerprint(self._task_key, repr(parts))
