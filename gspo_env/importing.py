"""Imports user code by module name or file path."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gspo_env.errors import ConfigError


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Imports a function or any other callable.

    Args:
        name: `module:function` or `path/to/file.py:function`.
        what: What error messages call it, such as "estimator".

    Raises:
        ConfigError: It cannot be imported.
    """
    where, _, attribute = name.rpartition(":")
    try:
        module = load_module(where)
    except ImportError as error:
        raise ConfigError(f"{what} is {name!r}; expected an importable place: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and key[0] != "_"
        ]
        near = ", ".join(difflib.get_close_matches(attribute, public) or sorted(public)) or "none"
        raise ConfigError(f"{what} is {name!r}; expected a name in {where}, such as: {near}")
    loaded: Callable[..., Any] = function
    return loaded


def load_module(where: str) -> ModuleType:
    """Imports a module by name, or a Python file by path, which runs again only if it changed.

    A file may import the modules beside it.

    Raises:
        ImportError: It does not exist, or raised.
    """
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except (ValueError, TypeError) as error:  # not a valid name
            raise ImportError(str(error)) from error
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ImportError(f"the file {where} does not exist")
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:12]
    name = f"gspo_env_file_{path.stem}_{digest}"
    if name not in sys.modules:
        _execute(name, path)
    return sys.modules[name]


def _execute(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is no Python file")
    if (beside := str(path.parent)) not in sys.path:
        sys.path.append(beside)  # at the end, so that no installed module is replaced
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are resolved through it while it runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ImportError(f"{path.name} raised {type(error).__name__}: {error}") from error
