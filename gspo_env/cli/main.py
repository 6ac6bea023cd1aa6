"""The command line; `COMMANDS` lists the commands."""

from __future__ import annotations

import atexit
import difflib
import errno
import io
import itertools
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import gspo_env
from gspo_env.errors import ConfigError, GspoEnvError
from gspo_env.redaction import log_to_terminal, redact_text, visible

COMMANDS = {
    "train": "gspo_env.cli.train:Train",
    "evaluate": "gspo_env.cli.evaluate:Evaluate",
    "compare": "gspo_env.cli.compare:Compare",
    "view": "gspo_env.cli.view:View",
    "diagnose": "gspo_env.cli.diagnose:Diagnose",
    "replay": "gspo_env.cli.replay:Replay",
    "whatif": "gspo_env.cli.whatif:WhatIf",
    "rewind": "gspo_env.cli.rewind:Rewind",
    "episodes": "gspo_env.cli.episodes:Episodes",
    "serve": "gspo_env.cli.serve:Serve",
    "capture": "gspo_env.cli.capture:Capture",
    "rescore": "gspo_env.cli.rescore:Rescore",
    "sync": "gspo_env.cli.sync:Sync",
    "export": "gspo_env.cli.export:Export",
    "verify": "gspo_env.cli.verify:Verify",
    "envs": "gspo_env.cli.envs:Envs",
    "audit": "gspo_env.cli.audit:Audit",
    "play": "gspo_env.cli.play:Play",
    "doctor": "gspo_env.cli.doctor:Doctor",
}


_WITHOUT_FILE = {
    errno.EPIPE: "",  # the reader of the output has closed it
    errno.ENOSPC: "the output cannot be written, since no space is left",
    errno.EDQUOT: "the output cannot be written, since the quota is used up",
    errno.EFBIG: "the output cannot be written, since the file would be too large",
    errno.ENOENT: "the working folder does not exist any more",
}
"""What is said of an error of the system that names no file."""
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
    for name in ("stdin", "stdout", "stderr"):  # in order: each gets the number that is free
        if getattr(sys, name) is None:  # closed, as by some daemons; a file would get its number
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    codes: list[int] = []
    if argv is None:  # the last handler to run; freeing the modules after it takes seconds
        atexit.register(lambda: codes and (sys.stdout.flush(), os._exit(codes[-1])))
    log_to_terminal()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or a file that is not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            parse(arguments).run()
            codes.append(0)
        finally:
            sys.stdout.flush()
    except GspoEnvError as error:
        print(f"gspo-env: {visible(redact_text(str(error)))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        codes.append(130)
        sys.exit(130)
    except OSError as error:
        if error.filename is not None or error.errno not in _WITHOUT_FILE:
            raise
        if error.errno != errno.ENOENT:  # the output would be written again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if message := _WITHOUT_FILE[error.errno]:
            print(f"gspo-env: {message}", file=sys.stderr)
            sys.exit(2)


def parse(arguments: Sequence[str]) -> Any:
    """Parses a command and its options.

    Raises:
        ConfigError: A file, a choice or a flag is unknown or invalid.
        SystemExit: Help was printed.
    """
    from gspo_env.cli.options import Run, prepare, read_options

    name, *rest = arguments
    if name in ("-h", "--help"):
        print("usage: gspo-env COMMAND [options]; gspo-env COMMAND --help lists the options\n")
        for each in COMMANDS:
            print(f"  {each:9} {str(_load(each).__doc__).partition(chr(10))[0]}")
        raise SystemExit(0)
    if name not in COMMANDS:
        from gspo_env.renamed import instead_of

        if instead := instead_of(f"command.{name}"):
            raise ConfigError(f"there is no command {name!r}: {instead}")
        near = "".join(difflib.get_close_matches(name, COMMANDS, n=1))
        hint = f"did you mean {near}? There are" if near else "expected one of"
        raise ConfigError(f"there is no command {name!r}; {hint}: {', '.join(COMMANDS)}")
    for flag in _NOT_EMPTY:
        if f"{flag}=" in rest or (flag, "") in itertools.pairwise(rest):
            raise ConfigError(f"{flag} is ''; expected a name, or no {flag} for the default")
    command = _load(name)
    default = command()
    if issubclass(command, Run):
        default, rest = prepare(command, rest)
    if {"-h", "--help"} & set(rest):
        from gspo_env.cli.help import print_help

        print_help(name, command, default, whole="all" in rest)
    return read_options(name, default, rest)


def _load(command: str) -> type[Any]:
    loaded: type[Any] = pkgutil.resolve_name(COMMANDS[command])
    return loaded
