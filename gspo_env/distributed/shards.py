"""A model in shards: each rank of FSDP2 holds a part of every weight.

Every layer is a group, which is gathered when it computes. Everything else (embeddings, last norm,
head) is the root's group, which stays gathered from the forward to the backward pass: the
scorer uses the head's weight outside of the head, and tied embeddings are in one group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from gspo_env.distributed.ranks import Ranks
from gspo_env.errors import ModelError, TrainingError
from gspo_env.learner.settings import LearnerConfig
from gspo_env.model.adapters import add_adapter
from gspo_env.model.attention import RAGGED, use_ragged_attention
from gspo_env.model.check import ModelCheck, RunMode, check_model, note_check
from gspo_env.model.head import BODY, body_of, plain_model


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """What a rank needs to build the model of rank 0, but for its weights."""

    kind: str
    """Name of its class."""
    config: str
    """JSON."""
    weights: list[list[Any]]
    """Name, dtype, shape and whether it trains, of each."""
    buffers: list[list[Any]]
    """Name, dtype and shape of each."""
    mode: str
    padded: bool
    attention: str

    @classmethod
    def of(cls, whole: Any) -> ModelSpec:
        """Describes the model of rank 0."""
        check, base = check_model(whole), plain_model(whole)
        return cls(
            kind=type(base).__name__,
            config=base.config.to_json_string(use_diff=False),
            weights=[[*_description(n, p), p.requires_grad] for n, p in whole.named_parameters()],
            buffers=[_description(n, b) for n, b in whole.named_buffers()],
            mode=str(check.mode),
            padded=check.padded,
            attention=check.attention,
        )

    def build(self, learner: LearnerConfig) -> Any:
        """Builds the model without memory for its weights.

        Raises:
            ModelError: The class cannot be built from its config, or has other weights.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        tree = json.loads(self.config)
        with torch.device("meta"):
            config = AutoConfig.for_model(**tree)
            make: Any = AutoModelForCausalLM
            model = make.from_config(config, trust_remote_code=False)
            model.tie_weights()
            if type(model).__name__ == self.kind and learner.lora_rank:
                targets = learner.lora_targets
                model = add_adapter(
                    model, learner.lora_rank, alpha=learner.lora_alpha, targets=targets
                )
        shapes = {name: list(p.shape) for name, p in model.named_parameters()}
        if shapes != {name: shape for name, _, shape, _ in self.weights}:
            raise ModelError(
                f"transformers builds another model than the {self.kind} of rank 0 from its "
                "config; expected a causal LM without an adapter, or one that train added"
            )
        if self.attention == RAGGED:
            use_ragged_attention(model)
        mode = RunMode(self.mode)
        note_check(model, ModelCheck(mode=mode, padded=self.padded, attention=self.attention))
        return model


def shard(
    ranks: Ranks, spec: ModelSpec, learner: LearnerConfig, whole: Any, *, frozen: bool = False
) -> Any:
    """Builds the model of rank 0 in shards; all ranks call this together.

    A group is sent and cut before the next, so that at most one is whole in memory.

    Args:
        ranks: The ranks.
        spec: Of the model of rank 0.
        learner: Settings, for the adapter.
        whole: The model of rank 0; None on the others.
        frozen: Whether no weight trains.

    Raises:
        ModelError: The model cannot be built from its config.
        TrainingError: Some weights are not in shards.
    """
    model = spec.build(learner)
    weights = {} if whole is None else dict(whole.named_parameters())
    buffers = {} if whole is None else dict(whole.named_buffers())
    filler = _Filler(ranks, model, spec, weights, frozen)
    filler.fill_buffers(buffers)
    for layer in _layers(model):
        filler.fill(layer)
        fully_shard(layer, mesh=ranks.mesh, reshard_after_forward=True)
    filler.fill(model)
    fully_shard(model, mesh=ranks.mesh, reshard_after_forward=False)
    if (body := body_of(model)) is not None:
        setattr(model, BODY, partial(body))
        register_fsdp_forward_method(model, BODY)
    model.eval()
    _check(model, ranks)
    return model


def reshard(model: Any) -> None:
    """Frees what the last forward pass gathered, which the optimiser does not change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gather_weights(model: Any, whole: Any) -> None:
    """Copies the weights that train into the model of rank 0; all ranks call this together.

    Args:
        model: In shards.
        whole: The model of rank 0; None on the others.
    """
    places = {} if whole is None else dict(whole.named_parameters())
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            full = full_tensor(weight)
            if whole is not None:
                places[name].copy_(full)


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor whose shards are gathered; all ranks call this together."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


class _Filler:
    """Gives the modules of a model without memory the weights of rank 0."""

    def __init__(
        self, ranks: Ranks, model: Any, spec: ModelSpec, source: dict[str, Tensor], frozen: bool
    ) -> None:
        self.ranks, self.source, self.model = ranks, source, model
        self.descriptions = {name: rest for name, *rest in spec.weights}
        self.buffers, self.frozen = spec.buffers, frozen
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, weight in module._parameters.items():
                if weight is not None:
                    self.places.setdefault(self.names[id(weight)], []).append((module, key))

    def fill(self, part: nn.Module) -> None:
        """Fills the weights of a module that have no memory yet; tied ones stay one."""
        names = {self.names[id(p)] for p in part.parameters() if p.is_meta}
        inside = {id(module) for module in part.modules()}
        for name in sorted(names):
            if any(id(module) not in inside for module, _ in self.places[name]):
                raise ModelError(
                    f"{name} is a weight of several layers; expected a model whose layers share "
                    "no weight, or one process"
                )
            dtype, shape, trains = self.descriptions[name]
            values = self._values(self.source.get(name), dtype, shape)
            weight = nn.Parameter(values, requires_grad=trains and not self.frozen)
            for module, key in self.places[name]:
                module._parameters[key] = weight

    def fill_buffers(self, source: dict[str, Tensor]) -> None:
        """Fills the buffers, which every rank has whole."""
        for name, dtype, shape in self.buffers:
            path, _, key = name.rpartition(".")
            values = self._values(source.get(name), dtype, shape)
            self.model.get_submodule(path)._buffers[key] = values

    def _values(self, source: Tensor | None, dtype: str, shape: Sequence[int]) -> Tensor:
        device = self.ranks.device
        if source is not None:  # a copy, also where it is on the device already
            return self.ranks.broadcast(source.detach().to(device, copy=True))
        empty = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
        return self.ranks.broadcast(empty)


def _layers(model: Any) -> Iterable[nn.Module]:
    """Returns the layers of a model, which `transformers` names; none is inside another."""
    kinds = set(getattr(plain_model(model), "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    inner = {id(each) for layer in layers for each in layer.modules() if each is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def _check(model: Any, ranks: Ranks) -> None:
    """Checks that every rank holds a part of every weight."""
    for name, weight in model.named_parameters():
        sharded = isinstance(weight, DTensor) and isinstance(weight.placements[0], Shard)
        if not sharded or weight.device_mesh.size() != ranks.size:
            raise TrainingError(f"the weight {name} is not in shards on {ranks.size} ranks")


def _description(name: str, tensor: Tensor) -> list[Any]:
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
