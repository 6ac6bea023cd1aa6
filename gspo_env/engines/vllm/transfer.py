"""Sends weights to vLLM servers with vLLM's transfer API: NCCL, CUDA IPC, or Gloo between CPUs.

vLLM implements NCCL and IPC, which need GPUs. This module implements Gloo for the trainer and the
workers; it is an entry point for vLLM's plugins, so vLLM calls `register` in each of its processes.
Each server has its own channel, so that one that dies does not affect the others.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
from torch import Tensor
from vllm.distributed.utils import (
    stateless_destroy_torch_distributed_process_group,
    stateless_init_torch_distributed_process_group,
)
from vllm.distributed.weight_transfer import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from gspo_env.engines.base import NamedTensors
from gspo_env.engines.vllm.process import DIE_WITH_PARENT, Server, free_port
from gspo_env.runtime.processes import die_with_parent

_LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(minutes=5)
"""Maximum time that the trainer and a worker wait for each other."""


def register() -> None:
    """Adds the Gloo backend to vLLM's registries; does nothing when called again.

    A process that vLLM started for a server or an engine of ours ends with its parent from now on.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and DIE_WITH_PARENT in os.environ:
        die_with_parent(parent.pid)
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GlooWorker)
        WeightTransferTrainerFactory.register_engine("gloo", GlooTrainer)


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
        with self._server.client(_TIMEOUT.total_seconds()) as client:
            client.post(f"/{path}", json=json).raise_for_status()


def open_channel(backend: str, server: Server, workers: int, source: Weights) -> Any:
    """Connects to a server's workers; `send_weights()` of the result sends `source`.

    Args:
        backend: `nccl`, `ipc` or `gloo`. The server must have been started with the same one.
        server: The server.
        workers: The server's number of workers.
        source: The weights to send.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    register()
    info: TrainerInitInfo
    if backend == "ipc":
        info = IPCTrainerInitInfo(rank=0, packed=True)
    else:
        host, port = _own_address(server)
        kind = GlooInfo if backend == "gloo" else NCCLTrainerInitInfo
        info = kind(rank=0, master_address=host, master_port=port, world_size=workers + 1)
    return WeightTransferTrainerFactory.trainer_init(info, client=_Client(server), source=source)


def _own_address(server: Server) -> tuple[str, int]:
    """Returns an address of this machine that the server can reach, and a free port."""
    if server.socket:
        return _LOOPBACK, free_port(_LOOPBACK)
    url = urlsplit(server.address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname, url.port or 80))
        host = probe.getsockname()[0]
    return host, free_port(host)


@dataclass(kw_only=True)
class GlooInfo(WeightTransferInitInfo, TrainerInitInfo):  # type: ignore[misc]
    """Address at which the workers join the trainer (rank 0); used by both sides."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int

    def join(self, rank: int) -> Any:
        """Joins the process group of the trainer and one server's workers."""
        return stateless_init_torch_distributed_process_group(
            self.master_address, self.master_port, rank, self.world_size, "gloo", timeout=_TIMEOUT
        )


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Names, dtypes and shapes of the tensors that the trainer sends next."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWorker(WeightTransferEngine[GlooInfo, GlooUpdate]):  # type: ignore[misc]
    """Receives weights in a worker of a server."""

    init_info_cls = GlooInfo
    update_info_cls = GlooUpdate
    _group: Any = None

    def init_transfer_engine(self, init_info: GlooInfo) -> None:
        """Leaves the group of an earlier trainer, if any, and joins the new one."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = init_info.join(1 + worker)

    def start_weight_update(self) -> None:
        """Prepares the model to load weights under the names of a checkpoint."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives and loads the weights, without the synchronisation of vLLM's own method.

        That one needs an accelerator.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Loads each tensor as it arrives."""
        self.model.load_weights(self._received(update_info))

    def finish_weight_update(self) -> None:
        """Converts the weights to the layout that the worker computes with."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            stateless_destroy_torch_distributed_process_group(self._group)
            self._group = None

    def _received(self, update: GlooUpdate) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(tensor, 0).wait()
            yield name, tensor.to(self.device)


class GlooTrainer(TrainerWeightTransferEngine[GlooInfo]):  # type: ignore[misc]
    """Sends weights to the workers of one server."""

    init_info_cls = GlooInfo

    @classmethod
    def trainer_init(
        cls, init_info: GlooInfo, *, client: Any, source: WeightSource | None = None
    ) -> GlooTrainer:
        """Connects to the server's workers."""
        trainer = cls(client=client, source=source)
        with ThreadPoolExecutor(1) as pool:  # the workers answer once all have joined
            answer = pool.submit(client.init_weight_transfer_engine, asdict(init_info))
            trainer._group = init_info.join(init_info.rank)
            answer.result()
        return trainer

    def send_weights(self) -> None:
        """Sends every tensor of the source and returns when the workers have loaded them all."""
        metadata = self.source.described()
        update = GlooUpdate(
            names=[p.name for p in metadata],
            dtype_names=[str(p.dtype).removeprefix("torch.") for p in metadata],
            shapes=[list(p.shape) for p in metadata],
        )
        self.client.start_weight_update()
        pool = ThreadPoolExecutor(1)
        try:
            answer = pool.submit(self.client.update_weights, asdict(update))
            for _, tensor in self.source:
                self._group.broadcast(tensor.detach().cpu().contiguous(), 0).wait()
            answer.result()
        finally:
            pool.shutdown(wait=False)  # a server that failed may never answer
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leaves the group."""
        stateless_destroy_torch_distributed_process_group(self._group)
