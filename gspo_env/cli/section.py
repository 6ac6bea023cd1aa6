"""`--help SECTION`: the options of one section of the settings."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import tyro

from gspo_env.cli.options import PRIMITIVES
from gspo_env.config import Config
from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, name_of, names


def print_options(config: Config, group: str) -> NoReturn:
    """Prints the options of one section and exits.

    Args:
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
    tyro.cli(page, args=["--help"], prog="gspo-env", registry=PRIMITIVES, config=markers)
    raise SystemExit(0)
