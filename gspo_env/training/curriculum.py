"""Curricula: the `options` of `reset` in a step follow from the results of the steps before."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gspo_env.errors import ConfigError
from gspo_env.settings import settings


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the episodes of one training step were."""

    options: Mapping[str, Any]
    """The options of `reset`."""
    success: float
    """Share of the episodes that succeeded."""
    mean_return: float
    """Mean sum of the turns' rewards."""
    tasks: Sequence[tuple[int, str, int, int]] = ()
    """What a curriculum that draws tasks records; see `gspo_env.training.pool`."""

    def metrics(self) -> dict[str, float]:
        """Returns the options that are numbers, by metric name."""
        numbers = {k: v for k, v in self.options.items() if isinstance(v, int | float)}
        return {f"rollout/option/{name}": float(value) for name, value in numbers.items()}


class Curriculum(Protocol):
    """Chooses the options of the next step's tasks; a frozen dataclass with its own settings."""

    def options(self, results: Sequence[StepResult]) -> Mapping[str, Any]:
        """Returns the options of `reset`, which are JSON values.

        A function of the results alone, so that a resumed run continues in the same way.

        Args:
            results: All steps before, the last one last.
        """


@settings
class NoCurriculum:
    """Every step plays tasks without options."""

    def options(self, results: Sequence[StepResult]) -> Mapping[str, Any]:
        """Returns no options."""
        return {}


def next_options(curriculum: Curriculum, results: Sequence[StepResult]) -> dict[str, Any]:
    """Returns the options that a curriculum chooses.

    Raises:
        ConfigError: It raised, or what it returned is no mapping of JSON values.
    """
    name = type(curriculum).__name__
    try:
        mapping = dict(curriculum.options(results))
        options: dict[str, Any] = json.loads(json.dumps(mapping))
    except Exception as error:
        raise ConfigError(
            f"options of curriculum {name} failed: {type(error).__name__}: {error}; expected a "
            "mapping of names to JSON values"
        ) from error
    return options
