"""Six small problems, each with one property that credit assignment meets or misses.

A turn shows a few words and takes one word as the action, so that a tiny model learns them in
seconds. Warmed up on demonstrations with many slips, it speaks the language and knows little.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import Any, ClassVar

from gspo_env.env.base import StepResult
from gspo_env.errors import ConfigError
from gspo_envs.answer import TaskEnv

_CUES = ("sun", "moon", "star", "rain", "snow", "wind", "leaf", "fire")


class _OneWord(TaskEnv):
    """An episode of turns with one word each; subclasses say what a word does."""

    words: ClassVar[tuple[str, ...]] = ("red", "green", "blue", "gold")

    def __init__(self, turns: int, *, fewest: int = 1) -> None:
        """Set the most turns of an episode."""
        if not fewest <= turns <= 64:
            name = type(self).__name__
            raise ConfigError(f"{name}: turns is {turns}, expected {fewest} to 64.")
        super().__init__(turns)
        self.turns = turns

    def draw(self, options: dict[str, Any]) -> str:
        """Draw a new task."""
        self._draw()
        return self._show()

    def step(self, action: str) -> StepResult:
        """Play one word."""
        _, reward, terminated, truncated, info = super().step(action)
        return "over" if self._ended else self._show(), reward, terminated, truncated, info

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Play one word; `step` gives the observation."""
        reward, ended, self.outcome = self._play(text.strip())
        return "", reward, ended

    def expert_action(self, noise: float = 0.0) -> str:
        """The right word; with probability `noise` any word."""
        if noise > 0.0 and self.np_random.random() < noise:
            return self.words[int(self.np_random.integers(len(self.words)))]
        return self._right()

    @abstractmethod
    def _draw(self) -> None:
        """Draw what the seed decides, and begin."""

    @abstractmethod
    def _show(self) -> str:
        """The observation of a turn."""

    @abstractmethod
    def _right(self) -> str:
        """The right word."""

    @abstractmethod
    def _play(self, word: str) -> tuple[float, bool, float]:
        """The reward, whether the episode ends, and its outcome so far."""

    @property
    def _last(self) -> bool:
        return self._turn + 1 == self.turns

    @property
    def _state_key(self) -> str:
        return str(self._turn)


class _Cued(_OneWord):
    """A cue in each turn, which has one right word."""

    def _draw(self) -> None:
        self._cues: list[int] = self.np_random.integers(len(_CUES), size=self.turns).tolist()
        self._hits = 0

    def _show(self) -> str:
        return _CUES[self._cues[self._turn]]

    def _right(self) -> str:
        return self.words[self._cues[self._turn] % len(self.words)]


class AdditiveEnv(_Cued):
    """Independent turns: each right word, for the cue shown, gives 1 / turns.

    The more turns, the less an episode's total says about one of them.

    Args:
        turns: Turns of every episode, K.
    """

    gives_outcome = False

    def __init__(self, turns: int = 8) -> None:
        """Set the number of turns."""
        super().__init__(turns)

    def _play(self, word: str) -> tuple[float, bool, float]:
        right = word == self._right()
        self._hits += right
        return right / self.turns, self._last, self._hits / self.turns


class KeyDoorEnv(_OneWord):
    """A delayed effect: taking the key gives nothing, leaving it 0.1, and only it opens the door.

    The door, in the last turn, gives 1. Credit for immediate rewards alone must fail.

    Args:
        turns: Turns of every episode, at least 2.
    """

    words = ("take", "leave", "open")

    def __init__(self, turns: int = 4) -> None:
        """Set the number of turns."""
        super().__init__(turns, fewest=2)

    def _draw(self) -> None:
        self._key = False

    def _show(self) -> str:
        if self._turn == 0:
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
        return f"{self._turn}:{self._key}"


