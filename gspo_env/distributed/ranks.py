"""The ranks of a run: processes that train one model together, and what they send each other.

Rank 0 is the controller: it plays, computes the credit, and tells the others what to do. What
crosses is JSON and tensors in the form of safetensors; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gspo_env.errors import ConfigError, TrainingError

STEP_TIMEOUT = timedelta(minutes=30)
"""Longest wait for another rank inside an update."""
BATCH_TIMEOUT = timedelta(hours=24)
"""Longest wait of the other ranks for the next batch, which rank 0 plays in the meantime."""
_CHUNK = 64 << 20
"""Maximum bytes of one transfer."""
_JSON = "json"
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_LAUNCHED = (
    *_PLACE,
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_USE_AGENT_STORE",  # with it, no group but that of the ranks can be formed
)
"""Variables of a process that torchrun started."""

Header = dict[str, Any]


class OneRankFailed(TrainingError):
    """An error that the other ranks do not have, so that they would wait for this one forever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among those of a run."""

    rank: int
    """0 is the controller."""
    size: int
    device: torch.device
    mesh: DeviceMesh
    """All ranks in one row."""
    commands: Any
    """The group on which the others wait for a command of rank 0, for up to `BATCH_TIMEOUT`."""

    def command(self, command: str, **arguments: Any) -> None:
        """Tells all other ranks what to do next; called by rank 0.

        Raises:
            OneRankFailed: One of them has ended.
        """
        try:
            _broadcast_json({"command": command, **arguments}, self.commands)
        except RuntimeError as error:
            raise OneRankFailed(
                f"rank 0 cannot send the command {command!r}, because another rank has died"
            ) from error

    def next_command(self) -> Header:
        """Waits for a command of rank 0.

        Raises:
            OneRankFailed: It has died, or sent none for `BATCH_TIMEOUT`.
        """
        try:
            return _broadcast_json(None, self.commands)
        except RuntimeError as error:
            raise OneRankFailed(
                f"rank {self.rank} waits for rank 0, which has died, or sent no command for "
                f"{BATCH_TIMEOUT.total_seconds() / 3600:g} hours"
            ) from error

    def send(self, to: int, header: Header, tensors: Mapping[str, Tensor]) -> None:
        """Sends JSON and tensors to one rank, in parts of bounded size."""
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        data = torch.frombuffer(bytearray(save({_JSON: text, **plain})), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), to)
        for part in torch.split(data, _CHUNK):
            dist.send(part, to)

    def receive(self, source: int) -> tuple[Header, dict[str, Tensor]]:
        """Returns what one rank sent."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source)
        data = torch.empty(int(size), dtype=torch.uint8)
        for part in torch.split(data, _CHUNK):
            dist.recv(part, source)
        tensors = load(data.numpy().tobytes())
        header: Header = json.loads(tensors.pop(_JSON).numpy().tobytes())
        return header, tensors

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Gives all ranks the values of rank 0; `tensor` is overwritten on the others."""
        whole = tensor.detach().contiguous()
        dist.broadcast(whole.reshape(-1).view(torch.uint8), 0)
        return whole

    def max(self, value: int) -> int:
        """Returns the largest value of all ranks."""
        return int(_reduce(float(value), dist.ReduceOp.MAX))

    def sum(self, value: float) -> float:
        """Returns the sum over all ranks."""
        return _reduce(value, dist.ReduceOp.SUM)


@contextmanager
def join() -> Iterator[Ranks]:
    """Joins the other ranks that were launched; rank 0 tells them to end when it leaves.

    The variables that make this process a rank are taken out of its environment, so that no library
    and no child process (a server, an environment) takes itself for a rank. vLLM forms groups of
    its own, in its servers and to send weights to them.

    Raises:
        ConfigError: torchrun did not start this process, or a rank has no GPU of its own.
    """
    if "RANK" not in os.environ:
        raise ConfigError("this process is not a rank; expected one that torchrun started")
    rank, size, local = (int(os.environ[name]) for name in _PLACE)
    cuda = torch.cuda.is_available()
    if cuda and local >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local} has no GPU: the machine has {torch.cuda.device_count()}; expected "
            "at most as many processes"
        )
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing outside can connect
    # the store outlives a restart, with the addresses of the ranks that have died
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    c10d: Any = dist  # it does not declare that it exports these
    store = c10d.PrefixStore(f"gspo_env/{attempt}", next(c10d.rendezvous("env://"))[0])
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=STEP_TIMEOUT)
    commands = dist.new_group(backend="gloo", timeout=BATCH_TIMEOUT)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ranks",))
    for name in _LAUNCHED:
        os.environ.pop(name, None)
    ranks = Ranks(rank=rank, size=size, device=device, mesh=mesh, commands=commands)
    try:
        yield ranks
        if rank == 0:
            ranks.command("end")
    finally:
        dist.destroy_process_group()


def _broadcast_json(value: Header | None, group: Any) -> Header:
    """Sends a value of rank 0 to all; the others give None."""
    data = torch.empty(0, dtype=torch.uint8)
    if value is not None:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0, group=group)
    data = data if value is not None else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    received: Header = json.loads(data.numpy().tobytes())
    return received


def _reduce(value: float, operation: Any) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, operation)
    return float(total)
