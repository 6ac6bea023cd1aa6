"""What the tests of processes and of the sandbox share."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
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
    for _ in range(1500):
        if condition():
            return True
        time.sleep(0.02)
    return False


def is_alive(pid: int | str) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments; returns how it ended and what it printed."""
    options = {"capture_output": True, "text": True, "timeout": 240, **options}
    return subprocess.run([sys.executable, *arguments], **options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def serving(name: str, *arguments: str, port: int = 0) -> Iterator[tuple[int, Any]]:
    """Runs a server of this folder; yields its port, a free one by default, and the process."""
    port = port or free_port()
    command = [sys.executable, str(Path(__file__).with_name(name)), *arguments, str(port)]
    with subprocess.Popen(command) as process:
        try:
            while True:
                assert process.poll() is None
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield port, process
        finally:
            process.kill()
