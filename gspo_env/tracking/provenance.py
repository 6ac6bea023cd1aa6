"""Where a run comes from: its name in words, the commit of the user's files, versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("gspo-env", "torch", "transformers", "vllm", "mlflow", "numpy", "gymnasium", "peft")
_TIMEOUT = 5.0
"""Seconds that git has to answer."""
_ADJECTIVES = (
    "amber bold brave bright brisk calm clear clever cosy crisp curious dapper eager early fair "
    "fine fleet fond fresh gentle glad golden grand green happy hardy honest humble jolly keen "
    "kind lively lucky lunar mellow merry mild misty modest neat nimble noble olive patient plain "
    "polite proud quick quiet rapid ready round royal rustic silent silver smooth sunny swift "
    "tidy warm wise witty"
)
_NOUNS = (
    "acorn badger beacon birch bison brook canyon cedar cliff clover comet coral crane creek "
    "dolphin dune eagle falcon fern finch forest fox garden glacier harbor hawk heron hill island "
    "ivy lagoon lake lantern lark lemon lynx maple marble meadow moon moss oak orchard otter owl "
    "panda pebble pine planet plum pond puffin raven reef river robin sparrow spruce star stone "
    "summit swan tiger valley willow"
)


def two_words(key: str) -> str:
    """Returns an adjective and a noun for the key of a run, in hexadecimal digits.

    Example:
        >>> two_words("0" * 32)
        'amber-acorn'
    """
    number, adjectives, nouns = int(key, 16), _ADJECTIVES.split(), _NOUNS.split()
    noun = number // len(adjectives)
    return f"{adjectives[number % len(adjectives)]}-{nouns[noun % len(nouns)]}"


def versions() -> dict[str, str]:
    """Returns the versions of the packages that decide about a run's numbers, as tags."""
    found = {"version.python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[f"version.{name.replace('-', '_')}"] = version(name)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        found["version.cuda"] = str(torch.version.cuda)
    return found


def commit(folder: Path | None = None) -> dict[str, str]:
    """Returns the commit of the working tree around a folder, as tags; nothing if there is none.

    Args:
        folder: The working folder by default.
    """
    found = _git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").splitlines()
    if len(found) != 2:
        return {}
    tags = {"git.commit": found[0], "git.branch": found[1], "mlflow.source.git.commit": found[0]}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", failed="?")
    if changed != "?":
        tags["git.changed"] = str(bool(changed)).lower()
    return tags


def _git(folder: Path | None, *command: str, failed: str = "") -> str:
    """Returns what git prints; runs no program that the repository names."""
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        done = subprocess.run(
            ["git", *safe, *command],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return failed
    return done.stdout.strip()
