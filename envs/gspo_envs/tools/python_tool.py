"""Number problems that need a program: a tool runs Python in the sandbox."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from gspo_env.env.base import extract_tag
from gspo_env.sandbox import Sandbox, SandboxResult, Stop
from gspo_env.tools.tool import format_tool_call, tool
from gspo_env.types import ToolCall
from gspo_envs.text.answer import AnswerEnv

_MOST_OUTPUT = 2000
_PROBLEMS = """\
What is the sum of all primes below {a20}?
print(sum(n for n in range(2, {a20}) if all(n % d for d in range(2, n))))

How many divisors does {ab} have?
print(sum({ab} % d == 0 for d in range(1, {ab} + 1)))

What is the sum of the decimal digits of {a} to the power of {b}?
print(sum(map(int, str({a} ** {b}))))

With F(0) = 0 and F(1) = 1, what is the Fibonacci number F({a}) modulo {bc}?
x, y = 0, 1
for _ in range({a}):
    x, y = y, x + y
print(x % {bc})

How many numbers from 1 to {a10} are divisible by {b} or by {c}, but not by both?
print(sum((n % {b} == 0) != (n % {c} == 0) for n in range(1, {a10} + 1)))

A number is halved if even, else tripled and increased by 1. After how many such steps \
is {ab_c} first 1?
n, k = {ab_c}, 0
while n != 1:
    n, k = (3 * n + 1 if n % 2 else n // 2), k + 1
print(k)

In how many ways can {a} be paid with coins of 1, {b} and {b_c}?
print(sum(1 for x in range(0, {a} + 1, {b}) for _ in range(x, {a} + 1, {b_c})))"""
"""Questions, each followed by a program that prints the answer."""


class PythonToolEnv(AnswerEnv):
    """Solve a problem about whole numbers with a tool that runs Python in the sandbox.

    The first run that prints the right number on its own line earns 0.2, the right answer 1.0. The
    same actions give the same episode, unless the code uses the time or randomness, or runs so
    close to its limits that whether it finishes varies.

    Args:
        sandbox: Limits of the tool; `Sandbox(allow_unsafe=True)` also runs without isolation. With
            `podman:IMAGE` or `docker:IMAGE`, or `Containers`, each run has a container of its own.
        max_turns: Turns before the episode is truncated.
        early_answer: Probability that the noisy demonstrator guesses instead of running a program.

    Raises:
        SandboxUnavailableError: This machine cannot isolate code.
    """

    blocking = True
    system_prompt = (
        "Solve the problem. The tool runs a Python program and shows what it prints; each run is "
        "new. Make one call per turn, then answer with <answer>number</answer>."
    )

    def __init__(
        self,
        sandbox: Any = None,
        max_turns: int = 6,
        early_answer: float = 0.6,
    ) -> None:
        """Sets the limits and checks whether code can be isolated."""
        super().__init__(max_turns)
        if isinstance(sandbox, (str, Mapping)):
            from gspo_env.sandbox.containers import read_containers

            sandbox = read_containers(sandbox, "PythonTool: sandbox")
        self.sandbox: Any = sandbox or Sandbox(seconds=10.0, cpu_seconds=2)
        self.sandbox.check()
        self.max_copies = getattr(self.sandbox, "at_once", None)
        self.early_answer = early_answer

    def draw(self, options: dict[str, Any]) -> str:
        """Draws a new problem."""
        self._question, self._program, self._value = _draw(self.np_random)
        self._printed = False
        self._ran: tuple[str, ...] = ()
        return self._question

    @property
    def _task_key(self) -> str:
        return self._question

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and show what it prints, and the value of a last expression.

        Args:
            code: The program.
        """
        result = self.sandbox.run(code, echo=True)
        self._ran += (code,)
        return _shown(self.sandbox, result)

    def on_tool_result(self, call: ToolCall, result: str) -> float:
        """Rewards the first run that prints the value."""
        new = not self._printed and str(self._value) in result.split("\n")
        self._printed |= new
        return 0.2 * new

    def is_right(self, text: str) -> bool:
        """Compares the answer with the value."""
        return extract_tag(text, "answer") == str(self._value)

    def expert_action(self, noise: float = 0.0) -> str:
        """Runs the program, then answers; with noise, guesses, is off by one or breaks the code."""
        early = self._is_early(noise)
        slip = early or (noise > 0.0 and bool(self.np_random.random() < noise))
        if self._printed or early:
            return f"<answer>{self._value + slip}</answer>"
        return format_tool_call("python", {"code": self._program + ")" * slip})

    @property
    def _state_key(self) -> str:
        return repr(self._ran)


def _draw(random: np.random.Generator) -> tuple[str, str, int]:
    """Draws a question, a program that prints its answer, and the answer."""
    problems = _PROBLEMS.split("\n\n")
    question, _, code = problems[int(random.integers(len(problems)))].partition("\n")
    a, b, c = (int(random.integers(*bounds)) for bounds in ((20, 100), (6, 20), (2, 6)))
    values = {"a": a, "b": b, "c": c, "a20": a * 20, "a10": a * 10, "ab": a * b, "bc": b * c}
    values |= {"ab_c": a * b + c, "b_c": b + c}
    program = code.format(**values)
    return question.format(**values), program, _printed(program)


@functools.lru_cache(maxsize=4096)
def _printed(program: str) -> int:
    """Returns the number that one of our programs prints."""
    numbers: list[int] = []
    exec(program, {"print": numbers.append})
    return numbers[0]


def _shown(box: Any, result: SandboxResult) -> str:
    parts = [result.stdout.strip("\n"), result.stderr.strip("\n")]
    text = "\n".join(part for part in parts if part)
    if len(text) > _MOST_OUTPUT:
        text = f"{text[:_MOST_OUTPUT]}\n... ({len(text) - _MOST_OUTPUT} characters more)"
    limits = {
        Stop.TIME: f"{box.seconds:g} seconds",
        Stop.CPU: f"{getattr(box, 'cpu_seconds', 0)} seconds of processor time",
        Stop.OUTPUT: f"{box.output_kib} KiB of output",
        Stop.MEMORY: f"{box.memory_mib} MiB of memory",
    }
    if result.stopped is not None:
        text += f"\nstopped after {limits[result.stopped]}"
    elif result.exit_code and not result.stderr:
        text += f"\nended with exit code {result.exit_code}"
    return text.strip("\n") or "(no output)"
