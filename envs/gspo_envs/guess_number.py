"""Guess a hidden number from the answers "higher" and "lower"."""

from __future__ import annotations

from typing import Any

from gspo_env.env.base import Options, ResetResult, StepResult, TextEnv, extract_tag
from gspo_env.errors import ConfigError


class GuessNumberEnv(TextEnv):
    """Guess a hidden number; each guess is answered by "higher" or "lower".

    A guess that is still possible gives 0.1; the right guess gives 1.0 and ends the episode.

    Args:
        high: The largest possible number; the smallest is 1.
        max_turns: Guesses before the episode is truncated.
    """

    blocking = False
    gives_outcome = True
    system_prompt = (
        "Guess the hidden number, one guess per turn, as <guess>number</guess>. You are told "
        "whether the number is higher or lower than your guess."
    )

    def __init__(self, high: int = 31, max_turns: int = 8) -> None:
        """Set the range of numbers and the number of guesses."""
        if high < 1 or max_turns < 1:
            raise ConfigError(
                f"GuessNumber: high is {high} and max_turns {max_turns}, expected both at least 1."
            )
        self.high, self.max_turns = high, max_turns
        self._low, self._high, self._number = 1, high, 1

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Draw a new number."""
        super().reset(seed=seed, options=options)
        self._number = int(self.np_random.integers(1, self.high + 1))
        self._low, self._high = 1, self.high
        prompt = f"I think of a number from 1 to {self.high}."
        return prompt, {"state_key": self._state_key}

    def step(self, action: str) -> StepResult:
        """Answer a guess.

        Raises:
            EnvironmentContractError: The episode has ended or has not begun.
        """
        self.require_episode()
        guess = _read_guess(action)
        observation, reward = self._judge(guess)
        terminated, truncated = self.end_turn(guess == self._number)
        info: dict[str, Any] = {"state_key": self._state_key}
        if terminated or truncated:
            info.update(success=terminated, episodic_reward=float(terminated))
        return observation, reward, terminated, truncated, info

    def expert_action(self, noise: float = 0.0) -> str:
        """Guess the middle of what is possible; with probability `noise` any number."""
        guess = (self._low + self._high) // 2
        if noise > 0.0 and self.np_random.random() < noise:
            guess = int(self.np_random.integers(1, self.high + 1))
        return f"<guess>{guess}</guess>"

    def _judge(self, guess: int | None) -> tuple[str, float]:
        if guess is None:
            return "Write your guess as <guess>number</guess>.", 0.0
        if guess == self._number:
            self._low = self._high = guess
            return "correct", 1.0
        reward = 0.1 if self._low <= guess <= self._high else 0.0
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return "higher", reward
        self._high = min(self._high, guess - 1)
        return "lower", reward

    @property
    def _state_key(self) -> str:
        return f"{self._low}-{self._high}"


def _read_guess(action: str) -> int | None:
    text = extract_tag(action, "guess") or ""
    digits = text[1:] if text.startswith("-") else text
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None
