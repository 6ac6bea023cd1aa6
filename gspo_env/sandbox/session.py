"""A sandbox that lives for several commands; the jail and containers open one each."""

from __future__ import annotations

import base64
import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from gspo_env.errors import EnvironmentCrashError
from gspo_env.sandbox import SandboxResult


class SandboxSession(ABC):
    """A running sandbox, until `stop`; its files and background processes stay between commands.

    `Sandbox.open` and `Containers.open` start one. Where it has ended without `stop`, the methods
    raise `EnvironmentCrashError`, so that the episode is lost and never scored.
    """

    @abstractmethod
    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float = 60.0,
        variables: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """Runs a command in a new process, in the first of the writable folders.

        Raises:
            EnvironmentCrashError: The sandbox has ended.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends all processes and removes the files; may be called again, from any thread."""

    def kill(self) -> None:
        """Kills the processes that commands have left.

        Raises:
            EnvironmentCrashError: The sandbox has ended.
        """
        self.exec(["sh", "-c", "kill -9 -1"])

    def put(self, folder: str, archive: bytes) -> None:
        """Unpacks a tar archive into a folder, which is made.

        Raises:
            EnvironmentCrashError: The sandbox has ended, or does not take it.
        """
        script = 'mkdir -p "$1" && tar -xmf - --no-same-owner -C "$1"'
        result = self.exec(["sh", "-c", script, "sh", folder], stdin=archive)
        if not result.ok:
            reason = " ".join(result.stderr.split())[-200:] or result.stopped
            raise EnvironmentCrashError(f"sandbox: files cannot be put into {folder}: {reason}")

    def get(self, path: str) -> bytes | None:
        """Returns the content of a file, at most the bound of an output; None without one."""
        result = self.exec(["base64", path])
        return base64.b64decode(result.stdout) if result.ok else None


def pack(folder: Path) -> bytes:
    """Returns the files of a folder as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name)
    return buffer.getvalue()
