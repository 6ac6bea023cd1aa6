"""Finds the first layer of a model whose output differs between two ways to run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_CHANNELS = 64
"""Channels of each token that are compared."""
_JUMP = 4
"""A layer whose output differs less than this many times its input only passes on a difference."""

_Key = tuple[str, int]
"""A module's name, and how often it ran before in the same pass."""


class Trace:
    """Records what the modules of a model compute for each token, and compares other passes.

    Only the first input and the first output are looked at, and only if they have a row for each
    token. The difference of two tensors is the norm of their difference over the norm of the first.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._limit = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        self._truth: dict[_Key, list[tuple[Tensor | None, Tensor]]] = {}

    @contextmanager
    def record(self, tokens: int) -> Iterator[None]:
        """Records the pass in this context as the next `tokens` rows of the truth."""
        with self._seen(tokens) as seen:
            yield
        for key, rows in seen.items():
            self._truth.setdefault(key, []).append(rows)

    @contextmanager
    def compare(self, places: Tensor) -> Iterator[list[str]]:
        """Compares the pass in this context, whose tokens are `places` in the truth.

        Appends to the yielded list the name and class of the first module whose output differs
        though its input does not.
        """
        found: list[str] = []
        with self._seen(len(places)) as seen:
            yield found
        keys = [key for key in seen if key in self._truth]
        numbers = [self._differences(key, *seen[key], places) for key in keys]
        table = torch.stack(numbers).tolist() if numbers else []
        for (name, _), (before, after) in zip(keys, table, strict=True):
            if not after <= max(self._limit, _JUMP * before):
                module = self._model.get_submodule(name)
                shown = name.removeprefix("base_model.model.") or "model"  # PEFT adds the prefix
                found.append(f"{shown} ({type(module).__name__})")
                break

    def _differences(
        self, key: _Key, before: Tensor | None, after: Tensor, places: Tensor
    ) -> Tensor:
        parts = self._truth[key]
        own_before = [rows for rows, _ in parts if rows is not None]
        change = after.new_zeros(())
        if before is not None and len(own_before) == len(parts):
            change = _relative(torch.cat(own_before)[places], before)
        return torch.stack([change, _relative(torch.cat([p[1] for p in parts])[places], after)])

    @contextmanager
    def _seen(self, tokens: int) -> Iterator[dict[_Key, tuple[Tensor | None, Tensor]]]:
        seen: dict[_Key, tuple[Tensor | None, Tensor]] = {}
        counts: Counter[str] = Counter()

        def hook(name: str) -> Any:
            def see(module: Any, args: Any, kwargs: Any, output: Any) -> None:
                key = (name, counts[name])
                counts[name] += 1
                after = _rows(output, tokens)
                if after is not None:
                    first = args[0] if args else kwargs.get("hidden_states")
                    seen[key] = (_rows(first, tokens), after)

            return see

        handles = [
            module.register_forward_hook(hook(name), with_kwargs=True)
            for name, module in self._model.named_modules()
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()


def _rows(value: Any, tokens: int) -> Tensor | None:
    """Returns the first channels of each token, (T, C); None if there is no row for each."""
    value = value[0] if isinstance(value, tuple | list) and value else value
    if not isinstance(value, Tensor):
        return None
    if value.ndim > 1 and value.shape[:2] == (1, tokens):
        value = value[0]
    elif value.ndim == 0 or value.shape[0] != tokens:
        return None
    value = torch.view_as_real(value) if value.is_complex() else value
    rows: Tensor = value.detach().reshape(tokens, -1)[:, :_CHANNELS].float()
    return rows


def _relative(truth: Tensor, other: Tensor) -> Tensor:
    difference, size = torch.linalg.vector_norm(other - truth), torch.linalg.vector_norm(truth)
    return torch.div(difference, size.clamp_min(torch.finfo(torch.float32).tiny))
