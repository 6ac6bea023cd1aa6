"""Lengths up to which a model treats its tokens as packed rows and caches do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from gspo_env.model.attention import PackedAttention


class _Windows(PackedAttention):
    """Notes the window that each layer asks for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([1], device)
        self.told: dict[int, int | None] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `Ragged.attend`."""
        self.told[layer] = window
        return super().attend(layer, q, k, v, scale, window)


def attention_limit(model: Any) -> float:
    """Returns the tokens beyond which a layer's own mask differs from what it asks ragged for.

    The library's cache knows which layers forget: those with a window, which packed rows follow,
    and those that attend in chunks, which they do not.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_temperature_tuning", False):
        return 0  # scales by the position in the row
    windows = _Windows(next(model.parameters()).device)
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    model(input_ids=ids, position_ids=ids, use_cache=False, ragged=windows)
    limit = math.inf
    for n, layer in enumerate(DynamicCache(config=config).layers):
        kept = getattr(layer, "sliding_window", None) or math.inf
        told = windows.told.get(n) or math.inf
        if n in windows.told and kept != told:
            limit = min(limit, kept, told)
    return limit


def rope_limit(model: Any) -> int | None:
    """Returns the tokens beyond which all rotary positions depend on the length of the sequence."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for part in [rope, *rope.values()]:  # one for all layers, or one for each type of layer
        kind = part.get("rope_type", "") if isinstance(part, dict) else ""
        if kind == "longrope":
            limits.append(int(part["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)
