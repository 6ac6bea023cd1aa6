#!/usr/bin/env python3
"""Counts names that say what somebody did with a value, or that are metaphors.

    python .ci/names.py [FOLDER ...]

A name says what a value is: `completion`, `missing_keys`. This program looks at the names that the
code binds: variables, arguments, attributes, fields, functions and classes of the packages, of the
examples and of README's Python blocks. A name counts if one of `WORDS` is the whole name, without
underscores at its ends. `ALLOWED` has the exceptions, each with its reason. The exit code is 1 if
another name is found, or if an exception is no longer needed. The places in a FOLDER are printed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gspo_env", "envs", "agents", "examples")
WORDS = {
    *("found", "told", "said", "known", "made", "left", "own", "given", "chosen", "asked"),
    *("both", "here", "crew", "pulse", "keeper", "deal", "lanes"),
}
ALLOWED: dict[tuple[str, str], str] = {}
"""The reason of each exception, by file and name. At most 20."""


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields each name that the code binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno


def sources() -> Iterator[tuple[str, str]]:
    """Yields the path and the code of each file."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    for block in blocks:
        yield "README.md", block


def room(path: str) -> str:
    """Returns the package that a file belongs to."""
    return "/".join(path.split("/")[:2]) if path.count("/") > 1 else path


def main() -> int:
    """Prints the forbidden names; returns the exit code."""
    places: dict[tuple[str, str], list[int]] = {}
    for path, code in sources():
        for name, line in bound_names(ast.parse(code)):
            if name.strip("_").lower() in WORDS:
                places.setdefault((path, name), []).append(line)
    extra = {place: lines for place, lines in places.items() if place not in ALLOWED}
    rooms: Counter[str] = Counter()
    for (path, name), lines in sorted(extra.items()):
        rooms[room(path)] += len(lines)
        if path.startswith(tuple(sys.argv[1:] or [""])):
            print(f"{path}: {name} in line {', '.join(map(str, lines))}")
    for name, count in rooms.most_common():
        print(f"{count:5d} {name}")
    unused = [f"{path}: {name}" for path, name in ALLOWED if (path, name) not in places]
    for exception in unused:
        print(f"no longer needed in ALLOWED: {exception}")
    print(f"{sum(rooms.values())} names that are not nouns of the field; {len(ALLOWED)} allowed")
    return int(bool(extra or unused or len(ALLOWED) > 20))


if __name__ == "__main__":
    sys.exit(main())
