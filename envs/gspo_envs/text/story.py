"""Work out a story in words with a calculator, one step a turn."""

from __future__ import annotations

import re
from typing import Any

from gspo_env.errors import ConfigError
from gspo_env.tools.tool import format_tool_call, tool
from gspo_env.types import ToolCall
from gspo_envs.text.answer import ChainEnv, read_range

_NAMES = ("Ann", "Eve", "Mia", "Zoe", "Amy", "Joy", "Kate", "Lucy", "Nina", "Rosa")
_THINGS = """
apples books coins cards shells stamps marbles pencils cups keys plums roses shirts stones
tickets toys buttons candles eggs flowers
"""
_GAINS = """
buys finds wins gets receives collects earns borrows
"""
_LOSSES = """
sells loses drops donates breaks lends wastes returns
"""
_ONES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SUM = re.compile(r"(\d{1,6}) ?([+-]) ?(\d{1,6})")
_LARGEST = 99
"""Largest number in a story."""


def in_words(number: int) -> str:
    """Returns a number below 100 in words.

    Example:
        >>> in_words(42)
        'forty-two'
    """
    tens, ones = divmod(number, 10)
    if tens < 2:
        return _ONES.split()[number]
    return _TENS.split()[tens - 2] + (f"-{_ONES.split()[ones]}" if ones else "")


class StoryEnv(ChainEnv):
    """Work out a story in words with a calculator, then answer with the last number.

    The numbers are words, and a verb says whether things are gained or lost. Each right result, in
    order, earns 0.2 once; the right answer earns 1.0.

    Args:
        changes: Gains and losses of an episode, or their minimum and maximum, inclusive;
            `reset(options={"changes": 3})` fixes it.
        early_answer: Probability that the noisy demonstrator answers one step early.
    """

    length_option = "changes"
    system_prompt = (
        "Work out the story with the tool, one step per turn. "
        "Then answer with <answer>number</answer>."
    )

    def __init__(self, changes: int | tuple[int, int] = 2, early_answer: float = 0.6) -> None:
        """Sets the range of the number of changes."""
        low, high = read_range("Story: changes", changes)
        if not 1 <= low <= high <= 8:
            raise ConfigError(f"Story: changes is {changes}, expected within 1 to 8.")
        super().__init__((low, high), 8, early_answer)
        self._steps: list[str] = []

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a story."""
        count = self.draw_length(options)
        value = self._number(10, 60)
        self._values, self._steps = [value], []
        story = [f"{self._word(' '.join(_NAMES))} has {in_words(value)} {self._word(_THINGS)}."]
        for _ in range(count):
            gains = value < 12 or (value < _LARGEST - 9 and bool(self.np_random.integers(2)))
            change = self._number(2, min(40, _LARGEST - value if gains else value - 2))
            story.append(f"She {self._word(_GAINS if gains else _LOSSES)} {in_words(change)}.")
            self._steps.append(f"{value} {'+' if gains else '-'} {change}")
            value += change if gains else -change
            self._values.append(value)
        self._story = " ".join(story)
        return f"{self._story} How many has she now?"

    def _number(self, low: int, high: int) -> int:
        return int(self.np_random.integers(low, high + 1))

    def _word(self, words: str) -> str:
        choices = words.split()
        return choices[int(self.np_random.integers(len(choices)))]

    @property
    def _task_key(self) -> str:
        return self._story

    @tool
    def calculate(self, expression: str) -> str:
        """Add or subtract two numbers.

        Args:
            expression: Such as 7 + 5.
        """
        match = _SUM.fullmatch(expression.strip())
        if match is None:
            return "expected two numbers with + or -"
        sign = 1 if match[2] == "+" else -1
        return str(int(match[1]) + sign * int(match[3]))

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        """Rewards the next right result."""
        if self._remaining == 0 or result != str(self._values[self._progress + 1]):
            return 0.0
        return self._advance()

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the next calculation or the answer; with noise, early or with a wrong number."""
        early = self._is_early(noise)
        slips = noise > 0.0 and self.np_random.random() < noise
        if self._remaining == 0 or (self._remaining == 1 and early):
            return f"<answer>{self._values[self._progress] + slips}</answer>"
        step = self._steps[self._progress]
        if slips:
            step = step.replace("+", "-") if "+" in step else step.replace("-", "+")
        return format_tool_call("calculate", {"expression": step})