class RecurringEnv(_OneWord):
    """Recurring states: walk a ring of rooms to a goal; the same rooms are met again and again.

    Arriving gives 1. What was done in a room can be compared across turns (`gigpo`, `group_gae`).

    Args:
        turns: The most turns.
        rooms: Rooms of the ring.
    """

    words = ("left", "right")

    def __init__(self, turns: int = 8, rooms: int = 6) -> None:
        """Set the size of the ring."""
        if not 3 <= rooms <= 16:
            raise ConfigError(f"Recurring: rooms is {rooms}, expected 3 to 16.")
        super().__init__(turns)
        self.rooms = rooms

    def _draw(self) -> None:
        self._room, self._goal = self.np_random.choice(self.rooms, 2, replace=False).tolist()

    def _show(self) -> str:
        return f"room{self._room} goal{self._goal}"

    def _right(self) -> str:
        return "right" if 2 * ((self._goal - self._room) % self.rooms) <= self.rooms else "left"

    def _play(self, word: str) -> tuple[float, bool, float]:
        self._room = (self._room + (word == "right") - (word == "left")) % self.rooms
        there = self._room == self._goal
        return float(there), there, float(there)

    @property
    def _state_key(self) -> str:
        return str(self._room)


class VariableLengthEnv(_OneWord):
    """The policy decides the length: stop at the turn that was named.

    Stopping gives 1, less the distance to that turn as a share of all turns; going on nothing.
    A baseline of turn k is one of the episodes that went that far.

    Args:
        turns: The most turns.
    """

    words = ("go", "stop")

    def __init__(self, turns: int = 6) -> None:
        """Set the most turns."""
        super().__init__(turns)

    def _draw(self) -> None:
        self._best = int(self.np_random.integers(1, self.turns + 1))

    def _show(self) -> str:
        return f"turn{self._turn + 1} stop{self._best}"

    def _right(self) -> str:
        return "stop" if self._turn + 1 == self._best else "go"

    def _play(self, word: str) -> tuple[float, bool, float]:
        if word != "stop":
            return 0.0, False, 0.0
        reward = 1.0 - abs(self._turn + 1 - self._best) / self.turns
        return reward, True, float(reward == 1.0)


class DistractorEnv(_Cued):
    """Distractor turns: every other turn's reward is noise of the word's own, of mean zero.

    Right words in the other turns give 1 in all.

    Args:
        turns: Turns of every episode, at least 2.
        noise: Size of the noise.
    """

    def __init__(self, turns: int = 8, noise: float = 0.5) -> None:
        """Set the number of turns and the noise."""
        super().__init__(turns, fewest=2)
        self.noise = noise

    def _draw(self) -> None:
        super()._draw()
        self._salt = int(self.np_random.integers(2**31))

    def _show(self) -> str:
        return super()._show() if self._turn % 2 == 0 else "noise"

    def _play(self, word: str) -> tuple[float, bool, float]:
        signals = (self.turns + 1) // 2
        reward = 0.0
        if self._turn % 2 == 0:
            right = word == self._right()
            self._hits += right
            reward = right / signals
        elif word in self.words:
            text = f"{self._salt}:{self._turn}:{word}".encode()
            heads = hashlib.blake2b(text, digest_size=1).digest()[0] % 2
            reward = self.noise * (1 if heads else -1)
        return reward, self._last, self._hits / signals


class MisleadingEnv(_OneWord):
    """A misleading dense reward: a bait pays 0.1 in each turn, the right words only all together.

    Right words in every turn give 1 in the last.

    Args:
        turns: Turns of every episode.
    """

    words = ("work", "bait", "rest")

    def __init__(self, turns: int = 3) -> None:
        """Set the number of turns."""
        super().__init__(turns)

    def _draw(self) -> None:
        self._right_so_far = True

    def _show(self) -> str:
        return f"turn{self._turn + 1}"

    def _right(self) -> str:
        return "work"

    def _play(self, word: str) -> tuple[float, bool, float]:
        self._right_so_far &= word == "work"
        won = float(self._last and self._right_so_far)
        return (0.1 if word == "bait" else won), self._last, won

    @property
    def _state_key(self) -> str:
        return f"{self._turn}:{self._right_so_far}"
