"""Several trackers as one choice, such as `--tracker mlflow,wandb`."""

from __future__ import annotations

import re
from dataclasses import field, make_dataclass
from functools import cache
from typing import Any

from gspo_env.errors import ConfigError
from gspo_env.registry import find
from gspo_env.tracking.multi import MultiTracker, parts


@cache
def combine(names: str) -> type[Any]:
    """Makes the settings class of several trackers: a dataclass with one field for each.

    Example:
        >>> combine("mlflow,none")().mlflow.traces
        1

    Raises:
        ConfigError: A name is unknown or repeated.
    """
    tracker_names = tuple(name.strip() for name in names.split(","))
    keys = [re.sub(r"\W", "_", name.rpartition(":")[2]).lower() for name in tracker_names]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"tracker is {names!r}; expected different names")
    classes = [find("tracker", name) for name in tracker_names]
    return make_dataclass(
        "Trackers",
        [(key, cls, field(default_factory=cls)) for key, cls in zip(keys, classes, strict=True)],
        namespace={
            "__doc__": "The settings of several trackers.",
            "__module__": __name__,
            "tracker_names": tracker_names,
            "start": lambda self, run: MultiTracker(parts(self), run),
        },
        frozen=True,
        kw_only=True,
        slots=True,
    )
