"""Reads the settings of a trained folder as data: a folder from somebody else runs nothing.

Of such a folder only names of our own classes, numbers and words of a fixed list are taken. All
other settings may name code, a command, a file, an address or an environment variable, so each
needs a flag of the user. A record outside of the folder, in the user's state directory, says which
settings the user has trained with in that folder; these need no flag.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import shlex
import stat
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gspo_env.config import Config, from_dict, to_toml
from gspo_env.env.registration import find_builtin
from gspo_env.errors import ConfigError
from gspo_env.redaction import redact, visible
from gspo_env.registry import BUILTIN, find
from gspo_env.rollout.mix import add_kwargs, read_members
from gspo_env.tracking.base import flatten
from gspo_env.trained import TrustProblem, doubt, note_path, write_note

logger = logging.getLogger(__name__)

_FILES = ("gspo_env.json", "model/gspo_env.json", "config.toml")
_LARGEST = 2**20
"""Bytes of a file with settings."""
_LONGEST = 160
"""Characters of a value that an error shows."""
_OWN = ("model", "output", "tracker")
"""Settings that say where a run reads and writes; those of somebody else are not taken."""
_LEARNING = ("advantage", "loss", "recipe")
"""Choices that playing does not need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The settings of a folder, before any of them is used."""

    folder: Path
    tree: dict[str, Any]
    """Settings that run nothing, nested as in a TOML file, without `model` and `output`."""
    refused: dict[str, Any]
    """By dotted name, the settings that need a flag of the user."""
    why: TrustProblem | None = None
    """Why they need one."""

    @property
    def env(self) -> str | tuple[str, ...]:
        """The environment, or the several, that was trained on."""
        named = self.refused.get("env", self.tree.get("env", Config().env))
        return tuple(map(str, named)) if isinstance(named, list | tuple) else str(named)

    def settings(
        self,
        given: Mapping[str, Any] = MappingProxyType({}),
        *,
        env: str | tuple[str, ...] = "",
        playing: bool = False,
    ) -> dict[str, Any]:
        """Returns the settings, with those that the user gives, for `gspo_env.config.from_dict`.

        Args:
            given: Settings of the user by dotted name, or nested; they replace refused ones.
                Arguments of the environment are added to the saved ones, if these are kept.
            env: The environment, or several, if the user names one. Saved arguments and the saved
                score are kept if it is the saved one, or a class of the same name at another place.
            playing: Whether nothing is trained, so that refused estimators, losses and recipes are
                left out instead.

        Raises:
            ConfigError: A refused setting is not given; the message names the flags to add.
        """
        env = env if isinstance(env, str) else tuple(env)
        tree, refused = self._with_env(env) if env else (dict(self.tree), dict(self.refused))
        names = [name for name, value in flatten(given).items() if value != {}]
        refused = {k: v for k, v in refused.items() if not _covered(k, names)}
        if playing:
            for kind in _LEARNING:
                if left_out := [name for name in refused if _covered(name, (kind,))]:
                    what = refused[left_out[0]]
                    logger.warning("%s of %s is not loaded: %s", kind, self.folder, what)
                    tree.pop(kind, None)
                    refused = {k: v for k, v in refused.items() if k not in left_out}
        if refused:
            named = ", ".join(f"{k} = {_short(v)}" for k, v in refused.items())
            why = self.why or TrustProblem(reason="no record says that you trained there with it")
            flags = " ".join(_flag(k, _found(k, v, why.place)) for k, v in refused.items())
            raise ConfigError(
                f"the settings in {str(self.folder)!r} name {named}, which may run code or reach "
                f"files and addresses, and {why.reason}; if you trust it, add {flags}"
            )
        if kwargs := given.get("env_kwargs"):
            env = tree.get("env") or env or self.env
            tree["env_kwargs"] = add_kwargs(tree.get("env_kwargs", {}), kwargs, env)
        return tree

    def _with_env(self, env: str | tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the settings and the refused ones for an environment that the user names."""
        tree = dict(self.tree)
        refused = {k: v for k, v in self.refused.items() if k != "env"}
        if env != self.env:
            if not _alike(self.env, env):
                tree.pop("env_kwargs", None)
                refused = {k: v for k, v in refused.items() if not _covered(k, ("env_kwargs",))}
            if isinstance(credit := tree.get("credit"), Mapping):
                tree["credit"] = {k: v for k, v in credit.items() if k != "score"}
        return tree | {"env": env}, refused


