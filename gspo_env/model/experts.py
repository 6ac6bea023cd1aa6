"""Mixture-of-experts models: the router's auxiliary loss and how evenly it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """The router over a row."""

    loss: Tensor
    """Scalar, with a gradient; 1 times the experts of a token where choice is even."""
    load: Tensor
    """(E,) share of the choices that fall on each expert, times E; 1 where they are even."""


def router_coefficient(model: Any) -> float:
    """The weight of the router's auxiliary loss; 0 for a dense model."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) if experts else 0.0


def balance(router_logits: Sequence[Tensor], chosen: int, uses_T: Tensor) -> Balance:
    """The load-balancing loss of a packed row, each token as often as sequences use it.

    A packed row has no padding to leave out, and a token that sequences share is computed once:
    weighed by its uses, it counts as if each sequence had computed it.

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
        picked = probability_TE.topk(chosen, dim=-1).indices.flatten()
        count_E = count_E.index_add(0, picked, weight_T.repeat_interleave(chosen))
        probability_E = probability_E + weight_T @ probability_TE
    total = weight_T.sum() * len(router_logits)
    loss = (count_E / total * probability_E / total).sum() * len(count_E)
    return Balance(loss=loss, load=count_E * len(count_E) / (total * chosen))
