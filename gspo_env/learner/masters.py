"""Float32 masters of half-precision weights, so that no step is too small for their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)

_LARGEST_SCALE = 2.0**12
"""What float16 loses at this loss scale is 1e-11, far below AdamW's epsilon of 1e-8; at 2**16 the
first steps of a model of 100 M parameters overflowed."""
_GROWTH_INTERVAL = 2000
"""Steps without overflow after which the loss scale doubles, as in `torch.amp.GradScaler`."""


class MasterWeights:
    """The float32 tensors that the optimiser works on.

    A bfloat16 weight of 0.02 has neighbours at a distance of 1e-4, so a step of 1e-6 is lost. Each
    half-precision weight that trains therefore has a float32 master. A backward pass adds gradients
    to the masters, the optimiser changes the masters, and `write` rounds them into the weights. All
    other weights are their own masters.

    The gradients of a model with float16 weights are computed from a loss times `loss_scale`,
    because float16 has no numbers below 6e-8; see arXiv 1710.03740, section 3.2.

    Args:
        model: The model, on the device where it trains.
    """

    tensors: dict[str, nn.Parameter]
    """The masters by the name of their weight; their `grad` is the gradient."""
    scaled: bool
    """Whether the model has float16 weights."""
    loss_scale: float
    """A power of two; 1 unless `scaled`."""
    steps: int
    """Optimiser steps since the last overflow."""

    def __init__(self, model: Any) -> None:
        weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._half = {name: p for name, p in weights.items() if p.dtype in HALF}
        copies = {name: nn.Parameter(p.detach().float()) for name, p in self._half.items()}
        self.tensors = weights | copies
        self.scaled = any(p.dtype == torch.float16 for p in model.parameters())
        self.loss_scale = _LARGEST_SCALE if self.scaled else 1.0
        self.steps = 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Returns a context for backward passes of a loss times `loss_scale`.

        Each half-precision gradient is added to the gradient of its master and freed. The sum over
        several passes is in float32.
        """
        self._scale_gradients(self.loss_scale)
        hooks = [
            weight.register_post_accumulate_grad_hook(partial(_move_gradient, self.tensors[name]))
            for name, weight in self._half.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._scale_gradients(1 / self.loss_scale)

    def gradients(self) -> dict[str, Tensor]:
        """Returns copies of the gradients that were added so far."""
        gradients = {name: master.grad for name, master in self.tensors.items()}
        return {name: grad.clone() for name, grad in gradients.items() if grad is not None}

    def restore(self, gradients: Mapping[str, Tensor]) -> None:
        """Replaces the gradients, such as those of a pass that failed half-way."""
        for weight in self._half.values():
            weight.grad = None
        for name, master in self.tensors.items():
            grad = gradients.get(name)
            master.grad = None if grad is None else grad.clone()

    def _scale_gradients(self, factor: float) -> None:
        for master in self.tensors.values() if factor != 1 else ():
            if master.grad is not None:
                master.grad.mul_(factor)

    def write(self) -> None:
        """Rounds the masters into the weights, after an optimiser step."""
        self.round_weights()
        self.steps += 1
        if self.scaled and self.steps % _GROWTH_INTERVAL == 0:
            self.loss_scale = min(2 * self.loss_scale, _LARGEST_SCALE)

    @torch.no_grad()
    def round_weights(self) -> None:
        """Gives each half-precision weight the nearest value to its master."""
        for name, weight in self._half.items():
            weight.copy_(self.tensors[name])

    def lower_scale(self) -> bool:
        """Halves the loss scale after an overflow; returns False if it is 1 already."""
        self.steps, before = 0, self.loss_scale
        self.loss_scale = max(1.0, before / 2)
        return self.loss_scale < before


def _move_gradient(master: Tensor, weight: Tensor) -> None:
    assert weight.grad is not None  # this is the hook that runs when it is complete
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad.add_(weight.grad)
    weight.grad = None
