"""Passes hostile strings to every tool-call parser and to `step` of every built-in environment.

    python stress/fuzz.py                      # 100,000 strings each
    python stress/fuzz.py --count 5000 gspo/SQL-v0

It checks that nothing raises, that rewards are finite, that texts can be encoded, and that the same
seed gives the same result: a second copy of the environment plays each episode again. Only programs
that a time limit stops in one of the two copies may differ. The output gives their number.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import sys
import time
from collections.abc import Iterator
from typing import Any

from gspo_env import format_tool_call, make_env
from gspo_env.env.base import extract_tag
from gspo_env.env.info import parse_step
from gspo_env.env.registration import _BUILTIN
from gspo_env.errors import GspoEnvError
from gspo_env.tools.calls import parse_message, parse_tool_calls

KWARGS: dict[str, dict[str, Any]] = {
    "gspo/Dataset-v0": {"data": [{"prompt": f"What is {n} + 1?"} for n in range(9)], "max_turns": 3}
}
"""Arguments of the environments that need them."""
ODD = (
    "", "\0", "\ud800", "\u202e", "é", "東京", "💩", "²", "٣", "-0", "1e999", "9" * 400, "NaN",
    "-Infinity", "null", "true", "[]", "{}", '"', "\\", "\\u0000", "'", "''; --", "<|im_end|>",
    "<answer>", "</answer>", "<guess>", "</guess>", "<tool_call>", "</tool_call>", "[" * 2000,
    '{"a":' * 2000, "x" * 20_000, "%s%n", "\r\n", "\x1b[2J",
)  # fmt: skip
SQL = (
    "SELECT", "*", "FROM", "customers", "people", "orders", "WHERE", "1=1", "(", ")", ",",
    "count(*)", "JOIN", "UNION", "ORDER BY 1", "LIMIT -1", "WITH RECURSIVE c(x) AS (",
    "SELECT x||x FROM c", ";", "DROP TABLE", "PRAGMA", "ATTACH", "sqlite_master",
    "CAST(x'ff' AS TEXT)", "'a'", "randomblob(9)", "printf('%999999d', 1)", "1/0", "9e999",
    "-9223372036854775808", "abs(", "GROUP BY", "NULL",
)  # fmt: skip
CODE = (
    "print(1)", "1/0", "x = [0] * 10**9", "raise SystemExit('x')", "print('\\ud800')",
    "def f(): f()", "f()", "import os; os._exit(3)", "print('a' * 99999)", "open('/x', 'w')",
    "import sys", "sys.stdout.close()", "del print", "1 if", "\0", "{3, 'a', None}",
    "__import__('x')", "2**99999", "sys.stdout = None", "class A: __repr__ = None", "A()",
    "import os; os.kill(os.getpid(), 9)",
)  # fmt: skip


def scalar(rng: random.Random) -> Any:
    """A JSON value, often of the wrong type."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(ODD)
    if kind == 1:
        return rng.choice((0, -1, 10**30, 1.5, True, None, -(2**63)))
    if kind == 2:
        return [scalar(rng) for _ in range(rng.randrange(3))]
    if kind == 3:
        return {rng.choice(ODD): scalar(rng)}
    return rng.choice((rng.randrange(100), "amber", "orders", "crane"))


def noise(rng: random.Random) -> str:
    """Random characters, or a sequence of odd fragments."""
    if rng.random() < 0.5:
        return "".join(rng.choices(ODD, k=rng.randrange(1, 6)))
    codes = (rng.choice((128, 0x3000, 0x11_0000)) for _ in range(rng.randrange(40)))
    return "".join(chr(rng.randrange(limit)) for limit in codes)


def call(rng: random.Random, tools: Any) -> str:
    """A well-formed call, often with correct arguments."""
    if not tools:
        return format_tool_call("lookup", {"key": scalar(rng)})
    tool = rng.choice(tools)
    arguments = {name: argument(rng, name) for name in tool.parameters["properties"]}
    if rng.random() < 0.2:
        arguments[rng.choice(("x", *arguments))] = scalar(rng)
    return format_tool_call(tool.name, arguments)


def argument(rng: random.Random, name: str) -> Any:
    if name == "sql":
        return "SELECT " * (rng.random() < 0.7) + " ".join(rng.choices(SQL, k=rng.randrange(8)))
    if name == "code":
        return rng.choice(("\n", "; ")).join(rng.choices(CODE, k=rng.randrange(1, 4)))
    return scalar(rng)


