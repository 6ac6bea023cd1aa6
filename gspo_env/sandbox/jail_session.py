"""The jail as a sandbox for several commands, by a driver inside that runs them."""

from __future__ import annotations

import base64
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo_env.errors import EnvironmentCrashError
from gspo_env.sandbox import Sandbox, SandboxResult, Stop
from gspo_env.sandbox.session import SandboxSession

_DRIVER = Path(__file__).with_name("jail_driver.py")
_PRIVATE = "/sandbox"
_START_SECONDS, _GRACE_SECONDS = 30.0, 10.0


class JailSession(SandboxSession):
    """A jail with a driver inside, which has one connection to this process.

    Commands run as the same user as the driver, so one that kills all processes ends the jail.
    """

    def __init__(self, box: Sandbox, writable: Sequence[str] = ()) -> None:
        """See `Sandbox.open`."""
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        self._box = replace(box, readable=(*box.readable, python))
        self._folders = [f"{_PRIVATE}{folder}" for folder in writable]
        links = dict(zip(writable, self._folders, strict=True))
        # A name that the root has anyway stays a folder of its own.
        self._links = {path: target for path, target in links.items() if path != "/tmp"}
        self._command = [python, "-I", "-S", "-c", _DRIVER.read_text(), *self._folders]
        self._over, self._lock = threading.Event(), threading.Lock()
        started: queue.SimpleQueue[socket.socket | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._hold, args=(started,), name="jail", daemon=True).start()
        line = started.get()
        if isinstance(line, Exception):
            raise line
        self._line, self._file = line, line.makefile("rwb")

    def _hold(self, started: queue.SimpleQueue[Any]) -> None:
        """Starts the jail and stays until its end, because the jail ends with its thread."""
        try:
            with self._box.start(self._command, links=self._links) as command:
                assert command.listener is not None
                command.listener.settimeout(_START_SECONDS)
                started.put(command.listener.accept()[0])
                self._over.wait()
        except Exception as error:  # the thread that waits raises it
            started.put(error)

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        seconds: float = 60.0,
        variables: Mapping[str, str] | None = None,
    ) -> SandboxResult:
        """See `SandboxSession.exec`."""
        limit = self._box.output_kib << 10
        request = {
            "command": list(command),
            "stdin": base64.b64encode(stdin).decode(),
            "seconds": seconds,
            "limit": limit,
            "variables": dict(variables or {}),
        }
        began = time.monotonic()
        with self._lock:
            try:
                self._line.settimeout(seconds + _GRACE_SECONDS)
                self._file.write(json.dumps(request).encode() + b"\n")
                self._file.flush()
                reply = json.loads(self._file.readline(4 * limit + 4096))
                streams = [base64.b64decode(reply[name]) for name in ("stdout", "stderr")]
                code = int(reply["code"])
                stopped = Stop(reply["stopped"]) if reply["stopped"] else None
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.stop()
                raise EnvironmentCrashError(f"sandbox: the jail ended: {error}") from error
        return SandboxResult(
            stdout=streams[0].decode("utf-8", "replace"),
            stderr=streams[1].decode("utf-8", "replace"),
            exit_code=None if stopped else code,
            stopped=stopped,
            seconds=time.monotonic() - began,
            isolated=True,
        )

    def kill(self) -> None:
        """See `SandboxSession.kill`; the driver is one of the processes, so it kills the others."""
        self.exec([])

    def stop(self) -> None:
        """Ends the jail."""
        self._over.set()
        self._line.close()

    def __del__(self) -> None:
        """Ends a jail that nobody uses."""
        self._over.set()
