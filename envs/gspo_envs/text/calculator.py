"""Work out a chain of sums with a calculator, one operation a turn."""

from __future__ import annotations

import operator
from typing import Any

from gspo_env.errors import ConfigError
from gspo_env.tools.tool import format_tool_call, tool
from gspo_env.types import ToolCall
from gspo_envs.text.answer import ChainEnv, read_range

_SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*"}
_NEXT = 8 + 8 + 2
"""Operations that may follow: two with the numbers 2 to 9, and a product with 2 or 3."""
_FUNCTIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


class CalculatorEnv(ChainEnv):
    """Work out an expression with calculator tools, then answer with its value.

    Each right intermediate result, in order, earns 0.2 once; the right answer earns 1.0.

    Args:
        operations: Operations of an episode, or their minimum and maximum, inclusive;
            `reset(options={"operations": 3})` fixes it.
        early_answer: Probability that the noisy demonstrator answers one operation early.
    """

    length_option = "operations"
    system_prompt = (
        "Work out the expression with the tools, one call per turn, innermost parentheses first. "
        "Then answer with <answer>number</answer>."
    )

    def __init__(
        self, operations: int | tuple[int, int] = (2, 4), early_answer: float = 0.6
    ) -> None:
        """Sets the range of the number of operations."""
        low, high = read_range("Calculator: operations", operations)
        if not 1 <= low <= high <= 16:
            raise ConfigError(f"Calculator: operations is {operations}, expected within 1 to 16.")
        super().__init__((low, high), 16, early_answer)
        self.num_tasks = sum(9 * _NEXT**count for count in range(low, high + 1))
        self._steps: list[tuple[str, int, int]] = []

    def draw(self, options: dict[str, Any]) -> str:
        """Draws the operations; the expression has no outer parentheses."""
        count = self.draw_length(options)
        value = int(self.np_random.integers(1, 10))
        text = str(value)
        self._steps, self._values = [], [value]
        names = list(_SYMBOLS)
        for index in range(count):
            name = names[int(self.np_random.integers(len(names)))]
            operand = int(self.np_random.integers(2, 4 if name == "multiply" else 10))
            inner = f"({text})" if index else text
            text = f"{inner} {_SYMBOLS[name]} {operand}"
            self._steps.append((name, value, operand))
            value = _FUNCTIONS[name](value, operand)
            self._values.append(value)
        self._expression = text
        return f"Compute {text}."

    @property
    def _task_key(self) -> str:
        return self._expression

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two integers.

        Args:
            a: The first integer.
            b: The second integer.
        """
        return a + b

    @tool
    def subtract(self, a: int, b: int) -> int:
        """Subtract the second integer from the first.

        Args:
            a: The first integer.
            b: The second integer.
        """
        return a - b

    @tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two integers.

        Args:
            a: The first integer.
            b: The second integer.
        """
        return a * b

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        """Rewards the next right intermediate result."""
        if self._remaining == 0:
            return 0.0
        name, a, b = self._steps[self._progress]
        operands = (call.arguments["a"], call.arguments["b"])
        swapped = name != "subtract" and operands == (b, a)
        if call.name != name or not (operands == (a, b) or swapped):
            return 0.0
        return self._advance()

    def expert_action(self, noise: float = 0.0) -> str:
        """Returns the next operation or the answer; with noise, early or with a wrong number."""
        early = self._is_early(noise)
        slip = 0
        if noise > 0.0 and self.np_random.random() < noise:
            slip = int(self.np_random.integers(1, 4))
        if self._remaining == 0 or (self._remaining == 1 and early):
            return f"<answer>{self._values[self._progress] + slip}</answer>"
        name, a, b = self._steps[self._progress]
        return format_tool_call(name, {"a": a, "b": b + slip})
