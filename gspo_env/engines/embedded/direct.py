"""The forward pass of a Llama-like model in float32 on a CPU, without its modules.

A model of less than a million parameters spends much of its time between its matrix products: in
the calls of its modules, and in tensors for each operation of a norm or an activation. The products
of PyTorch are those of MKL, which uses half of the vector width of some processors with AVX-512.
There, each product is one call of oneDNN with the activation, the product or the sum behind it.
Elsewhere it is one of MKL, because a call of oneDNN takes longer than a product of few rows. The
weights are the model's own; nothing is copied. `fast_forward` compares it with the model before it
is used.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from gspo_env.engines.embedded.kv_cache import KVCache, Step

logger = logging.getLogger(__name__)

_PLAIN = {f"transformers.models.{m}.modeling_{m}" for m in ("llama", "qwen2", "qwen3")}
"""Modules of the models that the pass is written for."""
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles follow from the position alone."""
_BOUND = 1e-4
"""Largest difference of a log-probability, in nats, from the model's own pass."""
_MANY = 128
"""Rows from which a number of rows is rounded up by an eighth at most."""


class Direct:
    """Runs the forward pass; see `fits` for the models that it can run.

    Args:
        model: The model.
        fused: Whether products are those of oneDNN; by default where the processor has AVX-512.
    """

    def __init__(self, model: Any, *, fused: bool | None = None) -> None:
        wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        self._products: _Products = _Fused() if (wide if fused is None else fused) else _Apart()
        self._model = model
        self._body = model.model
        config = model.config
        self._eps = float(config.rms_norm_eps)
        self._size = int(self._body.layers[0].self_attn.head_dim)
        self._hooks = _hooks(model)
        self._angles = torch.empty(0, 2, self._size)

    @staticmethod
    def fits(model: Any) -> bool:
        """Returns whether this is a plain float32 model on a CPU."""
        kind = type(model)
        if kind.__module__ not in _PLAIN or not kind.__name__.endswith("ForCausalLM"):
            return False
        if any(p.dtype is not torch.float32 or p.device.type != "cpu" for p in model.parameters()):
            return False
        if any(type(p) is not nn.Parameter for p in model.parameters()):
            return False  # a shard, or a quantised weight
        if any("forward" in vars(m) or getattr(m, "is_quantized", False) for m in model.modules()):
            return False  # somebody has replaced the pass of a module
        names = ("_proj", "lm_head")
        linear = (m for name, m in model.named_modules() if name.endswith(names))
        if not all(type(m) is nn.Linear for m in linear):
            return False
        if type(model.model.embed_tokens) is not nn.Embedding:
            return False
        rope = getattr(model.model.rotary_emb, "rope_type", None)
        return model.config.hidden_act == "silu" and rope in _STATIC_ROPE

    @property
    def usable(self) -> bool:
        """Whether the model's modules have no hooks, which this pass would not call."""
        return not any(self._hooks)

    def __call__(self, step: Step) -> Tensor:
        """See `gspo_env.engines.embedded.kv_cache.Forward`.

        In the last layer, the tokens that predict nothing have keys and values only.
        """
        count, products, padded = len(step.ids_T), self._products, self._products.padded
        h = embedding(padded(step.ids_T), self._body.embed_tokens.weight)
        angles = query_angles = self._angles_of(step.positions_T)
        attend, layers = step.attend, self._body.layers
        # an attribute of a module takes several times as long as an item of its dictionary
        for number, layer in enumerate(layers):
            parts = layer._modules
            attention, x = parts["self_attn"], self._norm(parts["input_layernorm"], h)
            k = self._heads(attention, "k", x, count, angles)
            v = self._heads(attention, "v", x, count, None)
            if number == len(layers) - 1 and len(step.last_B) < count:
                x, h = (padded(tensor.index_select(0, step.last_B)) for tensor in (x, h))
                query_angles = angles.index_select(0, step.last_B)
                attend, count = step.attend_last, len(step.last_B)
            q = self._heads(attention, "q", x, count, query_angles)
            window = getattr(attention, "sliding_window", None)
            heads = attend(number, q, k, v, attention.scaling, window)
            h = products.plus(attention._modules["o_proj"], padded(heads.flatten(1)), h)
            mlp, x = parts["mlp"]._modules, self._norm(parts["post_attention_layernorm"], h)
            h = products.plus(mlp["down_proj"], products.gated(mlp, x), h)
        return products.plain(self._model.lm_head, self._norm(self._body.norm, h))[:count]

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], module._parameters["weight"], self._eps)

    def _heads(
        self, attention: Any, name: str, x: Tensor, count: int, angles: Tensor | None
    ) -> Tensor:
        """Returns queries, keys or values (T, H, D), normed and rotated as the model does."""
        modules = attention._modules
        out = self._products.plain(modules[f"{name}_proj"], x)[:count]
        out = out.view(count, -1, self._size)
        if angles is None:
            return out
        norm = modules.get(f"{name}_norm")
        if norm is not None:
            out = self._norm(norm, out)
        cos, sin = angles[:, 0, None], angles[:, 1, None]
        return torch.addcmul(out * cos, out.roll(self._size // 2, -1), sin)

    def _angles_of(self, positions_T: Tensor) -> Tensor:
        """Returns cosines and signed sines, (T, 2, D)."""
        longest = int(positions_T.max()) + 1
        if len(self._angles) < longest:
            places = torch.arange(2 * longest)[None]
            cos, sin = self._body.rotary_emb(torch.empty(0), places)
            sin = sin[0] * torch.ones(self._size).index_fill_(
                0, torch.arange(self._size // 2), -1.0
            )
            self._angles = torch.stack([cos[0], sin], 1)
        return self._angles.index_select(0, positions_T)


class _Products(Protocol):
    """The products of a pass; a linear module has a weight and perhaps a bias."""

    def padded(self, rows: Tensor) -> Tensor:
        """Returns the rows, perhaps with zeros behind them."""

    def plain(self, module: Any, x: Tensor) -> Tensor:
        """Returns the output of a linear module."""

    def plus(self, module: Any, x: Tensor, other: Tensor) -> Tensor:
        """Returns the sum of the output and another tensor."""

    def gated(self, mlp: Any, x: Tensor) -> Tensor:
        """Returns the activated output of `gate_proj`, multiplied with that of `up_proj`."""


class _Apart:
    """Products of MKL, with each activation and sum in an operation of its own."""

    def padded(self, rows: Tensor) -> Tensor:
        """See `_Products`."""
        return rows

    def plain(self, module: Any, x: Tensor) -> Tensor:
        """See `_Products`."""
        return linear(x, *_weights(module))

    def plus(self, module: Any, x: Tensor, other: Tensor) -> Tensor:
        """See `_Products`."""
        weight, bias = _weights(module)
        if bias is None:
            return torch.addmm(other, x, weight.t())
        return linear(x, weight, bias).add_(other)

    def gated(self, mlp: Any, x: Tensor) -> Tensor:
        """See `_Products`."""
        gate = silu(self.plain(mlp["gate_proj"], x), inplace=True)
        return gate.mul_(self.plain(mlp["up_proj"], x))


class _Fused:
    """Products of oneDNN with what is behind them."""

    def __init__(self) -> None:
        self._linear: Any = torch.ops.mkldnn._linear_pointwise.default
        self._linear_binary: Any = torch.ops.mkldnn._linear_pointwise.binary

    def padded(self, rows: Tensor) -> Tensor:
        """See `_Products`: oneDNN compiles a kernel for each number of rows, so they are few."""
        padding = rounded(len(rows)) - len(rows)
        if not padding:
            return rows
        return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])

    def plain(self, module: Any, x: Tensor) -> Tensor:
        """See `_Products`."""
        out: Tensor = self._linear(x, *_weights(module), "none", [], "")
        return out

    def plus(self, module: Any, x: Tensor, other: Tensor) -> Tensor:
        """See `_Products`."""
        out: Tensor = self._linear_binary(x, other, *_weights(module), "add")
        return out

    def gated(self, mlp: Any, x: Tensor) -> Tensor:
        """See `_Products`."""
        gate = self._linear(x, *_weights(mlp["gate_proj"]), "swish", [1.0], "")
        out: Tensor = self._linear_binary(x, gate, *_weights(mlp["up_proj"]), "mul")
        return out


def _weights(module: Any) -> tuple[Tensor, Tensor | None]:
    own = module._parameters
    return own["weight"], own["bias"]


def fast_forward(model: Any) -> Direct | None:
    """Returns the direct pass of a model with ragged attention, if it gives the model's numbers.

    Two random sequences are fed to both, their prompts first.
    """
    if not Direct.fits(model):
        return None
    try:
        direct = Direct(model)
        difference = _difference(model, direct)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, TypeError) as error:  # another version of a library
        logger.warning("the model runs with its own modules: the direct pass fails with %s", error)
        return None
    if not difference <= _BOUND:
        logger.warning(
            "the model runs with its own modules: the direct pass changes log-probabilities by "
            "%.2g, expected at most %g",
            *(difference, _BOUND),
        )
        return None
    return direct


def _difference(model: Any, direct: Direct) -> float:
    rng = np.random.default_rng(0)
    caches = [KVCache(model, 2, 24) for _ in range(2)]
    worst = 0.0
    for starts, sizes in (((0, 0), (15, 9)), ((15, 9), (1, 5)), ((16, 14), (1, 1))):
        feeds = [rng.integers(0, model.config.vocab_size, size).tolist() for size in sizes]
        own = caches[0].forward(model, [0, 1], list(starts), feeds)
        other = caches[1].forward(model, [0, 1], list(starts), feeds, direct)
        gap = float((own.log_softmax(-1) - other.log_softmax(-1)).abs().max())
        worst = gap if not gap <= worst else worst
    return worst


def rounded(count: int) -> int:
    """Returns a number of rows that is not smaller, of which there are few.

    Below 128 these are the multiples of 16; above, there are eight between a power of two and the
    next.
    """
    step = 16 if count <= _MANY else 1 << (int(count - 1).bit_length() - 4)
    return -(-count // step) * step


def _hooks(model: Any) -> list[Any]:
    names = ("_forward_hooks", "_forward_pre_hooks")
    return [getattr(module, name) for module in model.modules() for name in names]
