"""Exports the learner's weights to an engine, as the model's checkpoint holds them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_env.model.adapters import Weights, adapter_weights, effective_weights, tensor_of
from gspo_env.model.head import plain_model, usable_ids
from gspo_env.model.save import replaced_folder, shards

_LAYER = re.compile(r".*?\.\d+\.")


@torch.no_grad()
def named_weights(model: Any, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors that `save_pretrained` writes, adapters merged in.

    With `adapter`, they are those of the adapter alone, as PEFT saves it.

    A module may hold weights in another form than its checkpoint, such as the matrices of all
    experts in one tensor; they are converted back layer by layer, so that at most one layer is
    copied at a time.

    Raises:
        ModelError: An adapter cannot be merged, or trains what is not a weight of the model.
    """
    if adapter:
        yield from adapter_weights(model).items()
        return
    base, weights = plain_model(model), effective_weights(model)
    unique = _without_duplicates(base, weights)
    for names in _layers(unique):
        group = {name: tensor_of(weights[name]) for name in names}
        yield from _as_checkpoint(base, group).items()


def base_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields what `named_weights` does, of a PEFT model without its adapter."""
    with model.disable_adapter():
        yield from named_weights(model)


class Exporter:
    """Converts the weights of a model for an engine.

    Args:
        model: The learner's causal LM, for its architecture.
        untie: Gives the output head a copy of tied embeddings. On a CPU, vLLM packs the head when
            it starts, and reloading tied embeddings would not update the packed head.
    """

    def __init__(self, model: Any, untie: bool) -> None:
        base = plain_model(model)
        saved = _without_duplicates(base, effective_weights(model))
        self.config = copy.deepcopy(base.config)
        self.config.architectures = [type(base).__name__]
        self._copies: dict[str, str] = {}
        self._ids = usable_ids(base)
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        text = self.config.get_text_config()
        padded = {
            id(p)
            for part in ends
            if part is not None
            for p in part.parameters()
            if len(p) == text.vocab_size
        }
        self._padded: set[str] = set()
        """The weights with a row for each id, if there are more than the engine may sample."""
        if self._ids < text.vocab_size:
            text.vocab_size = self._ids
            every = base.named_parameters(remove_duplicate=False)
            self._padded = {_exported(base, name) for name, p in every if id(p) in padded}
        for name, source in getattr(base, "all_tied_weights_keys", {}).items():
            if name in saved:  # an adapter changed one of the two
                self.config.tie_word_embeddings = False
            elif untie:
                self.config.tie_word_embeddings = False
                self._copies[_exported(base, source)] = _exported(base, name)

    @property
    def is_padded(self) -> bool:
        """Whether the model has ids that its tokenizer has not; engines get none of them."""
        return bool(self._padded or getattr(self.config.get_text_config(), "unused_ids", ()))

    def weights(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights that the exported config expects."""
        for name, tensor in named:
            tensor = tensor[: self._ids] if name in self._padded else tensor
            yield name, tensor
            if name in self._copies:
                yield self._copies[name], tensor

    def write(self, named: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        """Writes config and weights, all or nothing; replaces the folder if it exists.

        Large models become several files, so that at most one of them is in memory.
        """
        from safetensors.torch import save_file

        with replaced_folder(folder) as part:
            self.config.save_pretrained(part)
            files: dict[str, str] = {}
            for number, shard in enumerate(shards(self.weights(named)), 1):
                file = f"model-{number:05d}.safetensors"
                save_file(shard, part / file, metadata={"format": "pt"})
                files |= dict.fromkeys(shard, file)
            index = {"metadata": {}, "weight_map": files}
            (part / "model.safetensors.index.json").write_text(json.dumps(index))


def _without_duplicates(base: Any, weights: Weights) -> list[str]:
    """Returns the names of the weights that are saved: of tied ones, one; buffers as declared."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = base._keys_to_ignore_on_save or ()
    present = {
        # a merged weight shares its memory with no other
        name: weight if isinstance(weight, Tensor) else torch.empty(1)
        for name, weight in weights.items()
        if name not in ignored
    }
    return list(remove_tied_weights_from_state_dict(present, base))


def _layers(names: Iterable[str]) -> Iterator[list[str]]:
    """Yields the names in groups: those outside of the layers, then each layer's."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        groups.setdefault(match[0] if match else "", []).append(name)
    yield from groups.values()


def _as_checkpoint(base: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(base, weights)
    return {name: tensor.detach() for name, tensor in converted.items()}


def _exported(base: Any, name: str) -> str:
    """Returns the name of a weight in the checkpoint."""
    (exported,) = _as_checkpoint(base, {name: torch.empty(1)})
    return exported
