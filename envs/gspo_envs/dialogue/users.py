"""Simulated users: a scripted one, and a model behind an address."""

from __future__ import annotations

import re
from typing import NamedTuple

from gspo_env.rewards.client import ChatClient, Usage
from gspo_env.runtime.loops import run_alone
from gspo_envs.dialogue.task import REFUSAL, DialogueTask

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
