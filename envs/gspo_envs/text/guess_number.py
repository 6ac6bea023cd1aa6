"""Guess a hidden number from the answers "higher" and "lower"."""

from __future__ import annotations

import math
from typing import Any

from gspo_env.env.base import extract_tag
from gspo_env.errors import ConfigError
from gspo_envs.text.answer import TaskEnv

_HALVING = 0.05
"""Reward for a guess that leaves half of the numbers."""


class GuessNumberEnv(TaskEnv):
    """Guess a hidden number; the reply to each guess is "higher" or "lower".

    A guess earns 0.05 for each halving of the numbers that are possible, so that slow guesses earn
    no more than good ones; the right guess earns 1.0 more and ends the episode.

    Args:
        high: The largest possible number; the smallest is 1.
        max_turns: Guesses before the episode is truncated.
    """

    system_prompt = (
        "Guess the hidden number, one guess per turn, as <guess>number</guess>. You are told "
        "whether the number is higher or lower than your guess."
    )

    def __init__(self, high: int = 31, max_turns: int = 8) -> None:
        """Sets the range of numbers and the number of guesses."""
        super().__init__(max_turns)
        if high < 1:
            raise ConfigError(f"GuessNumber: high is {high}, expected at least 1.")
        self.high = self.num_tasks = high

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a new number."""
        self._number = int(self.np_random.integers(1, self.high + 1))
        self._low, self._high = 1, self.high
        return f"I think of a number from 1 to {self.high}."

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Replies to a guess."""
        guess = _read_guess(text)
        if guess is None:
            return "Write your guess as <guess>number</guess>.", 0.0, False
        possible = self._high - self._low + 1
        if guess <= self._number:
            self._low = max(self._low, guess + (guess < self._number))
        if guess >= self._number:
            self._high = min(self._high, guess - (guess > self._number))
        reward = _HALVING * math.log2(possible / (self._high - self._low + 1))
        if guess == self._number:
            self.outcome = 1.0
            return "correct", 1.0 + reward, True
        return "higher" if guess < self._number else "lower", reward, False

    def expert_action(self, noise: float = 0.0) -> str:
        """Guesses the middle of the possible range, or with probability `noise` any number."""
        guess = (self._low + self._high) // 2
        if noise > 0.0 and self.np_random.random() < noise:
            guess = int(self.np_random.integers(1, self.high + 1))
        return f"<guess>{guess}</guess>"

    @property
    def _task_key(self) -> str:
        return str(self._number)

    @property
    def _state_key(self) -> str:
        return f"{self._low}-{self._high}"


def _read_guess(action: str) -> int | None:
    text = extract_tag(action, "guess") or ""
    digits = text[1:] if text.startswith("-") else text
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None
