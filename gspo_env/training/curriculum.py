"""Curricula: the `options` of `reset` in a step follow from the results of the steps before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from annotated_types import Ge, Interval

from gspo_env.errors import ConfigError
from gspo_env.registry import check_values
from gspo_env.runtime.threads import attempt

if TYPE_CHECKING:
    from gspo_env.env.base import TextEnvironment


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the episodes of one training step were."""

    options: Mapping[str, Any]
    """The options of `reset`."""
    success: float
    """Share of the episodes that succeeded."""
    mean_return: float
    """Mean sum of the turns' rewards."""

    def metrics(self) -> dict[str, float]:
        """Returns the options that are numbers, by metric name."""
        numbers = {k: v for k, v in self.options.items() if isinstance(v, int | float)}
        return {f"rollout/option/{name}": float(value) for name, value in numbers.items()}


class ReadOptions(dict[str, Any]):
    """Options of `reset` that remember which of them were read.

    Example:
        >>> options = ReadOptions({"hops": 2, "size": 3})
        >>> options.get("hops"), options.read
        (2, {'hops'})
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Takes the options; none is read yet."""
        super().__init__(options)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        """Returns an option."""
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        """Returns whether there is an option of that name."""
        self.read.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        """Reads all names."""
        self.read.update(super().keys())
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an option or the default."""
        self.read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes an option."""
        self.read.add(name)
        return super().pop(name, *default)

    def keys(self) -> Any:
        """Reads all options."""
        self.read.update(super().keys())
        return super().keys()

    def values(self) -> Any:
        """Reads all options."""
        self.read.update(super().keys())
        return super().values()

    def items(self) -> Any:
        """Reads all options."""
        self.read.update(super().keys())
        return super().items()

    def copy(self) -> ReadOptions:
        """Returns itself, so that a copy is watched too."""
        return self


class Curriculum(Protocol):
    """Chooses the options of the next step's tasks; a frozen dataclass with its own settings."""

    def options(self, results: Sequence[StepResult]) -> Mapping[str, Any]:
        """Returns the options of `reset`, which are JSON values.

        A function of the results alone, so that a resumed run goes on in the same way.

        Args:
            results: All steps before, the last one last.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCurriculum:
    """Every step plays tasks without options."""

    def options(self, results: Sequence[StepResult]) -> Mapping[str, Any]:
        """Returns no options."""
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """One option takes the next value once the mean success with the present one is high enough."""

    option: str = "hops"
    """Name of the option; the default environment has `hops`."""
    values: tuple[int | float | str, ...] = (1, 2, 3)
    """Its values, from easy to hard."""
    success: Annotated[float, Interval(ge=0, le=1)] = 0.8
    """Mean success that leads to the next value."""
    window: Annotated[int, Ge(1)] = 2
    """Steps over which the mean is taken."""

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        check_values(self)
        if not self.option or not self.values:
            raise ConfigError(
                f"curriculum ladder has option {self.option!r} and values {list(self.values)}; "
                "expected both, such as --option hops --values 1 2 3"
            )

    def options(self, results: Sequence[StepResult]) -> Mapping[str, Any]:
        """Returns the option with its present value."""
        level = 0
        recent: list[float] = []
        for result in results:
            if result.options.get(self.option, self.values[level]) != self.values[level]:
                continue  # of groups that were drawn before the last change
            recent = [*recent, result.success][-self.window :]
            enough = len(recent) == self.window and sum(recent) / self.window >= self.success
            if enough and level + 1 < len(self.values):
                level, recent = level + 1, []
        return {self.option: self.values[level]}


def next_options(curriculum: Curriculum, results: Sequence[StepResult]) -> dict[str, Any]:
    """Returns the options that a curriculum chooses.

    Raises:
        ConfigError: It raised, or what it returned is no mapping of JSON values.
    """
    name = type(curriculum).__name__
    try:
        found = curriculum.options(results)
        if not isinstance(found, Mapping):
            raise TypeError(f"it returned {type(found).__name__}")
        options: dict[str, Any] = json.loads(json.dumps(dict(found)))
    except Exception as error:
        raise ConfigError(
            f"options of curriculum {name} failed: {type(error).__name__}: {error}; expected a "
            "mapping of names to JSON values"
        ) from error
    return options


def unread_options(env: TextEnvironment, options: Mapping[str, Any], seed: int = 0) -> list[str]:
    """Returns the names of the options that `reset` does not read, so that they have no effect.

    Args:
        env: The environment, which is reset.
        options: The options.
        seed: The seed of `reset`.
    """
    noted = ReadOptions(options)
    attempt(env.reset, seed=seed, options=noted)
    return [name for name in options if name not in noted.read]
