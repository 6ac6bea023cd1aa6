"""What a folder from elsewhere may set: its settings are data, and nothing that they name is run.

Taken are the names of built-in classes, numbers, and words of a fixed list. Every other setting may
name code, a command, a file, an address or an environment variable, so it needs a flag of the user.
A record outside of the folder, in the user's state directory, says with which of these settings the
user has trained there; while nothing has changed, they need no flag.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import math
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from gspo_env.config import Config, to_toml
from gspo_env.env.registration import find_builtin, read_members
from gspo_env.errors import ConfigError
from gspo_env.files import write_file
from gspo_env.registry import BUILTIN, load_function, name_of
from gspo_env.settings import Prose

logger = logging.getLogger(__name__)


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
    if not untrusted and not model:
        return
    try:
        path = state_file("trained", str(folder.resolve()))
        text = json.dumps(describe(untrusted) | {"model": model})
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path.parent, path.name, lambda part: part.write_text(text))
    except (OSError, RuntimeError) as error:  # there is no home
        logger.warning(
            "cannot note what %s was trained with (%s): its use needs flags such as --env",
            *(folder, error),
        )


def changed_files(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Returns the files that settings name and that differ from those of the last training."""
    trained = (read_record(folder) or {}).get("files") or {}
    files = file_digests(settings).items()
    return [name for name, digest in files if trained and digest not in trained.values()]


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


def describe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record: a digest of the settings, those of the files that they name, the place."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return {
        "settings": hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest(),
        "files": file_digests(settings),
        "working folder": os.getcwd(),
    }


def state_file(kind: str, key: str) -> Path:
    """Returns the file of a record in the user's state directory, which a key names."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = home if home.is_absolute() else Path.home() / ".local" / "state"
    return state / "gspo-env" / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def read_record(folder: Path) -> dict[str, Any] | None:
    """Returns the record of a folder, None if there is none."""
    try:
        entry = json.loads(state_file("trained", str(folder.resolve())).read_text())
    except (OSError, ValueError, RuntimeError):  # there is no home
        return None
    return entry if isinstance(entry, dict) else None


def file_digests(settings: Any) -> dict[str, str]:
    """Returns the digest of each file that settings name."""
    digests = {}
    for name in (name for text in texts_of(settings) for name in file_names(text)):
        with contextlib.suppress(OSError, ValueError):  # it can be no file's name
            path = Path(os.path.expanduser(name))
            if path.is_file():
                with path.open("rb") as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def file_names(text: str) -> Iterator[str]:
    """Yields what a text may name: `FILE`, `FILE:NAME` or `LABEL=FILE:NAME:WEIGHT`."""
    for part in (text, text.partition("=")[2]):
        pieces = part.split(":", 8)
        yield from (":".join(pieces[:end]) for end in range(1, len(pieces) + 1) if pieces[0])


def texts_of(value: Any) -> Iterator[str]:
    """Yields the texts in a tree of settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from texts_of(item)