def find_saved(folder: str | Path) -> Path | None:
    """Returns the file with the settings of a trained folder, or None if it has none."""
    paths = (Path(folder, name) for name in _FILES)
    return next((path for path in paths if path.exists() or path.is_symlink()), None)


def read_saved(folder: str | Path) -> Saved | None:
    """Reads the settings of a run's folder, or of a model in it, as untrusted data.

    Args:
        folder: What `GSPOAgent.save` or a training run wrote.

    Returns:
        The settings; None if the folder has none, such as one with a model alone.

    Raises:
        ConfigError: The settings are damaged, too large, or no settings.
    """
    path = find_saved(folder)
    if path is None:
        return None
    text = _read(path)
    try:
        text = json.loads(text)["config"] if path.suffix == ".json" else text
        saved = parse(path, text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{str(path)!r} is damaged ({visible(reason)}); expected what a training run wrote"
        ) from error
    if foreign := [name for name in saved.refused if _covered(name, _OWN)]:
        logger.warning("the tracker that %s names is not used", path)
    tree = {name: value for name, value in saved.tree.items() if name not in _OWN[:2]}
    refused = {name: value for name, value in saved.refused.items() if name not in foreign}
    if foreign:
        tree.pop("tracker", None)
    return Saved(folder=Path(folder), tree=tree, refused=refused, why=saved.why)


def parse(path: Path, text: str) -> Saved:
    """Parses settings as untrusted data.

    Args:
        path: The file that they are from; the record is that of its folder, or of one above it.
        text: The settings as TOML.

    Raises:
        ConfigError: A setting that needs no flag is not valid.
        ValueError: They are not TOML.
    """
    tree = tomllib.loads(text)
    refused = dict(_refused(tree))
    why = doubt(path.parent, refused) if refused else None
    if why is None:
        refused = {}
    for name in refused:
        _drop(tree, name)
    try:
        from_dict(tree)
    except ConfigError as error:
        raise ConfigError(f"the settings in {str(path)!r} are not valid: {error}") from error
    return Saved(folder=path.parent, tree=tree, refused=refused, why=why)


def needs_flags(config: Config) -> dict[str, Any]:
    """Returns the settings that may run code or reach files and addresses, by dotted name."""
    return dict(_refused(tomllib.loads(to_toml(config))))


def record(folder: Path, config: Config) -> None:
    """Notes in the user's state directory that the user trains in this folder with these settings.

    Settings that need no flag are not noted.
    """
    refused = needs_flags(config)
    if not refused:
        return
    try:
        write_note(folder, refused)
    except OSError as error:
        logger.warning(
            "cannot note in %s what %s was trained with (%s): its use needs flags such as --env",
            *(note_path(folder).parent, folder, error.strerror),
        )


def _read(path: Path) -> str:
    """Reads a small regular file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a device or a pipe may never end
            raise ConfigError(f"{str(path)!r} is no regular file; expected the settings of a run")
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise ConfigError(f"{str(path)!r} has more than {_LARGEST:,} bytes; expected settings")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is damaged: it is not UTF-8") from error


def _refused(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the settings that could do more than set a number, by dotted name."""
    defaults = Config()
    hints = typing.get_type_hints(Config)
    env = tree.get("env", defaults.env)
    members = _members(env)
    if not members or not all(members.values()):
        yield "env", env
    for name, value in tree.items():
        if name in ("env", "env_kwargs", "model", "output"):
            continue
        default = getattr(defaults, name, None)
        if name in BUILTIN:
            yield from _refused_choice(name, value)
        elif is_dataclass(default) and isinstance(value, Mapping):
            yield from _refused_fields(name, value, type(default))
        elif not _is_plain(value, hints.get(name), default):
            yield name, value
    kwargs = tree.get("env_kwargs", {})
    if len(members) == 1 or not isinstance(kwargs, Mapping):
        yield from _refused_kwargs("env_kwargs", kwargs, next(iter(members.values())))
        return
    for name, own in kwargs.items():
        yield from _refused_kwargs(f"env_kwargs.{name}", own, members.get(name))


def _alike(old: str | tuple[str, ...], new: str | tuple[str, ...]) -> bool:
    """Returns whether environments are the same but for the place of files or modules."""
    pairs = list(zip(read_members(old), read_members(new), strict=False))
    return len(pairs) == len(read_members(old)) == len(read_members(new)) and all(
        a.name == b.name
        and (a.spec == b.spec or ":" in b.spec)
        and a.spec.rpartition(":")[2] == b.spec.rpartition(":")[2]
        for a, b in pairs
    )


