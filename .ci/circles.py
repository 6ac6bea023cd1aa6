#!/usr/bin/env python3
"""Finds files that import each other in a circle.

    python .ci/circles.py

Imports inside functions count, those under `if TYPE_CHECKING:` do not. A name that a package's lazy
front (`__init__.pyi`) offers is resolved to the file that defines it. Prints the shortest circle of
each group of such files; the exit code is 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "gspo_env": ROOT / "gspo_env",
    "gspo_envs": ROOT / "envs/gspo_envs",
    "gspo_agents": ROOT / "agents/gspo_agents",
}


def module_name(path: Path) -> str:
    """Returns the dotted name of a file of the packages."""
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join([package, *(part for part in parts if part != "__init__")])
    raise ValueError(f"{path} is in none of the packages {sorted(PACKAGES)}")


def module_file(name: str) -> Path | None:
    """Returns the file of a module, or None if it is not one of ours."""
    package, *rest = name.split(".")
    if package not in PACKAGES:
        return None
    path = PACKAGES[package].joinpath(*rest)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def absolute(module: str | None, level: int, package: str) -> str:
    """Returns the absolute name of a module that `package` imports relatively."""
    if not level:
        return module or ""
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, module] if module else base)


def front_names(front: Path) -> dict[str, str]:
    """Returns the modules of the names that a package's stub offers."""
    stub = front.with_suffix(".pyi")
    if front.name != "__init__.py" or not stub.is_file():
        return {}
    package = module_name(front)
    return {
        alias.asname or alias.name: absolute(node.module, node.level, package)
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def import_nodes(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports of a module that run, at its top or in its functions."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.orelse:
            yield from import_nodes(child)
    else:
        for child in ast.iter_child_nodes(node):
            yield from import_nodes(child)


def imported_files(path: Path) -> set[Path]:
    """Returns the files of the packages that a file imports."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    modules: set[str] = set()
    for node in import_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
            continue
        source = absolute(node.module, node.level, package)
        front = module_file(source)
        offered = front_names(front) if front else {}
        modules.add(source)
        for alias in node.names:
            submodule = f"{source}.{alias.name}"
            modules.add(submodule if module_file(submodule) else offered.get(alias.name, source))
    return {file for file in map(module_file, modules) if file is not None} - {path}


def circle_through(start: Path, graph: dict[Path, set[Path]]) -> list[Path]:
    """Returns the shortest way from a file over its imports back to itself, or an empty list."""
    previous: dict[Path, Path] = {}
    queue = [start]
    for path in queue:
        for target in sorted(graph[path]):
            if target == start:
                way = [path]
                while way[-1] != start:
                    way.append(previous[way[-1]])
                return way[::-1]
            if target not in previous:
                previous[target] = path
                queue.append(target)
    return []


def reachable(start: Path, graph: dict[Path, set[Path]]) -> set[Path]:
    """Returns the files that a file imports, directly or through others."""
    seen: set[Path] = set()
    stack = [start]
    while stack:
        targets = graph[stack.pop()] - seen
        seen |= targets
        stack += targets
    return seen


def main() -> int:
    """Prints a circle of each group; returns the exit code."""
    files = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
    graph = {path: imported_files(path) for path in files}
    reach = {path: reachable(path, graph) for path in files}
    groups = 0
    grouped: set[Path] = set()
    for path in files:
        if path in reach[path] and path not in grouped:
            group = {other for other in reach[path] if path in reach[other]}
            grouped |= group
            groups += 1
            circle = circle_through(path, graph)
            names = " -> ".join(module_name(file) for file in [*circle, circle[0]])
            print(f"{len(group)} files: {names}")
    print(f"{groups} groups of files import each other in a circle")
    return int(groups > 0)


if __name__ == "__main__":
    sys.exit(main())
