"""Tasks of a dialogue, and the database that they change."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gspo_env.errors import ConfigError, raised_as
from gspo_env.given_file import read_given
from gspo_env.tools.tool import Tool, tool_methods
from gspo_env.types import ToolCall

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 28
"""Maximum size of a task file."""

PERSONAS = {
    "terse": "You answer one question at a time, in few words.",
    "chatty": "You are friendly and talk a lot.",
    "forthcoming": "You say everything you know in your first message.",
    "impatient": "You leave if the agent does not understand you twice.",
    "insistent": "If the agent refuses, you ask once more before you give up.",
}
"""Manners of a user, as a model reads them."""
REFUSAL = r"\b(cannot|can.?t|can not|unable|not possible|not allowed)\b"
"""Pattern of a message that refuses a request."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What the user says when a message has one of the keywords, which are separated by blanks."""

    keywords: str
    text: str
    question: str = ""
    """How the scripted agent asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DialogueTask:
    """What a user wants, and how the database is afterwards."""

    script: str
    """Statements that create the database."""
    opening: str
    """First message of the scripted user."""
    persona: str = ""
    """Manner of the user; see `ScriptedUser`."""
    facts: tuple[Fact, ...] = ()
    instructions: str = ""
    """What a model that plays the user reads; by default the opening, the facts and the manner."""
    actions: tuple[ToolCall, ...]
    """Calls that solve the task: the database must end as they leave it."""
    says: tuple[str, ...] = ()
    """Patterns that the agent's messages must match."""
    requires_calls: bool = True
    """Whether each of the actions is required, not only the state that they lead to."""

    @property
    def goal(self) -> str:
        """The instructions, or their default."""
        texts = [self.opening, *(fact.text for fact in self.facts), PERSONAS.get(self.persona, "")]
        return self.instructions or " ".join(texts)


class Domain:
    """A database with the `@tool` methods of a subclass, and a generator of tasks.

    The tools see `connection`. A subclass defines `draw`, or `script` if its tasks are read from a
    file.
    """

    rules: str = "You serve customers. Ask for what you need, and use the tools."
    """The system prompt of the agent."""
    connection: sqlite3.Connection

    def __init__(self) -> None:
        """Opens an empty database."""
        self.load("")

    def draw(self, random: np.random.Generator) -> DialogueTask:
        """Draws a task."""
        raise NotImplementedError(f"{type(self).__name__} draws no tasks; set tasks=FILE.json")

    def script(self) -> str:
        """Returns the statements that create the database of tasks from a file."""
        raise NotImplementedError(f"{type(self).__name__} must define script()")

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, bound to this database."""
        return tool_methods(type(self), self)

    def load(self, script: str) -> None:
        """Replaces the database."""
        self.close()
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.connection.executescript(script)

    def close(self) -> None:
        """Frees the database."""
        if hasattr(self, "connection"):
            self.connection.close()

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Runs a trusted statement and returns its rows."""
        return self.connection.execute(sql, values).fetchall()

    def state(self) -> list[str]:
        """Returns the contents of the database, whatever the order of insertion."""
        return sorted(self.connection.iterdump())

    def solve(self, task: DialogueTask) -> list[str]:
        """Returns the state after the actions of a task, and loads its database anew.

        Raises:
            ConfigError: An action calls a tool that does not exist, or with wrong arguments.
        """
        self.load(task.script)
        tools = {each.name: each for each in self.tools}
        for call in task.actions:
            if call.name not in tools:
                raise ConfigError(
                    f"a task calls {call.name!r}; {type(self).__name__} has {', '.join(tools)}"
                )
            tools[call.name].function(**tools[call.name].validate(call.arguments))
        state = self.state()
        self.load(task.script)
        return state


def read_tau2(path: str, script: str) -> list[DialogueTask]:
    """Reads a task file of tau2-bench.

    Tasks that this environment cannot score are left out, with a warning: with an initial state,
    with actions of the user, or with rewards other than the database, the calls and what the agent
    communicates.

    Args:
        path: The file, such as `data/tau2/domains/airline/tasks.json`.
        script: Statements that create the database.

    Raises:
        ConfigError: The file cannot be read or has no task that can be scored.
    """
    faults = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
    with raised_as(ConfigError, f"tasks is {path!r}; expected a task file of tau2-bench", *faults):
        values = json.loads(read_given(Path(path), _MOST_BYTES))
        tasks = [_read_task(value, script) for value in values]
    scored = [task for task in tasks if task is not None]
    if not scored:
        raise ConfigError(f"tasks is {path!r}, of whose {len(tasks)} tasks none can be scored")
    if len(scored) < len(tasks):
        skipped = len(tasks) - len(scored)
        logger.warning("%s: left out %d tasks that cannot be scored", path, skipped)
    return scored


def _read_task(value: Any, script: str) -> DialogueTask | None:
    criteria = value["evaluation_criteria"]
    actions, claims = criteria.get("actions") or [], criteria.get("communicate_info") or []
    basis = set(criteria.get("reward_basis") or ("DB", "COMMUNICATE"))
    scored = {"DB", "COMMUNICATE", "ACTION"}
    if not criteria.get("nl_assertions"):
        scored.add("NL_ASSERTION")
    by_user = any(action.get("requestor", "assistant") != "assistant" for action in actions)
    if not basis <= scored or by_user or any((value.get("initial_state") or {}).values()):
        return None
    scenario = value["user_scenario"]
    situation = scenario["instructions"]
    if isinstance(situation, str):
        situation = {"reason_for_call": situation}
    facts = filter(None, [situation.get("known_info")])
    lines = {"persona": scenario.get("persona"), **situation}
    return DialogueTask(
        script=script,
        opening=situation["reason_for_call"],
        facts=tuple(Fact(keywords="?", text=text) for text in facts),
        instructions="\n".join(f"{name}: {text}" for name, text in lines.items() if text),
        actions=tuple(ToolCall(name=a["name"], arguments=a["arguments"]) for a in actions),
        says=tuple(map(re.escape, claims)) if "COMMUNICATE" in basis else (),
        requires_calls="ACTION" in basis,
    )
