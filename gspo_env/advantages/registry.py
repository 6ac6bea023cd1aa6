"""Where estimators are found: a registered name, a plugin, or a function of the user's."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gspo_env.errors import ConfigError
from gspo_env.types import FloatArray

Estimator = Callable[..., Sequence[FloatArray]]

ESTIMATORS: dict[str, Estimator] = {}
"""The estimators that `AdvantageConfig.estimator` may name."""

ENTRY_POINT_GROUP = "gspo_env.advantages"


def register_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Decorator that makes an estimator available under a name."""

    def register(function: Estimator) -> Estimator:
        ESTIMATORS[name] = function
        return function

    return register


def load_estimator(name: str) -> Estimator:
    """Finds an estimator: a registered name, an entry point, or `where:function`.

    Raises:
        ConfigError: Nothing has that name, or it cannot be imported.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" in name:
        return _import_estimator(name)
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    if name in plugins.names:
        loaded: Estimator = plugins[name].load()
        return loaded
    known = sorted({*ESTIMATORS, *plugins.names})
    near = ", ".join(difflib.get_close_matches(name, known) or known)
    raise ConfigError(
        f"estimator is {name!r}; expected one of: {near}, or module:function, or file.py:function"
    )


def _import_estimator(name: str) -> Estimator:
    where, _, attribute = name.rpartition(":")
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"estimator is {name!r}; expected an importable place: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        near = ", ".join(difflib.get_close_matches(attribute, public) or sorted(public)) or "none"
        raise ConfigError(f"estimator is {name!r}; expected a function of {where}, such as: {near}")
    loaded: Estimator = function
    return loaded


def _load_file(where: str) -> Any:
    path = Path(where).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
