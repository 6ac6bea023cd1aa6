"""The weights that a model computes with: its own, with PEFT adapters merged into copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from gspo_env.errors import ModelError
from gspo_env.model.adapters import plain_model

Weights = dict[str, Callable[[], Tensor] | Tensor]
"""Weights by name; those of a layer with an adapter are computed when they are called."""


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
    try:
        while hasattr(each, "base_layer"):  # the wrappers of fused experts are nested
            if not each.disable_adapters:
                each.merge()
            each = each.base_layer
    except Exception as error:
        raise ModelError(
            f"the adapter of {name} cannot be merged into a copy for the engine: {error}; "
            "change the adapter or choose the engine `transformers`"
        ) from error
    return {key: tensor.to(dtypes[key]) for key, tensor in each.state_dict().items()}
