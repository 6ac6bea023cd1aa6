"""What the tests of the sandbox share."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest


def require_isolation(missing: str | None) -> None:
    """Fails or skips on a machine that cannot isolate code or commands."""
    if missing is not None and os.environ.get("GSPO_ENV_NO_SANDBOX") == "1":
        pytest.skip(f"the sandbox is NOT tested, GSPO_ENV_NO_SANDBOX is set: {missing}")
    assert missing is None, f"no isolation here (GSPO_ENV_NO_SANDBOX=1 skips this): {missing}"


def program(code: str, **names: Any) -> str:
    """Insert values at the start of a program."""
    return "".join(f"{k} = {v!r}\n" for k, v in names.items()) + textwrap.dedent(code)


def imprisoned(parent: int = 0) -> list[str]:
    """Sandbox processes in a child PID namespace that a given process started; ours by default."""
    owner = str(parent or os.getpid()).encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            nested = [
                line.split()[2:]
                for line in (folder / "status").read_text().splitlines()
                if line.startswith("NSpid:")
            ]
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if nested[0] and "jail.main()" in str(words) and owner in words:
                found.append(folder.name)
    return found


def eventually(condition: Any) -> bool:
    """Whether a condition becomes true within 30 seconds."""
    for _ in range(300):
        if condition():
            return True
        time.sleep(0.1)
    return False
