"""An extension of vLLM's workers that loads weights and reports what was left out.

vLLM imports this module in each of its workers, so that it imports only torch.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CheckedWorker:
    """Methods that vLLM adds to its worker; each is called with `collective_rpc`."""

    add_lora: Any
    get_model: Any
    list_loras: Any
    remove_lora: Any
    vllm_config: Any
    reload_weights: Any
    model_config: Any

    def load_checked(
        self, weights: Iterable[tuple[str, Tensor]] | None = None, folder: str = ""
    ) -> dict[str, list[str]]:
        """Loads weights under the names of a checkpoint; see `stop_checking` for the result.

        Args:
            weights: The weights; None reads them from `folder`.
            folder: A folder with Safetensors.
        """
        self.start_checking()
        self.reload_weights(weights_iterator=weights or _read(Path(folder)))
        return self.stop_checking()

    def adapter_ids(self) -> list[int]:
        """Returns the numbers of the adapters that are loaded, also those of other users."""
        return sorted(self.list_loras()) if self.vllm_config.lora_config else []

    def load_adapter(self, folder: str, number: str) -> None:
        """Replaces an adapter by that of a folder; requests in flight go on with it.

        A server that loads one in place does it anew before each of its steps, from a folder that
        may have changed since.
        """
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest("update", int(number), folder, load_inplace=True))

    def free_adapter(self, number: str) -> None:
        """Forgets an adapter that no request names any more."""
        self.remove_lora(int(number))

    def start_checking(self) -> None:
        """Watches which weights the model loads, until `stop_checking`."""
        model = self.get_model()
        unused = getattr(self.model_config.hf_text_config, "unused_ids", ())
        if unused and "compute_logits" not in vars(model):
            model.compute_logits = partial(_logits, model.compute_logits, tuple(unused))
        if next(model.parameters()).device.type == "cpu":
            _forget_packed_experts(model)
        model.__dict__.pop("load_weights", None)  # of an update that failed
        model.load_weights = _Watch(model)

    def stop_checking(self) -> dict[str, list[str]]:
        """Returns the names of the weights that the model did not read, and of its stale ones."""
        watch = self.get_model().__dict__.pop("load_weights")
        return {"unread": sorted(watch.unread), "stale": sorted(watch.stale)}


def _logits(compute: Any, unused: tuple[int, ...], *inputs: Any, **options: Any) -> Any:
    """Computes logits in which the ids that the tokenizer lacks have no probability."""
    logits = compute(*inputs, **options)
    if logits is None:  # of another rank
        return None
    return logits.index_fill(-1, torch.tensor(unused, device=logits.device), -math.inf)


class _Watch:
    """Stands in for a model's `load_weights`, which an update may call several times.

    A model skips weights whose names it does not know, without a word. No operation reads those.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._load: Any = model.load_weights
        self.unread: set[str] = set()
        self._loaded: set[str] = set()
        self._untouched: set[str] = set()
        self._expected: set[str] | None = None
        self._tied = _tied(model)

    @property
    def stale(self) -> set[str]:
        names = self._untouched | ((self._expected or set()) - self._loaded)
        # a tied head waits for weights as if it were not, and then has those of the embeddings
        new = {pair for pair in self._tied & _tied(self._model) if not names.issuperset(pair)}
        return names.difference(*new)

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        if self._expected is None:  # vLLM has removed what it derives from the weights
            self._expected = {_plain(name) for name, _ in self._model.named_parameters()}
        with _Reads() as reads:
            loaded: set[str] | None = self._load(reads.watched(weights))
        self.unread |= reads.unread
        # a model that returns None does not say what it loaded
        self._loaded |= self._expected if loaded is None else {_plain(name) for name in loaded}
        self._untouched = _untouched(self._model)
        return loaded


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds out which tensors of a stream are read by an operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unread: set[str] = set()
        self._names: dict[int, list[tuple[weakref.ref[Tensor], str]]] = {}

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            # memory is used again after a tensor is freed, and tied weights share it
            alive = [
                each for each in self._names.get(tensor.data_ptr(), []) if each[0]() is not None
            ]
            self._names[tensor.data_ptr()] = [*alive, (weakref.ref(tensor), name)]
            self.unread.add(name)
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.device.type != "meta":
                for reference, name in self._names.get(value.data_ptr(), ()):
                    if reference() is not None:
                        self.unread.discard(name)
        return func(*args, **(kwargs or {}))


def _tied(model: nn.Module) -> set[frozenset[str]]:
    """Returns the names of the weights that share their memory."""
    names: dict[tuple[int, torch.Size], list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.data_ptr():  # else it has no memory, or none of its own
            names.setdefault((weight.data_ptr(), weight.shape), []).append(_plain(name))
    return {frozenset(same) for same in names.values() if len(same) > 1}


def _untouched(model: nn.Module) -> set[str]:
    """Returns the weights of the layers that vLLM waits for; in the end they keep the old ones.

    A model that copies into its parameters itself, without their loaders, copies into nothing.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    names = set()
    for path, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.load_numel_total and info.load_numel <= 0:
            weights = layer.named_parameters(recurse=False)
            names |= {_plain(f"{path}.{name}") for name, _ in weights}
    return names


def _plain(name: str) -> str:
    """Returns the name that a weight has without vLLM's layers for adapters."""
    return name.replace(".base_layer.", ".")


def _forget_packed_experts(model: nn.Module) -> None:
    """Makes vLLM pack the experts' weights again, which on a CPU it does only the first time."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is not a dict
                yield name, tensors.get_tensor(name)