def mutated(rng: random.Random, text: str) -> str:
    """Cut, repeat, insert or replace a piece."""
    for _ in range(rng.randrange(1, 4)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        piece = rng.choice((text[a:b] * 2, "", rng.choice(ODD), rng.choice(string.printable)))
        text = (text[:a] + piece + text[b:])[:30_000]
    return text


def generate(rng: random.Random, tools: Any, calls: float) -> str:
    """One string; `calls` is the fraction of well-formed tool calls."""
    kind = rng.random()
    if kind < calls:
        return call(rng, tools)
    if kind < 0.5:
        return mutated(rng, call(rng, tools))
    if kind < 0.6:
        body = json.dumps(scalar(rng))
        return f"<tool_call>{body}</tool_call>" if rng.random() < 0.8 else body
    if kind < 0.8:
        tag = rng.choice(("answer", "guess"))
        pieces = (noise(rng), str(scalar(rng)), " ".join(rng.choices(SQL, k=4)), "crane", "7")
        return f"{rng.choice(ODD[:8])}<{tag}>{rng.choice(pieces)}</{tag}>"
    return noise(rng)


def parse(count: int, seed: int) -> int:
    """Pass strings to every parser; return their number."""
    rng = random.Random(seed)
    parsers = [parse_tool_calls, parse_message]
    calls = 0
    for _ in range(count):
        text = generate(rng, (), 0.2)
        for parser in parsers:
            first, second = parser(text), parser(text)
            assert first == second, f"{parser.__name__} is not repeatable on {text!r}"
            calls += len(first) if isinstance(first, list) else len(first[0].tool_calls)
        extract_tag(text, "answer")
    print(f"{'parsers':24} {count:8} strings, {calls} calls and errors found")
    return count


def episode(env: Any, rng: random.Random, seed: int, calls: float) -> Iterator[tuple[Any, ...]]:
    """Play one episode; the scripted player makes some moves, so that episodes get far."""
    yield env.reset(seed=seed)
    done = False
    while not done:
        try:
            expert = env.unwrapped.expert_action(0.2) if rng.random() < calls / 2 else None
        except NotImplementedError:
            expert = None
        action = expert or generate(rng, env.unwrapped.tools, calls)
        step = parse_step(str(seed), env.step(action))
        step[0].encode()
        done = step[2] or step[3]
        yield (action, *step)


def met_a_clock(step: tuple[Any, ...]) -> bool:
    """Whether a time limit stopped a program in this step."""
    return re.search(r"stopped after [\d.]+ seconds", str(step[1])) is not None


def play(env_id: str, count: int, seed: int) -> int:
    """Pass `count` strings to an environment and a copy of it; return the number of steps.

    It is 0 if the environment needs arguments or a package and cannot be made.
    """
    # Each program is a process: run fewer programs, with the same number of strings.
    calls = 0.02 if "Python" in env_id else 0.2
    try:
        pair = [make_env(env_id, **KWARGS.get(env_id, {})) for _ in range(2)]
    except GspoEnvError as error:
        print(f"{env_id:24} NOT MADE: {error}")
        return 0
    steps, episodes, clocked, begun = 0, 0, 0, time.perf_counter()
    while steps < count:
        first, again = (
            list(episode(env, random.Random(seed + episodes), seed + episodes, calls))
            for env in pair
        )
        where = next((i for i, (a, b) in enumerate(zip(first, again, strict=False)) if a != b), -1)
        if where >= 0 and not any(met_a_clock(play[where]) for play in (first, again)):
            raise AssertionError(f"{env_id}: {first[where]} and then {again[where]}")
        assert where >= 0 or len(first) == len(again)
        clocked += where >= 0
        steps += len(first) - 1
        episodes += 1
    for env in pair:
        env.close()
    taken = time.perf_counter() - begun
    summary = f"{episodes} episodes, twice each, {clocked} differ by a clock, {taken:.0f} s"
    print(f"{env_id:24} {steps:8} strings, {summary}", flush=True)
    return steps


def main(arguments: list[str] | None = None) -> int:
    """Run the fuzz tests; return 1 if an environment could not be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env_ids", nargs="*", default=sorted(_BUILTIN))
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    parse(options.count, options.seed)
    steps = [play(name, options.count, options.seed) for name in options.env_ids]
    return int(0 in steps)


if __name__ == "__main__":
    sys.exit(main())
