"""Functions of the user's, by `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo_env.errors import ConfigError


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Import a function, or anything else that can be called.

    Args:
        name: `module:function` or `path/to/file.py:function`.
        what: What a message calls it, such as "estimator".

    Raises:
        ConfigError: It cannot be imported.
    """
    where, _, attribute = name.rpartition(":")
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"{what} is {name!r}; expected an importable place: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        near = ", ".join(difflib.get_close_matches(attribute, public) or sorted(public)) or "none"
        raise ConfigError(f"{what} is {name!r}; expected a function of {where}, such as: {near}")
    loaded: Callable[..., Any] = function
    return loaded


def _load_file(where: str) -> Any:
    path = Path(where).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
