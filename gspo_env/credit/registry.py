"""Where estimators are found: a registered name, a plugin, or a function of the user's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from gspo_env.errors import ConfigError
from gspo_env.importing import load_function
from gspo_env.types import FloatArray

Estimator = Callable[..., Sequence[FloatArray]]

ESTIMATORS: dict[str, Estimator] = {}
"""The estimators that `AdvantageConfig.estimator` may name."""

ENTRY_POINT_GROUP = "gspo_env.credit.estimate"


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
        found: Estimator = load_function(name, "estimator")
        return found
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    if name in plugins.names:
        loaded: Estimator = plugins[name].load()
        return loaded
    known = sorted({*ESTIMATORS, *plugins.names})
    near = ", ".join(difflib.get_close_matches(name, known) or known)
    raise ConfigError(
        f"estimator is {name!r}; expected one of: {near}, or module:function, or file.py:function"
    )
