"""Prints the options of a command, or the settings of one section."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NoReturn

import tyro

from gspo_env.cli.options import pair
from gspo_env.config import Config
from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, name_of, names

_PRIMITIVES = tyro.constructors.ConstructorRegistry()
"""Teaches tyro to read dictionaries as KEY=VALUE."""


@_PRIMITIVES.primitive_rule
def _pairs(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    if info.type != dict[str, Any]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE ...]",
        instance_from_str=lambda texts: dict(map(pair, texts)),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{k}={json.dumps(v)}" for k, v in value.items()],
    )


def print_help(name: str, command: type[Any], default: Any) -> NoReturn:
    """Prints the options of a command and exits.

    Args:
        name: Its name.
        command: It.
        default: It with the defaults to show.
    """
    prog = f"gspo-env {name}"
    tyro.cli(command, args=["--help"], default=default, prog=prog, registry=_PRIMITIVES)
    raise SystemExit(0)


def print_options(command: str, config: Config, group: str) -> NoReturn:
    """Prints the options of one section and exits.

    Args:
        command: The name of the command.
        config: The settings, whose values are shown as the defaults.
        group: The section.

    Raises:
        ConfigError: There is no such section.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sections = [name for name, value in values.items() if dataclasses.is_dataclass(value)]
    if group not in sections:
        raise ConfigError(f"there is no section {group!r}; expected one of: {', '.join(sections)}")
    section: Any = values[group]
    if not dataclasses.fields(section):
        title = f"{group} {name_of(group, section)!r}" if group in BUILTIN else group
        others = f"; --{group} takes: {', '.join(names(group))}" if group in BUILTIN else ""
        print(f"{title} has no settings{others}")
        raise SystemExit(0)
    page: Any = dataclasses.make_dataclass(
        "Page", [(group, type(section), dataclasses.field(default=section))]
    )
    markers = (tyro.conf.FlagConversionOff,)
    tyro.cli(
        page, args=["--help"], prog=f"gspo-env {command}", registry=_PRIMITIVES, config=markers
    )
    raise SystemExit(0)
