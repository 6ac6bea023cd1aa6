"""Sends weights to vLLM servers with vLLM's transfer API: NCCL or CUDA IPC, which need GPUs.

Each server has its own channel, so that one that dies does not affect the others.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from gspo_env.engines.base import NamedTensors
from gspo_env.engines.vllm.process import DIE_WITH_PARENT, Server, free_port
from gspo_env.runtime.processes import die_with_parent

_LOOPBACK = "127.0.0.1"
_SECONDS = 300.0
"""Maximum time that the trainer waits for an answer of a server."""


def register() -> None:
    """Ends a process that vLLM started for a server or an engine of ours with its parent.

    vLLM calls this in each of its processes, because it is an entry point for its plugins.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and DIE_WITH_PARENT in os.environ:
        die_with_parent(parent.pid)


class Weights(WeightSource):  # type: ignore[misc]
    """The weights of the next transfer."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, Tensor]] = []

    def set(self, pairs: NamedTensors) -> None:
        """Replaces the (name, tensor) pairs, without copying the tensors."""
        self._pairs = list(pairs)
        self.__dict__.pop("metadata", None)

    def described(self) -> list[ParamMeta]:
        """Returns name, dtype and shape of each pair, in the order of iteration."""
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._pairs]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all pairs, always in the same order."""
        return iter(self._pairs)

    # vLLM 0.32 calls `metadata` and iterates over the source; 0.33 reads `metadata` as a property
    # and calls `iter_full`.
    __iter__ = iter_full
    metadata = cached_property(described) if hasattr(WeightSource, "iter_full") else described


class _Client(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """Calls a server's routes for weights, also over a Unix socket, which `requests` cannot do."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.address)
        self._server = server

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        with self._server.client(_SECONDS) as client:
            client.post(f"/{path}", json=json).raise_for_status()


def open_channel(backend: str, server: Server, workers: int, source: Weights) -> Any:
    """Connects to a server's workers; `send_weights()` of the result sends `source`.

    Args:
        backend: `nccl` or `ipc`. The server must have been started with the same one.
        server: The server.
        workers: The server's number of workers.
        source: The weights to send.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if backend == "ipc":
        info: Any = IPCTrainerInitInfo(rank=0, packed=True)
    else:
        host, port = _address_for(server)
        info = NCCLTrainerInitInfo(
            rank=0, master_address=host, master_port=port, world_size=workers + 1
        )
    return WeightTransferTrainerFactory.trainer_init(info, client=_Client(server), source=source)


def _address_for(server: Server) -> tuple[str, int]:
    """Returns an address of this machine that the server can reach, and a free port."""
    if server.socket:
        return _LOOPBACK, free_port(_LOOPBACK)
    url = urlsplit(server.address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname, url.port or 80))
        host = probe.getsockname()[0]
    return host, free_port(host)
