"""Several environments in one run: their names, their arguments and their weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_env.env.registration import class_of, resolve_env
from gspo_env.errors import ConfigError

_ENTRY = re.compile(
    r"(?:(?P<name>[\w.-]+)=)?(?P<spec>.+?)(?::(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?",
    re.DOTALL,
)
_NAME = re.compile(r"[\w.-]+")
_TAKEN = ("forks", "option", "reward", "stop")
"""What follows `rollout/` or `eval/` in the names of other metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One of the environments that a run trains on."""

    spec: str
    """What `gspo_env.env.resolve_env` reads."""
    name: str = ""
    """Its name in tasks, metrics and arguments; empty if it is the only one."""
    weight: float = 1.0
    """Its share of the training tasks, relative to the weights of the others."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments."""

    @property
    def env_id(self) -> str:
        """The `env_id` of its tasks: the registered id of an only environment, else the name.

        Raises:
            UnknownEnvironmentError: Nothing has the name of the specification.
        """
        resolved = resolve_env(self.spec)
        return self.name or resolved


def specify(env: Any) -> str | tuple[str, ...]:
    """Returns the setting `env` for specifications or classes, which get ids; see `resolve_env`.

    Raises:
        ConfigError: One of them is neither text nor the class of an environment.
    """
    if isinstance(env, (list, tuple)):
        return tuple(one if isinstance(one, str) else resolve_env(one) for one in env)
    return env if isinstance(env, str) else resolve_env(env)


def read_members(
    env: str | Sequence[str], kwargs: Mapping[str, Any] | None = None
) -> tuple[Member, ...]:
    """Returns the environments that the settings `env` and `env_kwargs` of a run name.

    Args:
        env: A specification, or several entries `[NAME=]SPEC[:WEIGHT]`. The name of an entry
            without one is the last part of its specification; its weight is 1.
        kwargs: The arguments; those of each environment by its name if there are several.

    Raises:
        ConfigError: A weight is not above 0, a name is not unique, or arguments have another name.

    Example:
        >>> [(m.name, m.weight) for m in read_members(["gspo/Lookup-v0:0.7", "w=words.py:Words"])]
        [('Lookup-v0', 0.7), ('w', 1.0)]
    """
    kwargs = kwargs or {}
    entries = [env] if isinstance(env, str) else list(env)
    members = [_read(entry) for entry in entries]
    if len(members) == 1:
        return (Member(spec=members[0].spec, kwargs=kwargs),)
    if not members:
        raise ConfigError("env is empty; expected at least one environment")
    names = [member.name for member in members]
    _check_names(names, entries)
    for name, given in kwargs.items():
        if name not in names or not isinstance(given, Mapping):
            raise ConfigError(
                f"env_kwargs has {name!r}; expected a table for one of {', '.join(names)}, as in "
                f"--env-kwargs {names[0]}.KEY=VALUE"
            )
    return tuple(
        Member(spec=m.spec, name=m.name, weight=m.weight, kwargs=kwargs.get(m.name, {}))
        for m in members
    )


def _check_names(names: Sequence[str], entries: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"env has two environments {name!r}; expected different names, such as "
                f"a={entries[0]} b={entries[1]}"
            )
        if not _NAME.fullmatch(name) or name in _TAKEN:
            raise ConfigError(
                f"env has the name {name!r}; expected letters, digits and '_.-', and none of "
                f"{', '.join(_TAKEN)}: write NAME={name or 'SPEC'}"
            )


def written(env: str | Sequence[str]) -> str:
    """Returns environments as the flag `--env` has them."""
    return env if isinstance(env, str) else " ".join(env)


def label(env: str | Sequence[str]) -> str:
    """Returns a short name of the environments of a run, such as `Lookup-v0+Wordle-v0`."""
    names = [last_part(m.spec) if not m.name else m.name for m in read_members(env)]
    return "+".join(names) if len(names) <= 3 else f"{names[0]}+{len(names) - 1}"


def add_kwargs(
    old: Mapping[str, Any], given: Mapping[str, Any], env: str | Sequence[str]
) -> dict[str, Any]:
    """Returns arguments with others added, which replace those of the same name.

    Args:
        old: The arguments.
        given: The others; with several environments, `NAME.KEY` is the argument of one of them.
        env: The environments.
    """
    if len(read_members(env)) == 1:
        return {**old, **given}
    merged = {name: dict(own) if isinstance(own, Mapping) else own for name, own in old.items()}
    for key, value in given.items():
        name, dot, argument = key.rpartition(".")  # the name of an argument has no dot
        found = {argument: value} if dot else value
        before = merged.get(name if dot else key, {})
        both = isinstance(before, Mapping) and isinstance(found, Mapping)
        merged[name if dot else key] = {**before, **found} if both else found
    return merged


def moved_only(old: str | Sequence[str], new: str | Sequence[str]) -> bool:
    """Returns whether environments differ at most in where their classes are defined."""

    def parts(env: str | Sequence[str]) -> Iterator[tuple[str, float, str]]:
        for member in read_members(env):
            file, _, name = member.spec.rpartition(":")
            name = name if file.endswith(".py") else class_of(member.spec)
            yield member.name, member.weight, f"class {name}" if name else member.spec

    return list(parts(old)) == list(parts(new))


def last_part(spec: str) -> str:
    """Returns the last part of a specification.

    Example:
        >>> last_part("gspo/Lookup-v0"), last_part("folder/shop.py:Shop")
        ('Lookup-v0', 'Shop')
    """
    return spec.rpartition(":")[2].rpartition("/")[2]


def _read(entry: str) -> Member:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ConfigError(f"env is {entry!r}; expected an id, 'module:id' or 'file.py:Class'")
    weight = float(found["weight"] or 1.0)
    if not 0 < weight < math.inf:
        raise ConfigError(f"env is {entry!r}; expected a weight above 0")
    return Member(spec=found["spec"], name=found["name"] or last_part(found["spec"]), weight=weight)
