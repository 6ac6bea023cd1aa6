"""Find a hidden word of five letters in six guesses."""

from __future__ import annotations

import math
from collections import Counter
from importlib.resources import files
from typing import Any

from gspo_env.env.base import extract_tag
from gspo_env.errors import ConfigError
from gspo_envs.text.answer import TaskEnv

WORDS = tuple(files("gspo_envs.text").joinpath("wordle_words.txt").read_text().split())
_FIRST = "crane"


class WordleEnv(TaskEnv):
    """Find a hidden word of five letters; the reply to a guess marks each letter.

    `G` marks the right letter at its place, `Y` a letter that the word has elsewhere, `-` a letter
    that the word does not have (any more). A place that is right for the first time earns 0.1; the
    word earns 1.0 and ends the episode.

    Args:
        max_turns: Guesses before the episode is truncated.
        words_only: Refuse guesses that are not in the word list; they still take a turn.
    """

    system_prompt = (
        "Find the hidden English word of five letters, one guess per turn, as <guess>word</guess>. "
        "The answer has a mark for each letter: G is right, Y is elsewhere in the word, - is not "
        "in it."
    )

    def __init__(self, max_turns: int = 6, words_only: bool = False) -> None:
        """Sets the number of guesses."""
        super().__init__(max_turns)
        self.num_tasks = len(WORDS)
        self._limit, self.words_only = max_turns, words_only

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a new word; `options={"word": "crane"}` sets it."""
        word = options.get("word")
        if word is not None and word not in WORDS:
            raise ConfigError(f"Wordle: word is {word!r}, expected one of the {len(WORDS)} listed.")
        self._word = word or WORDS[int(self.np_random.integers(len(WORDS)))]
        self._hints: dict[str, str] = {}
        self._places: set[int] = set()
        return f"Guess the word. You have {self._limit} guesses."

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Replies to a guess."""
        guess = (extract_tag(text, "guess") or "").lower()
        if not (len(guess) == 5 and guess.isascii() and guess.isalpha()):
            return "Write your guess of five letters as <guess>word</guess>.", 0.0, False
        if self.words_only and guess not in WORDS:
            return f"{guess} is not in the word list.", 0.0, False
        marks = mark(self._word, guess)
        self._hints[guess] = marks
        if guess == self._word:
            self.outcome = 1.0
            return f"{guess} {marks} correct", 1.0, True
        right = {place for place in range(5) if marks[place] == "G"}
        reward = 0.1 * len(right - self._places)
        self._places |= right
        remaining = self._limit - self.turns_played - 1
        return f"{guess} {marks} ({remaining} left)", reward, False

    def expert_action(self, noise: float = 0.0) -> str:
        """Guesses the most informative word, or with probability `noise` any word."""
        if noise > 0.0 and self.np_random.random() < noise:
            return f"<guess>{WORDS[int(self.np_random.integers(len(WORDS)))]}</guess>"
        possible = [w for w in WORDS if all(mark(w, g) == m for g, m in self._hints.items())]
        if not self._hints:
            return f"<guess>{_FIRST}</guess>"
        # With few words left, one that is not the answer may be more informative.
        pool = WORDS if 2 < len(possible) <= 8 else tuple(possible)
        best = max(pool, key=lambda guess: (_information(guess, possible), guess in possible))
        return f"<guess>{best}</guess>"

    @property
    def _task_key(self) -> str:
        return self._word

    @property
    def _state_key(self) -> str:
        return " ".join(f"{guess}:{marks}" for guess, marks in sorted(self._hints.items()))


def mark(word: str, guess: str) -> str:
    """Marks a guess as the game does: a letter is marked at most as often as the word has it.

    Example:
        >>> mark("abide", "added")
        'GY-Y-'
    """
    right = [a == b for a, b in zip(word, guess, strict=True)]
    remaining = Counter(a for a, hit in zip(word, right, strict=True) if not hit)
    marks = ""
    for letter, hit in zip(guess, right, strict=True):
        elsewhere = not hit and remaining[letter] > 0
        remaining[letter] -= elsewhere
        marks += "G" if hit else "Y" if elsewhere else "-"
    return marks


def _information(guess: str, possible: list[str]) -> float:
    """Returns the information of a guess in bits, rounded so that ties are exact."""
    counts = Counter(mark(word, guess) for word in possible)
    return round(-sum(n / len(possible) * math.log2(n / len(possible)) for n in counts.values()), 9)
