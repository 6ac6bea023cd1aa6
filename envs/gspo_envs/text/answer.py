"""Base classes of environments that draw a task from the seed."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from gspo_env.env.base import Options, ResetResult, extract_tag
from gspo_env.env.tool_env import ToolEnv
from gspo_env.errors import ConfigError


def read_range(name: str, value: Any) -> tuple[int, int]:
    """Returns a minimum and a maximum; one number is both.

    Raises:
        ConfigError: It is neither a number nor two.
    """
    ends = (value, value) if type(value) is int else value
    if not isinstance(ends, (list, tuple)) or [type(end) for end in ends] != [int, int]:
        raise ConfigError(f"{name} is {value!r}, expected a whole number or two, such as [2, 4].")
    return ends[0], ends[1]


class TaskEnv(ToolEnv):
    """Base of environments whose outcome, from 0 to 1, is set by `on_final`; 1 is a success."""

    blocking: bool | None = False
    gives_outcome = True
    credit_score = "turns"  # the rewards of turns contain the reward of success
    outcome: float = 0.0
    solution: str | None = None
    """Text of the solution, for a teacher that may read it; `draw` sets it."""

    @abstractmethod
    def draw(self, options: dict[str, Any]) -> str:
        """Draws a task and returns the first observation."""

    @property
    @abstractmethod
    def _state_key(self) -> str:
        """Returns the part of the state that determines the rest of the episode."""

    @property
    @abstractmethod
    def _task_key(self) -> str:
        """Returns what `draw` drew."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Draws a new task.

        Raises:
            ConfigError: The options ask for a task that does not exist.
        """
        super().reset(seed=seed, options=options)
        self.outcome = 0.0
        observation = self.draw(options or {})
        info = {"state_key": self._state_key, "task_key": self._task_key}
        return observation, info if self.solution is None else info | {"solution": self.solution}

    def step_info(self, terminated: bool, truncated: bool) -> dict[str, Any]:
        """Returns the state key and, at the end, the outcome."""
        info: dict[str, Any] = {"state_key": self._state_key}
        if terminated or truncated:
            info["success"] = self.outcome == 1.0
            if self.gives_outcome:
                info["episodic_reward"] = self.outcome
        return info


def probability(name: str, value: Any) -> float:
    """Returns an argument that is a probability.

    Raises:
        ConfigError: It is none.
    """
    if type(value) not in (int, float) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} is {value!r}, expected a number from 0 to 1.")
    return float(value)


class AnswerEnv(TaskEnv):
    """A right answer earns 1.0 and ends the episode with success; a wrong one only ends it."""

    early_answer: float = 0.0
    """Probability that the noisy demonstrator answers too early."""
    _early: bool | None = None

    @abstractmethod
    def is_right(self, text: str) -> bool:
        """Judges an action without a call."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Draws a new task."""
        self._early = None
        return super().reset(seed=seed, options=options)

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Ends the episode with the answer."""
        self.outcome = float(self.is_right(text))
        return "correct" if self.outcome else "wrong", self.outcome, True

    def _is_early(self, noise: float) -> bool:
        """Returns whether the noisy demonstrator answers early, drawn once per episode."""
        if noise > 0.0 and self._early is None:
            self._early = bool(self.np_random.random() < self.early_answer)
        return noise > 0.0 and self._early is True


class ChainEnv(AnswerEnv):
    """A chain of values, each computed from the one before; the answer is the last.

    Each right value, in order, earns 0.2 once; the right answer earns 1.0.

    Args:
        lengths: Minimum and maximum steps of an episode, inclusive.
        longest: Maximum steps that the options of `reset` may request.
        early_answer: Probability that the noisy demonstrator answers one step early.
    """

    length_option: str
    """Name of the option of `reset` that fixes the number of steps."""

    def __init__(self, lengths: tuple[int, int], longest: int, early_answer: float) -> None:
        """Sets the range of the number of steps."""
        super().__init__(lengths[1] + 4)
        self._lengths, self._longest = lengths, longest
        self.early_answer = probability("early_answer", early_answer)
        self._values: list[Any] = []
        self._progress = 0

    def draw_length(self, options: dict[str, Any]) -> int:
        """Draws the number of steps and starts the chain."""
        length = options.get(self.length_option)
        if length is None:
            length = int(self.np_random.integers(self._lengths[0], self._lengths[1] + 1))
        if type(length) is not int or not 1 <= length <= self._longest:
            name = type(self).__name__.removesuffix("Env")
            raise ConfigError(
                f"{name}: {self.length_option} is {length!r}, expected 1 to {self._longest}."
            )
        self._progress = 0
        self.max_turns = length + 4
        return length

    def is_right(self, text: str) -> bool:
        """Compares the answer with the end of the chain."""
        return extract_tag(text, "answer") == str(self._values[-1])

    def _advance(self) -> float:
        self._progress += 1
        return 0.2

    @property
    def solution(self) -> str:  # type: ignore[override]
        """The values of the chain."""
        return f"The values are: {', '.join(map(str, self._values))}."

    @property
    def _remaining(self) -> int:
        return len(self._values) - 1 - self._progress

    @property
    def _state_key(self) -> str:
        return f"{self._values[self._progress]}:{self._remaining}"
