"""Small problems, each with one property that matters to credit assignment.

A turn shows a few words and takes one word as the action, so that a tiny model learns them in
seconds. After a warm-up on demonstrations with many errors, the model answers in the right format
but mostly wrongly.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from gspo_env.env.base import StepResult
from gspo_env.errors import ConfigError
from gspo_envs.text.answer import TaskEnv

CUES = ("sun", "moon", "star", "rain", "snow", "wind", "leaf", "fire")


class OneWordEnv(TaskEnv):
    """Base of episodes of turns with one word each; subclasses define what a word does."""

    words: ClassVar[tuple[str, ...]] = ("red", "green", "blue", "gold")

    def __init__(self, turns: int, *, fewest: int = 1, num_tasks: int = 1) -> None:
        """Sets the maximum number of turns and the number of tasks."""
        if not fewest <= turns <= 64:
            name = type(self).__name__
            raise ConfigError(f"{name}: turns is {turns}, expected {fewest} to 64.")
        super().__init__(turns)
        self.turns, self.num_tasks = turns, num_tasks

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a new task."""
        self._draw()
        return self._show()

    def step(self, action: str) -> StepResult:
        """Plays one word."""
        _, reward, terminated, truncated, info = super().step(action)
        return "over" if self._ended else self._show(), reward, terminated, truncated, info

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Plays one word; `step` gives the observation."""
        reward, ended, self.outcome = self._play(text.strip())
        return "", reward, ended

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the right word, or with probability `noise` any word."""
        if noise > 0.0 and self.np_random.random() < noise:
            return self.words[int(self.np_random.integers(len(self.words)))]
        return self._right()

    @abstractmethod
    def _draw(self) -> None:
        """Draws the task from the seed."""

    @abstractmethod
    def _show(self) -> str:
        """Returns the observation of a turn."""

    @abstractmethod
    def _right(self) -> str:
        """Returns the right word."""

    @abstractmethod
    def _play(self, word: str) -> tuple[float, bool, float]:
        """Returns the reward, whether the episode ends, and its outcome so far."""

    @property
    def _task_key(self) -> str:
        return ""

    @property
    def _last(self) -> bool:
        return self.turns_played + 1 == self.turns

    @property
    def _state_key(self) -> str:
        return str(self.turns_played)


class CuedEnv(OneWordEnv):
    """Base of episodes with a cue in each turn, which has one right word."""

    def _draw(self) -> None:
        self._cues: list[int] = self.np_random.integers(len(CUES), size=self.turns).tolist()
        self._hits = 0

    @property
    def _task_key(self) -> str:
        return " ".join(CUES[cue] for cue in self._cues)

    def _show(self) -> str:
        return CUES[self._cues[self.turns_played]]

    def _right(self) -> str:
        return self.words[self._cues[self.turns_played] % len(self.words)]


class AdditiveEnv(CuedEnv):
    """Independent turns: each right word for the shown cue earns 1 / turns.

    The more turns, the less the return of an episode depends on each one.

    Args:
        turns: Turns of every episode, K.
    """

    gives_outcome = False

    def __init__(self, turns: int = 8) -> None:
        """Sets the number of turns."""
        super().__init__(turns, num_tasks=len(CUES) ** turns)

    def _play(self, word: str) -> tuple[float, bool, float]:
        right = word == self._right()
        self._hits += right
        return right / self.turns, self._last, self._hits / self.turns


class KeyDoorEnv(OneWordEnv):
    """A delayed effect: taking the key earns 0, leaving it 0.1, and only the key opens the door.

    Opening the door on the last turn earns 1. Credit for immediate rewards alone must fail.

    Args:
        turns: Turns of every episode, at least 2.
    """

    words = ("take", "leave", "open")

    def __init__(self, turns: int = 4) -> None:
        """Sets the number of turns."""
        super().__init__(turns, fewest=2)

    def _draw(self) -> None:
        self._key = False

    def _show(self) -> str:
        if self.turns_played == 0:
            return "key"
        return "door" if self._last else "hall"

    def _right(self) -> str:
        return "take" if self._show() == "key" else "open"

    def _play(self, word: str) -> tuple[float, bool, float]:
        place = self._show()
        if place == "key":
            self._key = word == "take"
            return (0.1 if word == "leave" else 0.0), False, 0.0
        opened = float(place == "door" and self._key and word == "open")
        return opened, place == "door", opened

    @property
    def _state_key(self) -> str:
        return f"{self.turns_played}:{self._key}"


class VariableLengthEnv(OneWordEnv):
    """Variable length: the policy must stop at a given turn.

    Stopping earns 1 minus the distance to that turn as a share of all turns; continuing earns
    nothing. The baseline of turn k includes only the episodes that reached it.

    Args:
        turns: The most turns.
    """

    words = ("go", "stop")

    def __init__(self, turns: int = 6) -> None:
        """Sets the maximum turns."""
        super().__init__(turns, num_tasks=turns)

    def _draw(self) -> None:
        self._best = int(self.np_random.integers(1, self.turns + 1))

    @property
    def _task_key(self) -> str:
        return str(self._best)

    def _show(self) -> str:
        return f"turn{self.turns_played + 1} stop{self._best}"

    def _right(self) -> str:
        return "stop" if self.turns_played + 1 == self._best else "go"

    def _play(self, word: str) -> tuple[float, bool, float]:
        if word != "stop":
            return 0.0, False, 0.0
        reward = 1.0 - abs(self.turns_played + 1 - self._best) / self.turns
        return reward, True, float(reward == 1.0)
