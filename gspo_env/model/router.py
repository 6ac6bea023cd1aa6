"""How evenly the routers of a mixture of experts use the experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterBalance:
    """How evenly the routers used the experts over a row."""

    loss: Tensor
    """Scalar, with a gradient; the number of experts per token if the load is even."""
    load: Tensor
    """(E,) each expert's share of the choices, times E; 1 if the load is even."""


def balance_router(
    router_logits: Sequence[Tensor], experts_per_token: int, uses_T: Tensor
) -> RouterBalance:
    """Computes the load-balancing loss of a packed row.

    A token that several sequences share is computed once and counts once for each of them.

    Shapes:
        router_logits: (T, E) of each layer.

    Source:
        arXiv 2101.03961, eq. 4 to 6; the same numbers as `load_balancing_loss_func` of
        `transformers`.
    """
    weight_T = uses_T.float()
    count_E = probability_E = torch.zeros(router_logits[0].shape[-1], device=weight_T.device)
    for logits in router_logits:
        probability_TE = torch.softmax(logits.float(), dim=-1)
        picked = probability_TE.topk(experts_per_token, dim=-1).indices.flatten()
        count_E = count_E.index_add(0, picked, weight_T.repeat_interleave(experts_per_token))
        probability_E = probability_E + weight_T @ probability_TE
    total = weight_T.sum() * len(router_logits)
    loss = (count_E / total * probability_E / total).sum() * len(count_E)
    return RouterBalance(loss=loss, load=count_E * len(count_E) / (total * experts_per_token))
