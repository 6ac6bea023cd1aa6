"""The last MLP of a model, computed only for the tokens whose predictions are read.

Behind the attention of the last layer, tokens do not see each other. A turn of 13 tokens of which 4
were sampled needs this MLP for 4 of them, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gspo_env.model.attention import PackedAttention
from gspo_env.model.experts import router_coefficient

_SMALL = 1e-3
"""Largest change of the logits, compared with what they change without the MLP."""


def last_mlp(model: Any) -> nn.Module | None:
    """Returns the MLP of the last layer if other tokens' outputs of it change no prediction.

    This is tried with a short row. The model has ragged attention, and does not compute layers
    again in the backward pass, where the context of `only` is over.
    """
    found = [m for name, m in model.named_modules() if name.rpartition(".")[2] == "mlp"]
    if not found or router_coefficient(model) or "forward" in vars(found[-1]):
        return None  # a forward of its own: somebody has replaced it
    if getattr(model, "is_gradient_checkpointing", False):
        return None
    mlp, device = found[-1], model.device
    ids, read = torch.arange(6, device=device)[None], torch.tensor([2, 5], device=device)

    def logits(rows: Tensor | None) -> Tensor:
        ragged = PackedAttention([4, 2], device)
        with only(mlp, rows):
            out = model(input_ids=ids, position_ids=ids, use_cache=False, ragged=ragged)
        part: Tensor = out.logits[0, read]
        return part

    with torch.no_grad():
        try:
            whole, part, without = map(logits, (None, read, read[:0]))
        except (TypeError, RuntimeError, IndexError):  # it takes or returns something else
            return None
    gap, effect = (float((other - whole).abs().max()) for other in (part, without))
    return mlp if gap <= _SMALL * effect else None


@contextmanager
def only(mlp: nn.Module | None, rows: Tensor | None) -> Iterator[None]:
    """Returns a context in which an MLP gives zeros for all tokens but some.

    Args:
        mlp: The module, which takes (1, T, D); None changes nothing.
        rows: (R,) places of tokens, each once; None for all.
    """
    if mlp is None or rows is None:
        yield
        return
    forward = mlp.forward

    def partly(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_copy(1, rows, forward(x.index_select(1, rows)))

    mlp.forward = partly
    try:
        yield
    finally:
        del mlp.forward
