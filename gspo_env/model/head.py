"""The output head: log-probabilities of given tokens without all logits in memory.

Axis letters: N model tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gspo_env.errors import ModelError
from gspo_env.model.attention import PackedAttention
from gspo_env.tools.marks import first_ids

logger = logging.getLogger(__name__)

_CHUNK = {"cpu": 2**24, "cuda": 2**27}
"""Maximum logits in memory at a time. Those of a small vocabulary all fit and are computed once."""

_LARGE = 1 << 20
"""Weights of a head whose products can be faster with oneDNN."""

BODY = "gspo_body"
"""Attribute of a model in shards: a method that runs its body and gathers what the head needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """Predictions of the N model tokens, each (N,) and at least float32."""

    logprobs_N: Tensor
    """Has a gradient."""
    entropy_N: Tensor
    """Has a gradient if asked for."""
    top1_N: Tensor
    """True if the token is the most likely one."""
    marks_N: Tensor
    """The probability of all marks that were not sampled, without a gradient; see `mark_ids`."""

    def at(self, places: Tensor) -> Predictions:
        """Selects the predictions at the given places, which may repeat."""
        return Predictions(
            logprobs_N=self.logprobs_N[places],
            entropy_N=self.entropy_N[places],
            top1_N=self.top1_N[places],
            marks_N=self.marks_N[places],
        )


def predict(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    marks_K: Tensor | None = None,
) -> Predictions:
    """Computes predictions from hidden states, a chunk of tokens at a time.

    The backward pass computes the logits again. Logits are divided by the temperature and
    normalised in float32, or in float64 if the hidden states are. If `entropy`, the entropy has a
    gradient too.
    """
    apply: Any = _Head.apply
    logprobs_N, entropy_N, top1_N, marks_N = apply(
        hidden_ND,
        weight_VD,
        bias_V,
        target_N,
        temperature,
        target_N[:0] if marks_K is None else marks_K,
    )
    entropy_N = entropy_N if entropy else entropy_N.detach()
    return Predictions(logprobs_N=logprobs_N, entropy_N=entropy_N, top1_N=top1_N, marks_N=marks_N)


def predict_from_logits(
    logits_NV: Tensor, target_N: Tensor, temperature: float, *, entropy: bool, marks_K: Tensor
) -> Predictions:
    """Computes predictions from logits, for heads that are more than one linear layer."""
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    top1_N = logprobs_NV.argmax(-1) == target_N
    logprobs_N = logprobs_NV.gather(-1, target_N[:, None])[:, 0]
    marks_N = _others(logprobs_NV.detach()[:, marks_K].exp(), target_N, marks_K)
    return Predictions(logprobs_N=logprobs_N, entropy_N=entropy_N, top1_N=top1_N, marks_N=marks_N)


