"""The command line; `COMMANDS` lists the commands."""

from __future__ import annotations

import difflib
import importlib
import io
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro

import gspo_env
from gspo_env.errors import ConfigError, GspoEnvError
from gspo_env.redaction import log_to_terminal, redact_text, visible

COMMANDS = {
    "train": "gspo_env.cli.train:Train",
    "evaluate": "gspo_env.cli.evaluate:Evaluate",
    "compare": "gspo_env.cli.compare:Compare",
    "view": "gspo_env.cli.view:View",
    "diagnose": "gspo_env.cli.diagnose:Diagnose",
    "report": "gspo_env.cli.report:Report",
    "serve": "gspo_env.cli.serve:Serve",
    "capture": "gspo_env.cli.capture:Capture",
    "sync": "gspo_env.cli.sync:Sync",
    "envs": "gspo_env.cli.envs:Envs",
    "play": "gspo_env.cli.play:Play",
    "doctor": "gspo_env.cli.doctor:Doctor",
}


_NOT_EMPTY = ("--env", "--model", "--resume", "--config")
"""Flags for which an empty value, such as that of an unset variable, is a mistake."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; invalid input prints one sentence and exits with code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if arguments[0] == "help":
        arguments = [*arguments[1:2], "--help"]
    if arguments[0] == "--version":
        print(f"gspo-env {gspo_env.__version__}")
        return
    log_to_terminal()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or a file that is not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            parse(arguments).run()
        finally:
            sys.stdout.flush()
    except GspoEnvError as error:
        print(f"gspo-env: {visible(redact_text(str(error)))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(arguments: Sequence[str]) -> Any:
    """Parses a command and its options.

    Raises:
        ConfigError: A file, a choice or a flag is unknown or invalid.
        SystemExit: Help was printed, or a value has the wrong type.
    """
    from gspo_env.cli.options import PRIMITIVES, Run, one_sentence, prepare
    from gspo_env.config import removed

    commands: dict[str, Any] = {}
    name, *rest = arguments
    if name not in (*COMMANDS, "-h", "--help"):
        near = "".join(difflib.get_close_matches(name, COMMANDS, n=1))
        hint = f"did you mean {near}? There are" if near else "expected one of"
        raise ConfigError(f"there is no command {name!r}; {hint}: {', '.join(COMMANDS)}")
    for flag in (text.partition("=")[0] for text in rest if text.startswith("--")):
        if instead := removed(f"{name}.{flag[2:]}"):
            raise ConfigError(f"there is no {flag} any more: {instead}")
    for flag in _NOT_EMPTY:
        if f"{flag}=" in rest or (flag, "") in itertools.pairwise(rest):
            raise ConfigError(f"{flag} is ''; expected a name, or no {flag} for the default")
    for known, place in COMMANDS.items():
        module, _, attribute = place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        commands[known] = command()
        if known == name and issubclass(command, Run):
            commands[known], rest = prepare(command, rest)
    summaries = {
        known: str(type(command).__doc__).partition("\n")[0] for known, command in commands.items()
    }
    kind = tyro.extras.subcommand_type_from_defaults(commands, summaries)
    config = (tyro.conf.OmitSubcommandPrefixes,)
    with one_sentence():
        return tyro.cli(
            kind, args=[name, *rest], prog="gspo-env", registry=PRIMITIVES, config=config
        )
