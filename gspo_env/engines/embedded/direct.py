"""The forward pass of a Llama-like model on a CPU, without its modules.

A model of less than a million parameters spends much of its time between its matrix products: in
the calls of its modules, and in tensors for each operation of a norm or an activation. The products
of PyTorch are those of MKL, which uses half of the vector width of some processors with AVX-512.
There, each product is one call of oneDNN, in float32 with the activation, product or sum that
follows it. In bfloat16, those are operations of their own, which round as the model's modules do,
so that engine and trainer agree. With a C compiler, what is between the products is compiled. If
the memory allows it, products read copies in the order of the kernels, which oneDNN otherwise makes
for each product of a few rows, and queries, keys and values are one product. Where the processor
has no instructions for bfloat16, they read copies in float32. What a machine has decides each of
these choices, never a measurement: a resumed run gets the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from gspo_env.engines.embedded.kv_cache import KVCache
from gspo_env.errors import above
from gspo_env.model.attention import Ragged
from gspo_env.model.check import noted_check
from gspo_env.model.head import is_linear
from gspo_env.model.threads import is_small

logger = logging.getLogger(__name__)

Linear = tuple[Tensor, Tensor | None]
"""The weight and the bias of a linear layer."""

_PLAIN = {f"transformers.models.{m}.modeling_{m}" for m in ("llama", "qwen2", "qwen3")}
"""Modules of the models that the pass is written for."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles follow from the position alone."""
_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""Largest difference of a log-probability, in nats, from the model's own pass; the mean over ids in
bfloat16, where another order of sums rounds single ids by more."""
_MANY = 128
"""Rows from which a small model's number of rows is rounded up by an eighth at most."""


class _Layer(NamedTuple):
    """What a layer computes with: weights, with a bias for products, or copies of them."""

    attention: Any
    """The module, for its settings."""
    input_norm: Tensor
    qkv: list[Linear]
    """One product for all heads, or three."""
    head_norm: Tensor | None
    """(H + Hkv, D) the weights of the norms of queries and keys."""
    out: Linear
    output_norm: Tensor
    gate_up: list[Linear]
    down: Linear


