"""A ladder: one option of `reset` takes harder values as the success with the present one grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Interval

from gspo_env.errors import ConfigError
from gspo_env.registry import check_values
from gspo_env.training.curriculum import StepResult


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
