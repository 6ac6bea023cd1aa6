"""What a folder from elsewhere may set: its settings are data, and nothing that they name is run.

Taken are the names of built-in classes, numbers, and words of a fixed list. Every other setting may
name code, a command, a file, an address or an environment variable, so it needs a flag of the user.
A record outside of the folder, in the user's state directory, says with which of these settings the
user has trained there; while nothing has changed, they need no flag.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from gspo_env.config import Config, to_toml
from gspo_env.env.registration import find_builtin, read_members
from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, load_function, name_of
from gspo_env.settings import Prose

Place = tuple[str, ...]
"""The place of a setting in the tree."""


def needs_flags(config: Config) -> dict[str, Any]:
    """Returns the settings that may run code or reach files and addresses, by dotted name."""
    untrusted = untrusted_settings(tomllib.loads(to_toml(config)))
    return {".".join(place): value for place, value in untrusted}


def record(folder: Path, config: Config, model: str = "") -> None:
    """Records in the user's state directory that they train in this folder with these settings.

    Settings that need no flag are left out.

    Args:
        folder: Folder of the run.
        config: The settings.
        model: Name or folder of the model, if it is loaded by name.
    """
    untrusted = needs_flags(config)
    if untrusted or model:
        from gspo_env.user_state import record_training

        record_training(folder, untrusted, model)


def untrusted_settings(tree: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yields the settings that could do more than set a number, with their places in the tree."""
    defaults, hints = Config(), typing.get_type_hints(Config)
    members = _builtin_members(tree.get("env", defaults.env))
    if not all(members.values()):
        yield ("env",), tree["env"]
    for name, value in tree.items():
        default = getattr(defaults, name, None)
        if name in ("env", "env_kwargs", "model", "output"):
            continue
        if name in BUILTIN:
            table = value if isinstance(value, Mapping) else {"name": value}
            choice = table.get("name") or name_of(name, default)
            if not isinstance(choice, str) or choice not in BUILTIN[name]:
                yield (name, "name"), choice
            else:
                settings = {key: item for key, item in table.items() if key != "name"}
                yield from _untrusted_arguments((name,), settings, BUILTIN[name][choice])
        elif is_dataclass(default) and isinstance(value, Mapping):
            yield from _untrusted_arguments((name,), value, type(default))
        elif not _is_plain(value, hints.get(name), default):
            yield (name,), value
    kwargs = tree.get("env_kwargs", {})
    if len(members) == 1 or not isinstance(kwargs, Mapping):
        yield from _untrusted_arguments(("env_kwargs",), kwargs, *members.values())
        return
    for name, arguments in kwargs.items():
        yield from _untrusted_arguments(("env_kwargs", name), arguments, members.get(name))


def _builtin_members(env: Any) -> dict[str, str | None]:
    """Returns the import string of each environment by its name, None of one that is not ours."""
    try:
        return {member.name: find_builtin(member.spec) for member in read_members(env)}
    except (ConfigError, TypeError):
        return {"": None}


def _untrusted_arguments(
    place: Place, arguments: Any, cls: type[Any] | str | None
) -> Iterator[tuple[Place, Any]]:
    """Yields the arguments of a class that are not plain; those of an unknown one are numbers.

    Args:
        place: The table of the arguments.
        arguments: The arguments.
        cls: One of our classes or its import string, if it is one of ours.
    """
    if not isinstance(arguments, Mapping):
        yield place, arguments
        return
    defaults, hints = {}, {}
    with contextlib.suppress(ConfigError):  # an extra is missing
        loaded: Any = load_function(cls, "class") if isinstance(cls, str) else cls
        if loaded is not None:
            parameters = inspect.signature(loaded).parameters.items()
            defaults = {name: parameter.default for name, parameter in parameters}
            constructor = loaded if is_dataclass(loaded) else loaded.__init__
            hints = typing.get_type_hints(constructor, include_extras=True)
    for name, value in arguments.items():
        if not _is_plain(value, hints.get(name), defaults.get(name, MISSING)):
            yield (*place, name), value


def _is_plain(value: Any, hint: Any, default: Any) -> bool:
    """Returns whether a value is numbers, a default, a listed word or what only a model reads."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int) or value == {}:
        return True
    if isinstance(value, list) and not any(isinstance(item, str) for item in value):
        return all(_is_plain(item, None, MISSING) for item in value)
    if type(value) is type(default) and value == default:
        return True
    return isinstance(value, str) and (hint == Prose or value in _words(hint))


def _words(hint: Any) -> tuple[Any, ...]:
    """Returns the words that a `Literal` annotation lists, also within a union."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(word for part in typing.get_args(hint) for word in _words(part))