class DirectForward:
    """Runs the forward pass; see `fits` for the models that it can run.

    Args:
        model: The model.
        fused: Whether products are those of oneDNN; by default where the processor has AVX-512.
        dtype: That of the arithmetic, float32 or the model's own, which is the default.
        compiled: Whether a compiler of the machine makes the operations between products; by
            default with products of oneDNN, for a model that is not small.
    """

    def __init__(
        self,
        model: Any,
        *,
        fused: bool | None = None,
        dtype: torch.dtype | None = None,
        compiled: bool | None = None,
    ) -> None:
        fused = has_avx512() if fused is None else fused
        self.dtype = dtype or model.dtype
        # one row of bfloat16 has another order of sums than several
        least = 1 if self.dtype is torch.float32 else 2
        sizes = (16, _MANY) if is_small(model) else (least, None)
        self._products = Fused(*sizes) if fused else _Products()
        if compiled or (compiled is None and fused and not is_small(model)):
            from gspo_env.engines.embedded.compiled import start_compiled

            self._products = start_compiled(model.config, *sizes) or self._products
        self._exact = self.dtype is torch.float32
        packed = fused and self.dtype is model.dtype and packs(model)
        self._convert: Callable[[Tensor], Tensor] = _packed if packed else self._converted
        self._joins = packed or is_small(model) or self.dtype is not model.dtype
        self._model, self._body = model, model.model
        self._eps = float(model.config.rms_norm_eps)
        attention = self._body.layers[0].self_attn
        self._size = int(attention.head_dim)
        self._queries, self._keys = (
            getattr(attention, name).out_features // self._size for name in ("q_proj", "k_proj")
        )
        names = ("_forward_hooks", "_forward_pre_hooks")
        self._hooks = [getattr(module, name) for module in model.modules() for name in names]
        self._angles = torch.empty(0, 2, self._size)
        self.forget()

    @staticmethod
    def fits(model: Any) -> bool:
        """Returns whether this is a plain model on a CPU, in float32 or bfloat16."""
        kind = type(model)
        if kind.__module__ not in _PLAIN or not kind.__name__.endswith("ForCausalLM"):
            return False
        if model.dtype not in _BOUND:
            return False
        for parameter in model.parameters():
            # a shard and a quantised weight have other types
            if type(parameter) is not nn.Parameter or parameter.dtype is not model.dtype:
                return False
        if next(model.parameters()).device.type != "cpu":
            return False
        for name, module in model.named_modules():
            product = name.endswith(("_proj", "lm_head"))
            replaced = "forward" in vars(module) or getattr(module, "is_quantized", False)
            if replaced or (product and not is_linear(module)):
                return False
        rope = getattr(model.model.rotary_emb, "rope_type", None)
        plain_embedding = type(model.model.embed_tokens) is nn.Embedding
        return plain_embedding and model.config.hidden_act == "silu" and rope in STATIC_ROPE

    @property
    def rows(self) -> Any:
        """What makes the decoding rows of a step; None leaves them to PyTorch."""
        return self._products.rows

    @property
    def usable(self) -> bool:
        """Whether the model's modules have no hooks, which this pass would not call."""
        return not any(self._hooks)

    def forget(self) -> None:
        """Drops copies of weights, which have changed."""
        self._parameters = list(self._model.parameters())
        self._versions: list[tuple[int, int]] = []
        self._layers: list[_Layer] = []

    def __call__(self, ids_T: Tensor, positions_T: Tensor, last_B: Tensor, step: Ragged) -> Tensor:
        """Returns the logits of the last token of each row, (B, V).

        Args:
            ids_T: (T,) the fed ids of all rows.
            positions_T: (T,) their positions.
            last_B: (B,) index of the last token of each row.
            step: The attention over the cache.
        """
        versions = [(p.data_ptr(), p._version) for p in self._parameters]
        if versions != self._versions:
            self._layers = []  # before there are two copies
            self._layers = [self._layer(layer) for layer in self._body.layers]
            self._head, self._versions = self._linear(self._model.lm_head), versions
        count, products, last = len(ids_T), self._products, len(self._layers) - 1
        h = embedding(products.padded(ids_T), self._body.embed_tokens.weight).to(self.dtype)
        angles = self._angles_of(positions_T)[:, :, None].unbind(1)
        for number, layer in enumerate(self._layers):
            q, k, v = self._heads(layer, self._norm(h, layer.input_norm), count, angles)
            window = getattr(layer.attention, "sliding_window", None)
            heads = step.attend(number, q, k, v, layer.attention.scaling, window)
            if number == last and len(last_B) < count:  # the others have keys and values only
                heads, h = heads.index_select(0, last_B), products.padded(h.index_select(0, last_B))
            h = products.add(layer.out, products.padded(heads.flatten(1)), h)
            x = self._norm(h, layer.output_norm)
            h = products.add(layer.down, products.gated(layer.gate_up, x), h)
        x = self._norm(h, self._body.norm.weight.to(self.dtype))
        return products.plain(self._head, x)[: len(last_B)]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._products.norm(x, weight, self._eps)

    def _heads(
        self, layer: _Layer, x: Tensor, count: int, angles: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Returns queries, keys and values, (T, H, D); the first two normed and rotated."""
        products = [self._products.plain(linear, x)[:count] for linear in layer.qkv]
        out = products[0] if len(products) == 1 else torch.cat(products, 1)
        out, sizes = out.view(count, -1, self._size), [self._queries, self._keys]
        turned = self._products.rotated(out, sum(sizes), layer.head_norm, angles, self._eps)
        return *torch.split(turned, sizes, 1), out[:, -self._keys :]

    def _angles_of(self, positions_T: Tensor) -> Tensor:
        """Returns cosines and signed sines, (T, 2, D)."""
        longest = int(positions_T.max()) + 1
        if len(self._angles) < longest:
            cos, sin = self._body.rotary_emb(torch.empty(0), torch.arange(2 * longest)[None])
            sin = sin[0].clone()
            sin[:, : self._size // 2].neg_()
            self._angles = torch.stack([cos[0], sin], 1).to(self.dtype)
        return self._angles.index_select(0, positions_T)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp, head_norm = layer.self_attn, layer.mlp, None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm] * self._queries + [attention.k_norm] * self._keys
            head_norm = self._converted(torch.stack([norm.weight for norm in norms]))
        gate_up = mlp.gate_proj, mlp.up_proj
        # in float32, oneDNN computes the activation with the first and multiplies with the second
        separate = self._exact and isinstance(self._products, Fused)
        return _Layer(
            attention,
            self._converted(layer.input_layernorm.weight),
            self._joined(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm,
            self._linear(attention.o_proj),
            self._converted(layer.post_attention_layernorm.weight),
            [*map(self._linear, gate_up)] if separate else self._joined(*gate_up),
            self._linear(mlp.down_proj),
        )

    def _joined(self, *modules: Any) -> list[Linear]:
        """Returns linear modules as one, if weights are copied, else each."""
        if not self._joins:
            return [*map(self._linear, modules)]
        weight = torch.cat([module.weight for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        return [(self._convert(weight), self._converted(torch.cat(biases)) if biases else None)]

    def _linear(self, module: Any) -> Linear:
        bias = module.bias
        return self._convert(module.weight), None if bias is None else self._converted(bias)

    def _converted(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.dtype)


def packs(model: Any) -> bool:
    """Returns whether the pass of a model has a copy of the weights in the order of oneDNN.

    With up to 32 sequences, products with it take two thirds of the time.
    """
    pays = not is_small(model) or model.dtype is not torch.float32
    return has_avx512() and pays and DirectForward.fits(model) and _fits_twice(model)


def has_avx512() -> bool:
    """Returns whether PyTorch uses the instructions of AVX-512 on this processor."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _packed(weight: Tensor) -> Tensor:
    """Returns a matrix in the order of oneDNN's kernels."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def _fits_twice(model: Any) -> bool:
    """Returns whether the weights and copies of twice their size leave a quarter of the memory."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return bool(4 * size < psutil.virtual_memory().total)


class _Products:
    """Products of PyTorch, with each activation and sum in an operation of its own."""

    rows: Any = None
    """See `DirectForward.rows`."""

    def padded(self, rows: Tensor) -> Tensor:
        """Returns the rows, perhaps with zeros behind them."""
        return rows

    def plain(self, layer: Linear, x: Tensor) -> Tensor:
        """Returns the output of a linear layer."""
        return linear(x, *layer)

    def add(self, layer: Linear, x: Tensor, other: Tensor) -> Tensor:
        """Returns the sum of the output and another tensor."""
        weight, bias = layer
        if bias is None and x.dtype is torch.float32:
            return torch.addmm(other, x, weight.t())
        return self.plain(layer, x).add_(other)

    def gated(self, gate_up: list[Linear], x: Tensor) -> Tensor:
        """Returns the activated output of the first product, multiplied with the second."""
        outs = [self.plain(layer, x) for layer in gate_up]
        gate, up = outs if len(outs) == 2 else outs[0].chunk(2, -1)
        return silu(gate, inplace=True) * up

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMS norm over the last axis, with a weight of one axis or two."""
        if x.dtype is torch.float32 and weight.dim() == 1:
            return rms_norm(x, x.shape[-1:], weight, eps)
        return rms_norm(x, x.shape[-1:], None, eps).mul_(weight)

    def rotated(
        self, x: Tensor, heads: int, weight: Tensor | None, angles: tuple[Tensor, ...], eps: float
    ) -> Tensor:
        """Returns the first heads of x, (T, H, D), normed if there is a weight, and rotated.

        x may change. The angles are cosines and signed sines, (T, 1, D), parts of one tensor.
        """
        cos, sin = angles
        turned = x[:, :heads] if weight is None else self.norm(x[:, :heads], weight, eps)
        rotated = turned.roll(x.shape[2] // 2, -1)
        if x.dtype is torch.float32:
            return torch.addcmul(turned * cos, rotated, sin)
        return (turned * cos).add_(rotated.mul_(sin))


class Fused(_Products):
    """Products of oneDNN, in float32 together with what follows them.

    Args:
        least: See `rounded`.
        many: See `rounded`.
    """

    def __init__(self, least: int, many: int | None = None) -> None:
        self._sizes = least, many
        self._linear: Any = torch.ops.mkldnn._linear_pointwise.default
        self._binary: Any = torch.ops.mkldnn._linear_pointwise.binary

    def padded(self, rows: Tensor) -> Tensor:
        """See `_Products`."""
        # oneDNN compiles a kernel for each number of rows, so they are few
        padding = rounded(len(rows), *self._sizes) - len(rows)
        if not padding:
            return rows
        return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])

    def plain(self, layer: Linear, x: Tensor) -> Tensor:
        """See `_Products`."""
        out: Tensor = self._linear(x, *layer, "none", [], "")
        return out

    def add(self, layer: Linear, x: Tensor, other: Tensor) -> Tensor:
        """See `_Products`."""
        if x.dtype is not torch.float32:
            return super().add(layer, x, other)
        out: Tensor = self._binary(x, other, *layer, "add")
        return out

    def gated(self, gate_up: list[Linear], x: Tensor) -> Tensor:
        """See `_Products`."""
        if x.dtype is not torch.float32:
            return super().gated(gate_up, x)
        gate, up = gate_up
        out: Tensor = self._binary(x, self._linear(x, *gate, "swish", [1.0], ""), *up, "mul")
        return out


def start_direct(model: Any) -> DirectForward | None:
    """Returns the direct pass of a model with ragged attention, if it gives the model's numbers.

    Two random sequences are fed to both, their prompts first.
    """
    if not DirectForward.fits(model):
        return None
    try:
        direct = DirectForward(model, dtype=_arithmetic(model))
        difference = _difference(model, direct)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, TypeError) as error:  # another version of a library
        logger.warning("the model runs with its own modules: the direct pass fails with %s", error)
        return None
    check = noted_check(model)
    bound = max(_BOUND[model.dtype], check.bound if check else 0.0)
    if not difference <= bound:
        logger.warning(
            "the model runs with its own modules: the direct pass changes log-probabilities by "
            "%s, expected at most %g",
            above(difference, bound),
            bound,
        )
        return None
    return direct


def _arithmetic(model: Any) -> torch.dtype:
    """Returns the dtype of the faster arithmetic on this processor."""
    dtype: torch.dtype = model.dtype
    if dtype is torch.float32 or torch.cpu._is_avx512_bf16_supported() or not _fits_twice(model):
        return dtype
    logger.info("the engine computes in float32: the processor has no instructions for bfloat16")
    return torch.float32


def _difference(model: Any, direct: DirectForward) -> float:
    rng = np.random.default_rng(0)
    caches = [KVCache(model, 2, 24) for _ in range(2)]
    gaps = []
    for starts, sizes in (([0, 0], [15, 9]), ([15, 9], [1, 5]), ([16, 14], [1, 1])):
        feeds = [rng.integers(0, model.config.vocab_size, size).tolist() for size in sizes]
        expected = caches[0].forward(model, [0, 1], starts, feeds)
        logits = caches[1].forward(model, [0, 1], starts, feeds, direct)
        gap = (expected.float().log_softmax(-1) - logits.float().log_softmax(-1)).abs()
        gaps.append(gap.max() if model.dtype is torch.float32 else gap.mean())
    return float(torch.stack(gaps).max())


def rounded(count: int, least: int, many: int | None) -> int:
    """Returns a number of rows that is not smaller, of which there are few.

    Up to 16 these are powers of two from `least`, above the multiples of 16; above `many`, there
    are only eight between a power of two and the next.
    """
    if count <= 16:
        return max(least, 1 << (count - 1).bit_length())
    few = many is not None and count > many
    step = 1 << (int(count - 1).bit_length() - 4) if few else 16
    return -(-count // step) * step
