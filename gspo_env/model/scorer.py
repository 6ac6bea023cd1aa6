"""One forward pass over a packed row; only model tokens reach the output head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo_env.batch.prefix import separate_runs
from gspo_env.batch.sample import PackedBatch
from gspo_env.model import head
from gspo_env.model.attention import PackedAttention, is_half
from gspo_env.model.threads import is_small
from gspo_env.model.tree_attention import TreeAttention

if TYPE_CHECKING:
    from gspo_env.model.router import RouterBalance


def router_coefficient(model: Any) -> float:
    """Returns the weight of the router's auxiliary loss; 0 for a dense model."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) if experts else 0.0


_MODE = "_gspo_training"
States = tuple[Tensor, Sequence[Tensor]]
"""The head's inputs (or the logits), and the logits of the routers of each layer."""
Run = Callable[[PackedBatch, dict[str, Any]], States]
"""Returns the states of the model tokens of a row; the options are keywords of the model."""


class Scorer:
    """Runs a causal LM on packed rows.

    Dropout is off, with and without gradient.

    Args:
        model: The model.
        temperature: Logits are divided by it.
        packed: Runs a row in one pass, which needs ragged attention. Otherwise the sequences of a
            row are taken apart for the model's own attention; they cannot share tokens.
        padded: Runs those of similar length as one padded batch, not each in a pass of its own.
    """

    def __init__(
        self, model: Any, temperature: float, *, packed: bool = True, padded: bool = False
    ) -> None:
        if not is_small(model):
            from gspo_env.model.products import use_wide_products

            use_wide_products(model)
        self.model, self.temperature = model, temperature
        self.head, self._body = head.linear_head(model, packed), head.body_of(model)
        self._ids = head.usable_ids(model)
        marks = [i for i in head.mark_ids(model) if i < self._ids]
        self._marks = torch.tensor(marks, dtype=torch.long, device=next(model.parameters()).device)
        self._run: Run = self._run_packed
        if not packed:
            from gspo_env.model.unpacked import run_alone, run_padded

            # without a linear head, a batch would have logits of every token in memory
            is_batch = padded and self.head is not None
            self._run = partial(run_padded if is_batch else run_alone, self.states)
        self.router_coefficient = router_coefficient(model)
        self._experts_per_token = getattr(model.config.get_text_config(), "num_experts_per_tok", 0)
        self._checkpointed = _checkpointed_layers(model)

    def __call__(
        self, batch: PackedBatch, routers: bool = False, entropy: bool = False
    ) -> tuple[head.Predictions, RouterBalance | None]:
        """Returns the predictions of the model tokens and, if `routers`, the routers' balance.

        If `entropy`, the entropy has a gradient.
        """
        self.model.eval()
        for layer in self._checkpointed:
            layer.training = True
        target_M = batch.target_N
        if batch.distinct_M is not None:
            target_M = target_M[batch.distinct_M]
        states, router_logits = self._run(batch, {"output_router_logits": True} if routers else {})
        marks_K = self._marks.to(target_M.device)
        options: dict[str, Any] = {"entropy": entropy, "marks_K": marks_K}
        if self.head is None:
            predictions = head.predict_from_logits(
                states[:, : self._ids], target_M, self.temperature, **options
            )
        else:
            weight: Tensor = self.head.weight
            bias: Tensor | None = self.head.bias
            if self._ids < len(weight):
                weight, bias = weight[: self._ids], None if bias is None else bias[: self._ids]
            predictions = head.predict(states, weight, bias, target_M, self.temperature, **options)
        if batch.expand_N is not None:
            predictions = predictions.at(batch.expand_N)
        if not routers:
            return predictions, None
        from gspo_env.model.router import balance_router

        return predictions, balance_router(router_logits, self._experts_per_token, batch.uses_T)

    def states(self, kept: Tensor | slice, **inputs: Any) -> States:
        """Returns the head's inputs (or the logits) of the kept tokens, and router logits."""
        if self.head is None or self._body is None:
            output = self.model(use_cache=False, logits_to_keep=kept, **inputs)
            states = output.logits
        else:
            output = self._body(use_cache=False, **inputs)
            states = output.last_hidden_state[:, kept]
        return states, output.router_logits if "output_router_logits" in inputs else ()

    def _run_packed(self, batch: PackedBatch, options: dict[str, Any]) -> States:
        """Returns the head's inputs (or the logits) of the model tokens, and router logits."""
        source_M = batch.source_N
        if batch.distinct_M is not None:
            source_M = source_M[batch.distinct_M]
        device = batch.input_ids_T.device
        runs = batch.runs
        if not runs and device.type == "cpu" and is_half(self.model.get_input_embeddings().weight):
            runs = separate_runs(batch.lengths_B)
        attention = (
            TreeAttention(runs, device) if runs else PackedAttention(batch.lengths_B, device)
        )
        states, routers = self.states(
            source_M,
            input_ids=batch.input_ids_T[None],
            position_ids=batch.positions_T[None],
            ragged=attention,
            **options,
        )
        return states[0], routers


def _checkpointed_layers(model: Any) -> list[nn.Module]:
    """Returns the layers that store only their input for the backward pass.

    `transformers` checkpoints a layer only in training mode, so that mode is on. Hooks turn it off
    inside the layer, so that dropout is off. They run in the forward pass and its recomputation.
    Afterwards the mode is what it was: a layer in training mode would drop an engine's cache.
    """
    layers: list[nn.Module] = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    for layer in layers:
        if not hasattr(layer, _MODE):  # an earlier scorer may have added the hooks
            setattr(layer, _MODE, layer.training)
            layer.register_forward_pre_hook(_enter)
            layer.register_forward_hook(_leave, always_call=True)
    return layers


def _enter(layer: nn.Module, _: Any) -> None:
    setattr(layer, _MODE, layer.training)
    layer.training = False


def _leave(layer: nn.Module, *_: Any) -> None:
    layer.training = getattr(layer, _MODE)
