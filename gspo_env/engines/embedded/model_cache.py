"""One sequence at a time with the model's own attention and the cache that it makes for itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.upload import upload
from gspo_env.errors import ModelError

_NAMES = ("past_key_values", "cache_params")
"""The names that models of `transformers` use for their cache."""


class ModelCache:
    """The state of one sequence: keys and values, and convolution and recurrent states.

    It cannot go back: a prompt that does not continue `tokens` needs a new cache.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._state: dict[str, Any] = {}
        self.tokens: list[int] = []
        """The ids that were fed."""
        self.logits: Tensor | None = None
        """Of the last id, (1, V)."""

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Feeds the next ids in one forward pass; returns the logits of the last, (1, V).

        Raises:
            ModelError: The model returns no cache.
        """
        device = next(self._model.parameters()).device
        start = len(self.tokens)
        (new,) = upload([np.array([ids], dtype=np.int64)], device)
        output = self._model(
            input_ids=new,
            position_ids=torch.arange(start, start + len(ids), device=device)[None],
            use_cache=True,
            logits_to_keep=1,
            **self._state,
        )
        self._state = {name: output[name] for name in _NAMES if output.get(name) is not None}
        if not self._state:
            raise ModelError(f"{type(self._model).__name__} returns no cache that can be kept")
        self.tokens.extend(ids)
        logits: Tensor = output.logits[:, -1]
        self.logits = logits
        return logits

    def copy(self) -> ModelCache:
        """Returns an independent copy, to continue the same tokens in another way."""
        other = ModelCache(self._model)
        other._state, other.tokens = copy.deepcopy(self._state), list(self.tokens)
        other.logits = self.logits
        return other