def _members(env: Any) -> dict[str, str | None]:
    """Returns the import string of each environment by its name, None of one that is not ours."""
    if not isinstance(env, str) and not (
        isinstance(env, list) and env and all(isinstance(entry, str) for entry in env)
    ):
        return {"": None}
    try:
        return {member.name: find_builtin(member.spec) for member in read_members(env)}
    except ConfigError:
        return {"": None}


def _refused_kwargs(
    section: str, kwargs: Any, environment: str | None
) -> Iterator[tuple[str, Any]]:
    if not isinstance(kwargs, Mapping):
        yield section, kwargs
        return
    parameters, hints = _signature(environment) if environment else ({}, {})
    for name, value in kwargs.items():
        if not _is_plain(value, hints.get(name), parameters.get(name, MISSING)):
            yield f"{section}.{name}", value


def _refused_choice(kind: str, value: Any) -> Iterator[tuple[str, Any]]:
    table = value if isinstance(value, Mapping) else {"name": value}
    name = table.get("name")
    default = "none" if kind == "recipe" else ""
    if not isinstance(name or default, str) or (name or default) not in BUILTIN[kind]:
        yield f"{kind}.name", name
        return
    settings = {key: item for key, item in table.items() if key != "name"}
    yield from _refused_fields(kind, settings, find(kind, name or default))


def _refused_fields(
    section: str, table: Mapping[str, Any], cls: type[Any]
) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    defaults = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(cls)
    }
    for name, value in table.items():
        default = defaults.get(name, MISSING)
        if not _is_plain(value, hints.get(name), default):
            yield f"{section}.{name}", value


def _signature(environment: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the defaults and the annotations of the arguments of one of our environments."""
    module, _, name = environment.partition(":")
    try:
        made = getattr(importlib.import_module(module), name).__init__
        defaults = {n: p.default for n, p in inspect.signature(made).parameters.items()}
        return defaults, typing.get_type_hints(made)
    except (ImportError, NameError, TypeError):  # an extra is missing: only numbers are taken
        return {}, {}


def _is_plain(value: Any, hint: Any, default: Any) -> bool:
    """Returns whether a value is a number, a list of numbers, a default or a listed word."""
    if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return True
    if isinstance(value, list) and not any(isinstance(item, str) for item in value):
        return all(_is_plain(item, None, MISSING) for item in value)
    if type(value) is type(default) and value == default:
        return True
    return isinstance(value, str) and value in _words(hint)


def _words(hint: Any) -> tuple[Any, ...]:
    """Returns the words that a `Literal` annotation lists, also within a union."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(word for part in typing.get_args(hint) for word in _words(part))


def _covered(name: str, given: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in given)


def _drop(tree: dict[str, Any], name: str) -> None:
    section, _, rest = name.partition(".")
    if not rest or rest == "name":
        tree.pop(section, None)
        return
    table = tree[section] = dict(tree[section])
    outer, _, last = rest.rpartition(".")
    if rest not in table and isinstance(table.get(outer), Mapping):  # of one among several
        table[outer] = {k: v for k, v in table[outer].items() if k != last}
    table.pop(rest, None)


def _short(value: Any) -> str:
    text = visible(json.dumps(redact(value), ensure_ascii=False, default=str))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _found(name: str, value: Any, place: str) -> Any:
    """Returns the environment with the full path of its file, if that is in another folder."""
    if name == "env" and isinstance(value, list | tuple):
        return [_found(name, entry, place) for entry in value]
    if name != "env" or not place or not isinstance(value, str):
        return value
    named, equals, spec = value.rpartition("=")
    file, _, rest = spec.partition(".py:")
    path = Path(place, f"{file}.py")
    return f"{named}{equals}{path}:{rest}" if rest and path.is_file() else value


def _flag(name: str, value: Any) -> str:
    section, _, rest = name.partition(".")
    if name == "env" and isinstance(value, list | tuple):
        return f"--env {' '.join(shlex.quote(_shown(entry)) for entry in value)}"
    if section == "env_kwargs" and rest:
        return f"--env-kwargs {shlex.quote(f'{rest}={_shown(value)}')}"
    flag = section if rest == "name" else name
    return f"--{flag.replace('_', '-')} {shlex.quote(_shown(value))}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else _short(value)
    text = visible(str(redact(text))).replace("\n", "\\n")  # the sentence is one line
    return text if len(text) <= _LONGEST else "…"
