"""Prints the options of a command, or the settings of one section."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import sys
from collections.abc import Collection
from typing import Any, NoReturn

import tyro

from gspo_env.cli.options import pair
from gspo_env.config import Config
from gspo_env.errors import ConfigError
from gspo_env.registry import BUILTIN, name_of, names

USUAL = (
    *("env", "env_kwargs", "model", "recipe", "config", "output", "seed"),
    *("steps", "tasks_per_step", "eval_every", "eval_tasks"),
    *("rollout.group_size", "rollout.max_turns", "rollout.max_turn_tokens", "rollout.max_context"),
    *("advantage", "loss", "learner.learning_rate", "learner.lora_rank", "engine", "tracker"),
)
"""The settings that `--help` lists; `--help all` lists the others too."""
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


def print_help(name: str, command: type[Any], default: Any, *, whole: bool) -> NoReturn:
    """Prints the options of a command and exits.

    Args:
        name: Its name.
        command: It.
        default: It with the defaults to show.
        whole: Print all settings of a run, and not only the usual ones.
    """
    fields = {field.name for field in dataclasses.fields(command)}
    short = not whole and "settings" in fields
    page = io.StringIO() if short else sys.stdout
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        prog = f"gspo-env {name}"
        tyro.cli(command, args=["--help"], default=default, prog=prog, registry=_PRIMITIVES)
    if isinstance(page, io.StringIO) and short:
        flags = {f"--{path.replace('_', '-')}" for path in (*USUAL, *fields)}
        print(_usual(page.getvalue(), flags))
        print(
            "A section may be left out where no other has the name: --group-size 8.\n"
            f"All settings: gspo-env {name} --help all. Those of a section: gspo-env {name} --help "
            f"SECTION, with one of\n{', '.join(_sections(default.resolved))}."
        )
    raise SystemExit(0)


def _usual(page: str, flags: Collection[str]) -> str:
    """Returns the beginning of a page without frames, and its entries of some flags."""
    beginning, _, options = page.partition(" options ")
    entries = re.findall(r"^  --[a-z].*\n(?:  .*\S.*\n)*?(?=  --| *\n)", options, re.MULTILINE)
    shown = [entry for entry in entries if entry.split()[0] in flags]
    return beginning + "".join(f"{line.rstrip()}\n" for e in shown for line in e.splitlines())


def _sections(config: Config) -> list[str]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return [name for name, value in values.items() if dataclasses.is_dataclass(value)]


def print_options(command: str, config: Config, group: str) -> NoReturn:
    """Prints the options of one section and exits.

    Args:
        command: The name of the command.
        config: The settings, whose values are shown as the defaults.
        group: The section.

    Raises:
        ConfigError: There is no such section.
    """
    if group not in (sections := _sections(config)):
        listed = ", ".join(["all", *sections])
        raise ConfigError(f"there is no section {group!r}; expected one of: {listed}")
    section: Any = getattr(config, group)
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
