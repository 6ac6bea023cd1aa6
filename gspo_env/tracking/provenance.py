"""Where a run comes from: the commit of the user's files, and versions of packages."""

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


def versions() -> dict[str, str]:
    """Returns the versions of the packages that influence a run's numbers, as tags."""
    tags = {"version.python": platform.python_version()}
    for name in _PACKAGES:
        try:
            tags[f"version.{name.replace('-', '_')}"] = version(name)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        tags["version.cuda"] = str(torch.version.cuda)
    return tags


def commit(folder: Path | None = None) -> dict[str, str]:
    """Returns the commit of the working tree around a folder, as tags; nothing if there is none.

    Args:
        folder: The working folder by default.
    """
    lines = _git(folder, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").splitlines()
    if len(lines) != 2:
        return {}
    sha, branch = lines
    tags = {"git.commit": sha, "git.branch": branch, "mlflow.source.git.commit": sha}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", failed="?")
    if changed != "?":
        tags["git.changed"] = str(bool(changed)).lower()
    return tags


def _git(folder: Path | None, *command: str, failed: str = "") -> str:
    """Returns what git prints, without running programs that the repository configures."""
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        process = subprocess.run(
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
    return process.stdout.strip()
