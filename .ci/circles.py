#!/usr/bin/env python3
"""Fails if files of the packages import each other in a circle while they load.

python .ci/circles.py

An import inside a function loads nothing by itself, and one for type checkers never runs.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [ROOT / "gspo_env", ROOT / "envs" / "gspo_envs", ROOT / "agents" / "gspo_agents"]
FILES = {
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in FOLDERS
    for path in folder.rglob("*.py")
}


def from_imports(nodes: list[ast.stmt], package: str) -> Iterator[tuple[str, str]]:
    """Yields the module and the name of each import that runs when a module loads."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from from_imports(node.orelse, package)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from from_imports(node.body, package)


def imported(name: str, path: Path) -> set[str]:
    """Returns the modules that a module imports; a lazy front loads where a name comes from."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    modules: set[str] = set()
    for module, attribute in from_imports(ast.parse(path.read_text()).body, package):
        front = FILES.get(module, path).with_suffix(".pyi")
        offers = ast.parse(front.read_text()).body if front.is_file() else []
        lazy = {n: source for source, n in from_imports(offers, module)}
        submodule = f"{module}.{attribute}"
        modules.add(submodule if submodule in FILES else lazy.get(attribute, module))
    return modules & FILES.keys() - {name}


try:
    TopologicalSorter({name: imported(name, path) for name, path in FILES.items()}).prepare()
except CycleError as error:
    sys.exit(f"files import each other in a circle: {' <- '.join(error.args[1])}")
print(f"{len(FILES)} files import each other in no circle")