def _others(values_NK: Tensor, target_N: Tensor, marks_K: Tensor) -> Tensor:
    """Sums the values of the marks that are not the target."""
    return values_NK.masked_fill(target_N[:, None] == marks_K, 0).sum(-1)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature: float,
        marks_K: Tensor,
    ) -> tuple[Tensor, ...]:
        parts = _parts(hidden_ND, weight_VD)
        weight = weight_VD.to(hidden_ND.dtype)
        rows: list[tuple[Tensor, ...]] = []
        ctx.probabilities = None
        for part in parts:
            logits_NV = _logits(hidden_ND[part], weight, bias_V, temperature)
            top_N = logits_NV.amax(-1)
            logits_NV.sub_(top_N[:, None])
            picked_N = logits_NV.gather(-1, target_N[part, None])[:, 0]
            powers_NV = logits_NV.exp()
            sum_N = powers_NV.sum(-1)
            entropy_N = sum_N.log() - logits_NV.mul_(powers_NV).sum(-1) / sum_N
            marks_N = _others(powers_NV[:, marks_K], target_N[part], marks_K) / sum_N
            total_N = top_N + sum_N.log()
            rows.append((picked_N - sum_N.log(), entropy_N, picked_N == 0, marks_N, total_N))
            if len(parts) == 1 and any(ctx.needs_input_grad):
                ctx.probabilities = powers_NV.div_(sum_N[:, None])
        columns = map(torch.cat, zip(*rows, strict=True))
        logprobs_N, entropy_N, top1_N, marks_N, normaliser_N = columns
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, normaliser_N, entropy_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(top1_N, marks_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, top1_N, marks_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, target_N, normaliser_N, entropy_N = ctx.saved_tensors
        probabilities, ctx.probabilities = ctx.probabilities, None
        of_logprobs_N, of_entropy_N = gradients[:2]
        if of_logprobs_N is None:
            of_logprobs_N = torch.zeros_like(normaliser_N)
        scaled_N = of_logprobs_N / ctx.temperature
        weight = weight_VD.to(hidden_ND.dtype)
        # the sums over many tokens are float32 at least
        wide, needed = torch.promote_types(weight_VD.dtype, torch.float32), ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden_ND) if needed[0] else None
        d_weight = torch.zeros_like(weight_VD, dtype=wide) if needed[1] else None
        d_bias = weight_VD.new_zeros(len(weight_VD), dtype=wide) if needed[2] else None
        product = _product_of(weight_VD)
        for part in _parts(hidden_ND, weight_VD):
            d_logits = probabilities
            if probabilities is None:
                d_logits = _logits(hidden_ND[part], weight, bias_V, ctx.temperature)
                d_logits.sub_(normaliser_N[part, None]).exp_()
            d_entropy = None
            if of_entropy_N is not None:  # dH / dlogit is -p (log p + H)
                slope_N = -of_entropy_N[part] / ctx.temperature
                d_entropy = torch.special.xlogy(d_logits, d_logits)
                d_entropy.addcmul_(d_logits, entropy_N[part, None]).mul_(slope_N[:, None])
            d_logits.mul_(-scaled_N[part, None])
            d_logits.scatter_add_(-1, target_N[part, None], scaled_N[part, None])
            if d_entropy is not None:
                d_logits += d_entropy
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden_ND.dtype)
            if d_hidden is not None:
                d_hidden[part] = product(d_logits, weight)
            if d_weight is None:
                continue
            if product is torch.matmul and d_weight.dtype == hidden_ND.dtype:
                d_weight.addmm_(d_logits.T, hidden_ND[part])
            else:
                d_weight += product(d_logits.T, hidden_ND[part])
        d_weight = None if d_weight is None else d_weight.to(weight_VD.dtype)
        d_bias = None if d_bias is None or bias_V is None else d_bias.to(bias_V.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _parts(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    step = max(1, _CHUNK.get(hidden_ND.device.type, 2**24) // len(weight_VD))
    return [slice(n, n + step) for n in range(0, max(1, len(hidden_ND)), step)]


def _logits(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float
) -> Tensor:
    """Returns a new tensor, which the caller may overwrite."""
    logits_NV = _product_of(weight_VD)(hidden_ND, weight_VD.T)
    if bias_V is not None:
        logits_NV += bias_V
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1 else logits_NV.div_(temperature)


def _product_of(weight_VD: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    large = weight_VD.numel() >= _LARGE and weight_VD.device.type == "cpu"
    if not large or not weight_VD.is_contiguous():
        return torch.matmul
    from gspo_env.model.products import matmul

    return matmul


def is_linear(module: Any) -> bool:
    """Returns whether a module is a linear layer that nothing wraps or changes."""
    return type(module) is nn.Linear or type(module).__name__ == "WideLinear"


def usable_ids(model: Any) -> int:
    """Returns how many of the first ids of a model have a probability; the others never occur."""
    config = model.config.get_text_config()
    return int(getattr(config, "usable_vocab_size", config.vocab_size))


def mark_ids(model: Any) -> list[int]:
    """Returns the ids that `match_tokenizer` finds to be control tokens or to begin a mark."""
    return getattr(model.config.get_text_config(), "mark_ids", [])


def body_of(model: Any) -> Callable[..., Any] | None:
    """Returns the part of a causal LM that computes hidden states; None if it has no such part."""
    plain = plain_model(model)
    bodies = (getattr(model, BODY, None), plain.base_model, getattr(plain, "model", None))
    return next((body for body in bodies if body is not None and body is not plain), None)


def linear_head(model: Any, packed: bool) -> nn.Linear | None:
    """Returns the output head if the logits are that linear layer of the body's states, no more.

    A model may cap or scale its logits or the states, and an adapter may wrap the head or add
    tokens. The test is one pass of the model, in which large states replace those that reach the
    head, because a cap would change their logits, and one of the body.

    Args:
        model: The causal LM.
        packed: Whether it has ragged attention.
    """
    head, body = model.get_output_embeddings(), body_of(model)
    if body is None or not is_linear(head):
        return None
    ids = torch.zeros(1, 2, dtype=torch.long, device=head.weight.device)
    attention = {"ragged": PackedAttention([2], ids.device)} if packed else {}
    inputs = {"input_ids": ids, "use_cache": False, **attention}
    with torch.no_grad():
        with _LargeStates(head) as tail:
            logits = model(**inputs).logits
        if len(tail.seen) != 1 or not torch.equal(tail.seen[0][1], logits):
            return None
        states = body(**inputs).last_hidden_state
    same = states.shape == tail.seen[0][0].shape and torch.allclose(states, tail.seen[0][0], 0.01)
    return head if same else None


class _LargeStates(TorchFunctionMode):
    """Gives an output head large states; nothing outside of this thread sees it.

    Attributes:
        seen: The states in whose place they were, and their logits.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = head
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces the factor of the head's weight."""
        product = func is nn.functional.linear and len(args) > 1
        if not product or args[1] is not self._head.weight:
            return func(*args, **(kwargs or {}))
        states, *rest = args
        large = torch.linspace(-1e3, 1e3, states.numel(), dtype=states.dtype, device=states.device)
        logits = func(large.view_as(states), *rest, **(kwargs or {}))
        self.seen.append((states, logits))
        return logits


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


def match_tokenizer(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Limits a model to the ids of its tokenizer; returns all that end an action.

    Many models have more ids than their tokenizer. They are then in no distribution, neither of the
    engine nor of the trainer: see `usable_ids`. The ids that end an action are
    those of the generation config and of the config. One id alone counts only if it is an added
    token, since it may be the default of the model's class.

    Raises:
        ModelError: A token has no embedding.
    """
    size = model.get_input_embeddings().num_embeddings
    vocabulary = set(tokenizer.get_vocab().values())
    special = set(tokenizer.all_special_tokens)  # which may be unused, such as one for padding
    if beyond := {t for t, i in tokenizer.get_vocab().items() if i >= size} - special:
        raise ModelError(f"the tokenizer has {min(beyond)!r}, for which the model has no embedding")
    config, highest = model.config.get_text_config(), max(vocabulary)
    config.mark_ids = [i for i in first_ids(tokenizer) if i < size]
    if highest + 1 < size:
        config.usable_vocab_size = highest + 1
    if unused := sorted(set(range(min(highest, size))) - vocabulary):
        from gspo_env.model.unused import hide

        hide(model, unused)
    if highest + 1 < size or unused:
        logger.info(
            "The model has %d ids and its tokenizer %d: the others are never sampled.",
            size,
            len(vocabulary),
        )
    settings = [getattr(model, "generation_config", None), config]
    ends: set[int] = set()
    for ids in (getattr(each, "eos_token_id", None) for each in settings):
        one = [ids] if isinstance(ids, int) and ids in tokenizer.added_tokens_decoder else []
        several = ids if isinstance(ids, (list, tuple)) else one
        ends.update(i for i in several if isinstance(i, int))
    return tuple(sorted(ends & vocabulary))
