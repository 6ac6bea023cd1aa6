"""Serve a simulated user, scripted or played by a model, with tools on a database."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from gspo_env.env.base import Options, ResetResult
from gspo_env.errors import ConfigError
from gspo_env.redaction import resolve
from gspo_env.registry import load_function
from gspo_env.rewards.client import ChatClient, Usage
from gspo_env.runtime.loops import run_alone
from gspo_env.seeding import draw_index, fingerprint
from gspo_env.tools.tool import Tool, format_tool_call
from gspo_env.types import ToolCall
from gspo_envs.dialogue.task import REFUSAL, DialogueTask, Domain, read_tau2
from gspo_envs.text.answer import AnswerEnv, probability

_DOMAINS = {
    "orders": "gspo_envs.dialogue.domains:Orders",
    "bookings": "gspo_envs.dialogue.domains:Bookings",
}
_DONE, _REFUSE = "It is done.", "I am sorry, I cannot do that."
_REQUEST = {"temperature": 0, "max_tokens": 256}
"""Of a model that plays the user."""
_CLOSING = r"\bdone\b|\banything else\b|\bgoodbye\b"
_STOP = "###STOP###"
_ROLE = (
    "You are a customer who talks to the agent of a company. Write only your next message. Don't "
    "make up facts, and say what you know only when it is needed. When your request is done or "
    f"refused for good, write {_STOP}.\n\n"
)


class Reply(NamedTuple):
    """A message of the user."""

    text: str
    facts: int = 0
    """Facts that the user says for the first time."""
    leaves: bool = False


class ScriptedUser:
    """A user who answers questions by their keywords and leaves after a result or a refusal.

    Args:
        task: What the user wants. The persona `terse` says one fact at a time, `chatty` adds words,
            `forthcoming` begins with all facts, `impatient` leaves after two messages without a
            question that it understands, and `insistent` accepts only the second refusal.
    """

    def __init__(self, task: DialogueTask) -> None:
        """Begins a conversation."""
        self._task = task
        forthcoming = task.persona == "forthcoming"
        self.revealed = set(range(len(task.facts))) if forthcoming else set()
        self._unclear, self._insisted = 0, False
        texts = [task.opening, *(task.facts[n].text for n in sorted(self.revealed))]
        self.opening = " ".join(texts)

    @property
    def state(self) -> str:
        """What determines the next replies."""
        return repr((sorted(self.revealed), self._unclear, self._insisted))

    def reply(self, message: str) -> Reply:
        """Returns the answer to a message of the agent."""
        message, task = message.lower(), self._task
        mentioned = [
            n for n, f in enumerate(task.facts) if any(k in message for k in f.keywords.split())
        ]
        new = [n for n in mentioned if n not in self.revealed]
        if task.persona == "terse":
            new = new[:1]
        refused = re.search(REFUSAL, message)
        if not new and (refused or re.search(_CLOSING, message)):
            if refused and task.persona == "insistent" and not self._insisted:
                self._insisted = True
                return Reply("Please try again, it is important.")
            return Reply("Goodbye.", leaves=True)
        self.revealed.update(new)
        text = " ".join(task.facts[n].text for n in new or mentioned)
        self._unclear += not text
        if task.persona == "impatient" and self._unclear == 2:
            return Reply("You don't understand me. Goodbye.", leaves=True)
        text = text or f"As I said: {task.opening}"
        return Reply(
            f"Of course! {text} Thank you." if task.persona == "chatty" else text, len(new)
        )


class ModelUser:
    """A model that plays the user through an address with chat completions.

    Args:
        task: What the user wants.
        client: Asks the model.

    Raises:
        NoAnswerError: The model gave no answer.
    """

    def __init__(self, task: DialogueTask, client: ChatClient) -> None:
        """Asks for the first message."""
        self.revealed = set(range(len(task.facts)))
        self._client = client
        self._messages = [("system", _ROLE + task.goal)]
        self.opening = self.reply("Hello! How can I help you?").text

    @property
    def state(self) -> str:
        """What determines the next replies."""
        return repr(self._messages)

    def reply(self, message: str) -> Reply:
        """Returns the answer to a message of the agent."""
        self._messages.append(("user", message))
        text = run_alone(self._client.ask(self._messages, Usage(), 0))
        self._messages.append(("assistant", text))
        return Reply(text.replace(_STOP, "").strip() or "Goodbye.", leaves=_STOP in text)


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
            secret = {name: resolve(value) for name, value in (headers or {}).items()}
            options: Any = {"request": _REQUEST, "timeout": 120.0, "retries": 1, "cache": ""}
            self._client = ChatClient(
                url=user, model=user_model, key_variable="", headers=secret, **options
            )
        self.blocking = self._client is not None
        self._tasks: list[DialogueTask] = []
        if tasks is not None:
            if domain in _DOMAINS:
                raise ConfigError(
                    f"tasks is {tasks!r}, and the domain {domain!r} draws its own; expected your "
                    "own domain, as module:Class or file.py:Class"
                )
            self._tasks = read_tau2(tasks, instance.script())
            self.num_tasks = self.num_eval_tasks = len(self._tasks)

    @property
    def tools(self) -> tuple[Tool, ...]:  # type: ignore[override]
        """The tools of the domain."""
        return self.domain.tools

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins a dialogue."""
        self._seed = seed
        return super().reset(seed=seed, options=options)

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a task and lets the user begin; `options={"task": n}` selects one of a file."""
        if self._tasks:
            n = options.get("task", draw_index(self.np_random, self._seed, len(self._tasks)))
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
