"""Whether PEFT has wrapped a model, and what is inside; `gspo_env.model.merged` has its weights."""

from __future__ import annotations

from typing import Any


def plain_model(model: Any) -> Any:
    """Returns the `transformers` model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_adapted(model: Any) -> bool:
    """Returns whether PEFT has wrapped the model."""
    return hasattr(model, "disable_adapter")


def adapter_is_zero(model: Any) -> bool:
    """Returns whether a model equals its base: no adapter, or one that adds nothing yet."""
    up = [p for name, p in model.named_parameters() if "lora_B" in name]
    return not is_adapted(model) or (bool(up) and not any(bool(p.any()) for p in up))
