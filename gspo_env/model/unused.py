"""Ids below the highest one that a tokenizer does not have: they get no probability."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo_env.errors import ModelError

_LEAST = -1e30
"""A logit without probability; infinite ones have no entropy."""


def hide(model: Any, ids: Sequence[int]) -> None:
    """Gives ids no probability wherever the logits of a model are computed.

    The text config lists them as `unused_ids`, for engines that have a copy of the model.

    Raises:
        ModelError: The model has no output head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(
            f"the tokenizer lacks ids, the first is {ids[0]}, and the model has no output head"
        )
    model.config.get_text_config().unused_ids = list(ids)
    head.register_forward_hook(partial(_fill, tuple(ids)))


def _fill(ids: Sequence[int], module: Any, inputs: Any, logits: Tensor) -> Tensor:
    places = torch.tensor(ids, device=logits.device)
    return logits.index_fill(-1, places, max(_LEAST, torch.finfo(logits.dtype).min))
