"""Weights to vLLM servers by their own transfer API: NCCL, CUDA IPC, or Gloo between CPUs.

vLLM brings both ends of NCCL and IPC, which need GPUs. Both ends of Gloo are here: vLLM calls
`register` in each of its processes, since this package announces it as a plugin of vLLM.
Each server has a channel of its own, so one that dies takes no other with it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
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

_TIMEOUT = timedelta(minutes=5)
"""How long one end waits for the other."""


def register() -> None:
    """Adds the Gloo backend to vLLM's registries; may be called again."""
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GlooWorker)
        WeightTransferTrainerFactory.register_engine("gloo", GlooTrainer)


class Weights(WeightSource):  # type: ignore[misc]
    """The tensors that the next transfer sends."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, Tensor]] = []

    def set(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Takes (name, tensor) pairs; the tensors are not copied."""
        self._pairs = list(pairs)

    def metadata(self) -> list[ParamMeta]:
        """What iteration yields, without the tensors."""
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._pairs]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All pairs, in the same order every time."""
        return iter(self._pairs)


def open_channel(backend: str, address: str, workers: int, source: Weights) -> Any:
    """Connects with a server's workers; the result's `send_weights()` sends `source`.

    Args:
        backend: `nccl`, `ipc` or `gloo`; the server has to be started with the same.
        address: Of the server, such as `http://node1:8000`.
        workers: How many workers the server has.
        source: The weights to send.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    register()
    info: TrainerInitInfo
    if backend == "ipc":
        info = IPCTrainerInitInfo(rank=0, packed=True)
    else:
        host, port = _own_address(address)
        kind = GlooTrainerInfo if backend == "gloo" else NCCLTrainerInitInfo
        info = kind(rank=0, master_address=host, master_port=port, world_size=workers + 1)
    client = HTTPVLLMWeightSyncClient(address)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _own_address(server: str) -> tuple[str, int]:
    """A host name of this machine that the server can reach, and a free port."""
    url = urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname, url.port or 80))
        host = probe.getsockname()[0]
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


@dataclass(kw_only=True)
class GlooInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where a worker meets the trainer, which has rank 0."""

    master_address: str
    master_port: int
    world_size: int

    def join(self, rank: int) -> Any:
        """The process group of the trainer and one server's workers."""
        return stateless_init_torch_distributed_process_group(
            self.master_address, self.master_port, rank, self.world_size, "gloo", timeout=_TIMEOUT
        )


@dataclass
class GlooTrainerInfo(TrainerInitInfo):  # type: ignore[misc]
    """The trainer's side of `GlooInfo`."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What the trainer is about to send."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWorker(WeightTransferEngine[GlooInfo, GlooUpdate]):  # type: ignore[misc]
    """Receives weights in a worker of a server."""

    init_info_cls = GlooInfo
    update_info_cls = GlooUpdate
    _group: Any = None

    def init_transfer_engine(self, init_info: GlooInfo) -> None:
        """Joins the trainer's group, in place of the one before."""
        self.shutdown()
        parallel = self.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = init_info.join(1 + place)

    def start_weight_update(self) -> None:
        """Makes the model take weights as a checkpoint names them."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives and loads; vLLM's own would ask for an accelerator to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Loads each tensor as it arrives."""
        self.model.load_weights(self._received(update_info))

    def finish_weight_update(self) -> None:
        """Puts the weights into the form that the worker computes with."""
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


class GlooTrainer(TrainerWeightTransferEngine[GlooTrainerInfo]):  # type: ignore[misc]
    """Sends weights to the workers of one server."""

    init_info_cls = GlooTrainerInfo

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInfo, *, client: Any, source: WeightSource | None = None
    ) -> GlooTrainer:
        """Meets the server's workers."""
        trainer = cls(client=client, source=source)
        info = GlooInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            world_size=init_info.world_size,
        )
        with ThreadPoolExecutor(1) as beside:  # the workers answer once all have met
            answer = beside.submit(client.init_weight_transfer_engine, asdict(info))
            trainer._group = info.join(0)
            answer.result()
        return trainer

    def send_weights(self) -> None:
        """Sends every tensor of the source and returns when the workers have loaded them."""
        described = self.source.metadata()
        update = GlooUpdate(
            names=[p.name for p in described],
            dtype_names=[str(p.dtype).removeprefix("torch.") for p in described],
            shapes=[list(p.shape) for p in described],
        )
        self.client.start_weight_update()
        beside = ThreadPoolExecutor(1)
        try:
            answer = beside.submit(self.client.update_weights, asdict(update))
            for _, tensor in self.source:
                self._group.broadcast(tensor.detach().cpu().contiguous(), 0).wait()
            answer.result()
        finally:
            beside.shutdown(wait=False)  # a server that broke off may never answer
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leaves the group."""
        stateless_destroy_torch_distributed_process_group(self._group)
