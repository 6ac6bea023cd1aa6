"""Base of suites whose tasks are objects with methods and a state, and have a grader."""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_env.env.base import Options, ResetResult
from gspo_env.env.tool_env import ToolEnv
from gspo_env.errors import ConfigError
from gspo_env.redaction import clean
from gspo_env.tools.tool import format_tool_call
from gspo_envs.data.rows import TaskRows

logger = logging.getLogger(__name__)

_DONE = "Done."
"""An answer without content."""
Calls = Sequence[tuple[str, dict[str, Any]]]
"""Names of methods, with their arguments."""
_FREE: dict[tuple[Any, ...], list[str]] = {}
"""The free tasks of suites, since an environment has a copy for each episode at a time."""


class InstanceEnv(ToolEnv):
    """A conversation about the state of objects, whose methods are the tools.

    A subclass opens a task, answers what the policy says, and grades. The outcome is 1 if the suite
    accepts the episode, else 0; the rewards of turns are 0.

    Args:
        tasks: The tasks of the suite.
        held_out: Its tasks for evaluation; by default a tenth of `tasks`.
        suite: A name of these tasks and their checks: later copies know which tasks are free.
        exclude_free: Leave out the tasks whose grader accepts an episode without a call.
        max_turns: Turns before the episode is truncated.
    """

    blocking: bool | None = False
    gives_outcome = True
    credit_score = "outcome"
    max_calls_per_turn = 16
    _pending: Iterator[str] | None = None

    def __init__(
        self,
        tasks: Sequence[Any],
        *,
        held_out: Sequence[Any] = (),
        suite: str | None = None,
        exclude_free: bool = True,
        max_turns: int = 40,
    ) -> None:
        """Leaves out the tasks that pay for no work."""
        super().__init__(max_turns)
        self.success, train = False, tasks
        tasks = [*train, *held_out]
        self._rows = TaskRows(tasks)
        key = type(self), suite, exclude_free
        seen = suite is not None and key in _FREE
        self.free = (
            _FREE[key]
            if seen
            else [self.name_of(tasks[n]) for n in range(len(tasks)) if self._is_free(n)]
        )
        """The names of the tasks that pay for no work."""
        _FREE[key] = self.free
        if self.free and exclude_free and not seen:
            logger.warning(
                "%s leaves out %d of %d tasks that pay for no call at all (exclude_free)",
                *(type(self).__name__.removesuffix("Env"), len(self.free), len(tasks)),
            )
        train_tasks, eval_tasks = (
            [t for t in each if not exclude_free or self.name_of(t) not in self.free]
            for each in (train, held_out)
        )
        self._rows = TaskRows(train_tasks, held_out=eval_tasks or 0.1)
        self.num_tasks, self.num_eval_tasks = len(self._rows), self._rows.num_held_out

    @abstractmethod
    def name_of(self, task: Any) -> str:
        """Returns the name of a task in the suite."""

    @abstractmethod
    def open(self, task: Any) -> str:
        """Begins a task: sets `tools`, and returns the first message of the user."""

    @abstractmethod
    def reply(self, text: str) -> str | None:
        """Returns the next message of the user, or None if the conversation is over."""

    @abstractmethod
    def grade(self) -> bool:
        """Returns whether the suite accepts the episode."""

    @abstractmethod
    def solution(self) -> Iterator[Calls]:
        """Yields the calls of a solution, for each message of the user."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins the task that the seed picks; `options={"row": 3}` selects one."""
        super().reset(seed=seed, options=options)
        task, index = self._rows.pick(self.np_random, seed, (options or {}).get("row"))
        self.success, self._pending = False, None
        message = self.open(copy.deepcopy(task))
        return clean(message), {"task_key": self.name_of(task), "row": index}

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Passes a text to the user; the task is graded when the user has nothing left to say."""
        message = self.reply(text)
        if message is not None:
            return clean(message), 0.0, False
        self.success = self.grade()
        return "", 0.0, True

    def step_info(self, terminated: bool, truncated: bool) -> dict[str, Any]:
        """Returns the outcome at the end."""
        if not (terminated or truncated):
            return {}
        return {"success": self.success, "episodic_reward": float(self.success)}

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the next call of the solution; with probability `noise` it skips one."""
        self._pending = self._pending or self._solve()
        action = next(self._pending, _DONE)
        if noise > 0.0 and self.np_random.random() < noise:
            action = next(self._pending, _DONE)
        return action

    def last_words(self) -> str:
        """Returns what the demonstrator says when nothing is left to call."""
        return _DONE

    def _solve(self) -> Iterator[str]:
        for calls in self.solution():
            yield from (format_tool_call(name, arguments) for name, arguments in calls)
            yield self.last_words()

    def _is_free(self, row: int) -> bool:
        self.reset(seed=0, options={"row": row})
        while not self._ended:
            self.step(_DONE)
        return self.success


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Rejects a value that is not one of the choices.

    Raises:
        ConfigError: It is another one.
    """
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(choices)}.")
