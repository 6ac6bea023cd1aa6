"""LoRA adapters of PEFT: made, saved, loaded, and merged into copies of a model's weights."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gspo_env.errors import ModelError, raised_as
from gspo_env.model.head import is_linear, plain_model
from gspo_env.model.save import replaced_folder

Weights = dict[str, Callable[[], Tensor] | Tensor]
"""Weights by name; those of a layer with an adapter are computed when they are called."""


def add_adapter(
    model: Any, rank: int, seed: int = 0, *, alpha: float = 0.0, targets: str = "all-linear"
) -> Any:
    """Adds a LoRA adapter to linear layers, but to no router; only the adapter trains.

    It has no dropout: the policy that trains is the one that was sampled.

    Args:
        model: A `transformers` causal LM.
        rank: Rank of the adapter.
        seed: Seed of the adapter's initial weights.
        alpha: The adapter's output is multiplied by `alpha / rank`; 0 is twice the rank.
        targets: Names of layers, separated by commas; `all-linear` is all but the output head.

    Raises:
        ModelError: PEFT has no adapter for a layer of the model, no layer has one of the names, or
            layers share their weights.
    """
    from peft import LoraConfig, get_peft_model

    kind = type(model).__name__
    adapted, routers = adapted_layers(model, targets)
    adapter = LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,  # type: ignore[arg-type]  # PEFT divides it
        target_modules=adapted,
        exclude_modules=routers or None,
    )
    with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU, whatever the model's device
        torch.default_generator.manual_seed(seed)
        with raised_as(
            ModelError,
            f"{kind} cannot have an adapter: PEFT knows none of its layers, or not all",
            ValueError,
            mend="; expected lora_rank 0",
        ):
            return get_peft_model(model, adapter)


def adapted_layers(model: Any, targets: str) -> tuple[str | list[str], list[str]]:
    """Returns the layers that get an adapter, as PEFT takes them, and the routers, which do not.

    Raises:
        ModelError: No layer has one of the names, or layers share their weights.
    """
    kind, head = type(model).__name__, model.get_output_embeddings()
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, module in linear.items():
        if uses[id(module.weight)] > 1 and module is not head:
            raise ModelError(
                f"{kind} cannot have an adapter: several layers use the weights of {name}, so it "
                "could not be merged; expected lora_rank 0"
            )
    routers = [name for name, module in linear.items() if not is_linear(module)]
    if targets == "all-linear":
        return targets, routers
    tied = head is not None and uses[id(head.weight)] > 1
    names = {
        name.rpartition(".")[2]
        for name, module in linear.items()
        if name not in routers and not (tied and module is head)
    }
    adapted = [name.strip() for name in targets.split(",")]
    if missing := sorted(set(adapted) - names):
        raise ModelError(
            f"lora_targets has {', '.join(missing)}; expected names of layers of {kind} that can "
            f"have an adapter: {', '.join(sorted(names))}"
        )
    return adapted, routers


def save_adapter(model: Any, folder: Path) -> None:
    """Writes the adapter of a model in PEFT's form, all or nothing; it needs its base to load."""
    with replaced_folder(folder) as part, warnings.catch_warnings():
        # a base without a folder, such as a GGUF file, has no config to compare with
        warnings.filterwarnings("ignore", "Could not find a config file", UserWarning)
        model.save_pretrained(part)


def load_adapter(model: Any, folder: Path) -> None:
    """Gives the adapter of a model the weights that `save_adapter` wrote."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """Returns the tensors of a model's adapter under the names that `save_adapter` writes."""
    from peft import get_peft_model_state_dict

    tensors: dict[str, Tensor] = get_peft_model_state_dict(model)
    return tensors


def tensor_of(weight: Callable[[], Tensor] | Tensor) -> Tensor:
    """Returns one of the `Weights`, computed if it has to be."""
    return weight if isinstance(weight, Tensor) else weight()


def effective_weights(model: Any) -> Weights:
    """Returns the weights under the names that the model has without adapters.

    A layer with an adapter is copied and PEFT merges the adapter into the copy: merging in place
    and unmerging would round the base weights. Half precision is merged in float32 and rounded
    once. Nothing is copied before its weight is called.

    Raises:
        ModelError: A trainable parameter is part of no weight, as the virtual tokens of prompt
            tuning are. Calling a weight raises it if the adapter cannot be merged.
    """
    base = plain_model(model)
    inside = {id(parameter) for parameter in base.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            raise ModelError(
                f"the trainable parameter {name} changes no weight of the model, so an engine with "
                "its own copy cannot have it; use LoRA or choose the engine `transformers`"
            )
    adapted = base is not model or getattr(model, "_hf_peft_config_loaded", False)
    return _weights(base, "") if adapted else dict(base.state_dict())


def _weights(module: Any, path: str) -> Weights:
    """Returns the weights of a module without the adapters' names."""
    weights: Weights = dict(module.state_dict(prefix=path))
    for name, wrapper in _wrappers(module):
        inner = f"{path}{name}."
        for key in [key for key in weights if key.startswith(inner)]:
            del weights[key]
        saves = hasattr(wrapper, "modules_to_save")
        weights |= _weights(_saved(wrapper), inner) if saves else _merged(wrapper, inner)
    return weights


def _wrappers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yields the outermost PEFT layers below a module."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    outer = "."  # no name begins with it
    for name, each in module.named_modules():
        kind = isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if kind and not name.startswith(outer):
            outer = f"{name}."
            yield name, each


def _saved(wrapper: Any) -> Any:
    """Returns the module of `modules_to_save` that is active, or the original one."""
    active = [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]
    if wrapper.disable_adapters or not active:
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def _merged(wrapper: Any, path: str) -> Weights:
    layer = getattr(wrapper, "token_adapter", wrapper)
    merged: dict[str, Tensor] = {}

    def weight(key: str) -> Tensor:
        if not merged:
            merged.update(_merge(layer, path.removesuffix(".")))
        return merged.pop(key)

    keys = layer.get_base_layer().state_dict()
    return {path + key: lambda key=key: weight(key) for key in keys}  # type: ignore[misc]


def _merge(layer: Any, name: str) -> dict[str, Tensor]:
    """Returns the weights of a layer with its active adapters merged into a copy."""
    dtypes = {key: tensor.dtype for key, tensor in layer.get_base_layer().state_dict().items()}
    if not all(dtype.is_floating_point for dtype in dtypes.values()):
        raise ModelError(
            f"{name} has an adapter on quantized weights, which cannot be merged into a copy for "
            "the engine; load the model in another way or choose the engine `transformers`"
        )
    each = copy.deepcopy(layer)
    if all(dtype.itemsize < 4 for dtype in dtypes.values()):
        each = each.float()
    problem = f"the adapter of {name} cannot be merged into a copy for the engine"
    mend = "; change the adapter or choose the engine `transformers`"
    with raised_as(ModelError, problem, Exception, mend=mend):
        while hasattr(each, "base_layer"):  # the wrappers of fused experts are nested
            if not each.disable_adapters:
                each.merge()
            each = each.base_layer
    return {key: tensor.to(dtypes[key]) for key, tensor in each.state_dict().items()}
