"""Exports the learner's weights to an engine."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights under the names of the model's checkpoint, LoRA adapters added in.

    The sum is a new tensor: merging in place and unmerging would round the base weights.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapted = {
        name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")
    }
    for name, tensor in base.named_parameters():
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in adapted:
            module = adapted[owner]
            if leaf == "weight":
                deltas = (module.get_delta_weight(a) for a in module.active_adapters)
                tensor = sum(deltas, tensor.detach())
            yield f"{owner}.{leaf}", tensor.detach()
        elif ".lora_" not in name:
            yield name, tensor.detach()


class Exporter:
    """Converts the weights of a model for an engine.

    Args:
        model: The learner's causal LM, for its architecture.
        untie: Gives the output head a copy of tied embeddings. On a CPU, vLLM packs the head when
            it starts, and reloading tied embeddings would not update the packed head.
    """

    def __init__(self, model: Any, untie: bool) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.config = copy.deepcopy(base.config)
        self.config.architectures = [type(base).__name__]
        self._tied = ""
        if untie and self.config.tie_word_embeddings:
            self.config.tie_word_embeddings = False
            weight = base.get_input_embeddings().weight
            self._tied = next(name for name, p in base.named_parameters() if p is weight)

    def weights(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights that the exported config expects."""
        for name, tensor in named:
            yield name, tensor
            if name == self._tied:
                yield "lm_head.weight", tensor

    def write(self, named: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        """Writes config and weights, all or nothing; replaces the folder if it exists."""
        write_checkpoint(self.config, self.weights(named), folder)


def write_checkpoint(config: Any, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Writes a folder that an engine loads, all or nothing; replaces the folder if it exists."""
    from safetensors.torch import save_file

    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config.save_pretrained(part)
    # save_file refuses tensors that share memory, as an untied head does with its embeddings
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)
