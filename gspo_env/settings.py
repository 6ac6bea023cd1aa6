"""Settings: dataclasses whose values are checked when they are made."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, dataclass_transform, overload

import numpy as np
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from gspo_env.errors import ConfigError

T = TypeVar("T")
STRICT = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
)
"""No value is converted but an integer to a float."""

Prose = Annotated[str, "prose"]
"""A text that a model reads: it names no file, no address and no code."""
_LARGEST = 2**63 - 1
"""The largest integer of files, tensors and stores."""


@overload
def settings(cls: type[T], /) -> type[T]: ...


@overload
def settings(*, frozen: bool) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
def settings(cls: type[T] | None = None, /, *, frozen: bool = True) -> Any:
    """Makes a keyword-only dataclass that only takes values that its annotations allow.

    A value is converted only from an integer to a float. `__post_init__` may check fields together.

    Raises:
        ConfigError: When the class is called: a sentence with the field, its value and what is
            expected.

    Example:
        >>> from typing import Annotated
        >>> from annotated_types import Ge
        >>> @settings
        ... class Schedule:
        ...     tasks: Annotated[int, Ge(1)] = 16
        >>> Schedule(tasks=0)
        Traceback (most recent call last):
        gspo_env.errors.ConfigError: tasks is 0; expected a number greater than or equal to 1
    """
    if cls is None:
        return functools.partial(_make, frozen=frozen)
    return _make(cls, frozen=frozen)


def _make(cls: type[Any], *, frozen: bool) -> type[Any]:
    choice: Any = dataclass(cls, frozen=frozen, kw_only=True, config=STRICT)
    check = choice.__init__

    @functools.wraps(check)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        values = {n: v.item() if isinstance(v, np.generic) else v for n, v in values.items()}
        for name, value in values.items():
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise ConfigError(f"{name} is {value!r:.100}; expected at most {_LARGEST}")
        try:
            check(self, *args, **values)
        except ValidationError as error:
            raise describe(error) from None

    choice.__init__ = __init__
    return choice  # type: ignore[no-any-return]


def describe(error: ValidationError, name: str = "") -> ConfigError:
    """Returns what pydantic refuses as one sentence; without a name, it is that of the field."""
    fault = error.errors(include_url=False)[0]
    if isinstance(cause := fault.get("ctx", {}).get("error"), ConfigError):  # of `__post_init__`
        return cause
    name = name or str(fault["loc"][0])
    number = "a number " if fault["type"].startswith(("greater", "less")) else ""
    rule = re.sub("^Input should be ", f"expected {number}", fault["msg"])
    return ConfigError(f"{name} is {fault['input']!r:.100}; {rule[0].lower()}{rule[1:]}")
