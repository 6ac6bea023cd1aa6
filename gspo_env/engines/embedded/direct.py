"""The forward pass of a Llama-like model on a CPU, without its modules.

A model of less than a million parameters spends much of its time between its matrix products: in
the calls of its modules, and in tensors for each operation of a norm or an activation. The products
of PyTorch are those of MKL, which uses half of the vector width of some processors with AVX-512.
There, each product is one call of oneDNN, in float32 with the activation, product or sum that
follows it. In bfloat16, those are operations of their own, which round as the model's modules do,
so that engine and trainer agree. Products in float32 read the model's own weights. Those in
bfloat16 read copies in the order of the kernels, which oneDNN otherwise makes for each product of a
few rows. Where the processor has no instructions for bfloat16, they read copies in float32. What a
machine has decides each of these choices, never a measurement: a resumed run gets the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

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

_PLAIN = {f"transformers.models.{m}.modeling_{m}" for m in ("llama", "qwen2", "qwen3")}
"""Modules of the models that the pass is written for."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles follow from the position alone."""
_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.3}
"""Largest difference of a log-probability, in nats, from the model's own pass; the mean over ids in
bfloat16, where another order of sums rounds single ids by more."""
_MANY = 128
"""Rows from which a number of rows is rounded up by an eighth at most."""


class DirectForward:
    """Runs the forward pass; see `fits` for the models that it can run.

    Args:
        model: The model.
        fused: Whether products are those of oneDNN; by default where the processor has AVX-512.
        dtype: That of the arithmetic, float32 or the model's own, which is the default.
    """

    def __init__(
        self, model: Any, *, fused: bool | None = None, dtype: torch.dtype | None = None
    ) -> None:
        fused = _has_avx512() if fused is None else fused
        self.dtype = dtype or model.dtype
        convert: Callable[[Tensor], Tensor] | None = None
        if self.dtype is not model.dtype:
            convert = Tensor.float
        elif fused and packs(model):
            convert = _packed
        self._weights = _Weights(convert)
        # one row of bfloat16 has another order of sums than several
        least = 16 if is_small(model) else 1 if self.dtype is torch.float32 else 2
        self._products = _Fused(self._weights, least) if fused else _Products(self._weights)
        self._exact = self.dtype is torch.float32
        self._model, self._body = model, model.model
        self._eps = float(model.config.rms_norm_eps)
        self._size = int(self._body.layers[0].self_attn.head_dim)
        names = ("_forward_hooks", "_forward_pre_hooks")
        self._hooks = [getattr(module, name) for module in model.modules() for name in names]
        self._angles = torch.empty(0, 2, self._size)

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
    def usable(self) -> bool:
        """Whether the model's modules have no hooks, which this pass would not call."""
        return not any(self._hooks)

    def forget(self) -> None:
        """Drops copies of weights, which have changed."""
        self._weights.forget()

    def __call__(self, ids_T: Tensor, positions_T: Tensor, last_B: Tensor, step: Ragged) -> Tensor:
        """Returns the logits of the last token of each row, (B, V).

        Args:
            ids_T: (T,) the fed ids of all rows.
            positions_T: (T,) their positions.
            last_B: (B,) index of the last token of each row.
            step: The attention over the cache.
        """
        count, products = len(ids_T), self._products
        h = embedding(products.padded(ids_T), self._body.embed_tokens.weight).to(self.dtype)
        angles, last = self._angles_of(positions_T), len(self._body.layers) - 1
        # an attribute of a module takes several times as long as an item of its dictionary
        for number, layer in enumerate(self._body.layers):
            parts = layer._modules
            attention, x = parts["self_attn"], self._norm(parts["input_layernorm"], h)
            q, k, v = (self._heads(attention, name, x, count, angles) for name in "qkv")
            window = getattr(attention, "sliding_window", None)
            heads = step.attend(number, q, k, v, attention.scaling, window)
            if number == last and len(last_B) < count:  # the others have keys and values only
                heads, h = heads.index_select(0, last_B), products.padded(h.index_select(0, last_B))
            projection = attention._modules["o_proj"]
            h = products.add(projection, products.padded(heads.flatten(1)), h)
            mlp, x = parts["mlp"]._modules, self._norm(parts["post_attention_layernorm"], h)
            h = products.add(mlp["down_proj"], products.gated(mlp, x), h)
        return products.plain(self._model.lm_head, self._norm(self._body.norm, h))[: len(last_B)]

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        weight = self._weights.of(module)[0]
        if self._exact:
            return rms_norm(x, x.shape[-1:], weight, self._eps)
        return rms_norm(x, x.shape[-1:], None, self._eps).mul_(weight)

    def _heads(self, attention: Any, name: str, x: Tensor, count: int, angles_T: Tensor) -> Tensor:
        """Returns queries, keys or values, (T, H, D); the first two normed and rotated."""
        modules = attention._modules
        out = self._products.plain(modules[f"{name}_proj"], x)[:count]
        out = out.view(count, -1, self._size)
        if name == "v":
            return out
        norm = modules.get(f"{name}_norm")
        if norm is not None:
            out = self._norm(norm, out)
        cos, sin = angles_T[:, 0, None], angles_T[:, 1, None]
        rotated = out.roll(self._size // 2, -1)
        if self._exact:
            return torch.addcmul(out * cos, rotated, sin)
        return (out * cos).add_(rotated.mul_(sin))

    def _angles_of(self, positions_T: Tensor) -> Tensor:
        """Returns cosines and signed sines, (T, 2, D)."""
        longest = int(positions_T.max()) + 1
        if len(self._angles) < longest:
            cos, sin = self._body.rotary_emb(torch.empty(0), torch.arange(2 * longest)[None])
            sin = sin[0].clone()
            sin[:, : self._size // 2].neg_()
            self._angles = torch.stack([cos[0], sin], 1).to(self.dtype)
        return self._angles.index_select(0, positions_T)


class _Weights:
    """The model's weights, or copies of them.

    Args:
        convert: Makes the copies; None for the weights themselves.
    """

    def __init__(self, convert: Callable[[Tensor], Tensor] | None) -> None:
        self._convert = convert
        self._copies: dict[int, tuple[int, Tensor]] = {}

    def of(self, module: Any) -> tuple[Tensor, Tensor | None]:
        """Returns the weight and the bias of a linear module or a norm."""
        parameters = module._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        if self._convert is None:
            return weight, bias
        return self._copy(weight), None if bias is None else self._copy(bias)

    def _copy(self, weight: Tensor) -> Tensor:
        version, copied = self._copies.get(id(weight), (-1, weight))
        if version != weight._version:
            copied = self._convert(weight.detach())  # type: ignore[misc]
            self._copies[id(weight)] = weight._version, copied
        return copied

    def forget(self) -> None:
        """Drops the copies."""
        self._copies.clear()


def packs(model: Any) -> bool:
    """Returns whether the pass of a model has a copy of the weights in the order of oneDNN.

    With up to 32 sequences, products with it take two thirds of the time.
    """
    pays = not is_small(model) or model.dtype is not torch.float32
    return _has_avx512() and pays and DirectForward.fits(model) and _fits_twice(model)


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _packed(weight: Tensor) -> Tensor:
    """Returns a matrix in the order of oneDNN's kernels; a vector as it is."""
    if weight.dim() == 1:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _fits_twice(model: Any) -> bool:
    """Returns whether the weights and copies of twice their size leave a quarter of the memory."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return bool(4 * size < psutil.virtual_memory().total)


class _Products:
    """Products of PyTorch, with each activation and sum in an operation of its own."""

    def __init__(self, weights: _Weights) -> None:
        self._of = weights.of

    def padded(self, rows: Tensor) -> Tensor:
        """Returns the rows, perhaps with zeros behind them."""
        return rows

    def plain(self, module: Any, x: Tensor) -> Tensor:
        """Returns the output of a linear module."""
        return linear(x, *self._of(module))

    def add(self, module: Any, x: Tensor, other: Tensor) -> Tensor:
        """Returns the sum of the output and another tensor."""
        weight, bias = self._of(module)
        if bias is None and x.dtype is torch.float32:
            return torch.addmm(other, x, weight.t())
        return self.plain(module, x).add_(other)

    def gated(self, mlp: Any, x: Tensor) -> Tensor:
        """Returns the activated output of `gate_proj`, multiplied with that of `up_proj`."""
        gate = silu(self.plain(mlp["gate_proj"], x), inplace=True)
        return gate.mul_(self.plain(mlp["up_proj"], x))


class _Fused(_Products):
    """Products of oneDNN together with what follows them."""

    def __init__(self, weights: _Weights, least: int) -> None:
        super().__init__(weights)
        self._least = least
        self._linear: Any = torch.ops.mkldnn._linear_pointwise.default
        self._binary: Any = torch.ops.mkldnn._linear_pointwise.binary

    def padded(self, rows: Tensor) -> Tensor:
        # oneDNN compiles a kernel for each number of rows, so they are few
        padding = rounded(len(rows), self._least) - len(rows)
        if not padding:
            return rows
        return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])

    def plain(self, module: Any, x: Tensor) -> Tensor:
        out: Tensor = self._linear(x, *self._of(module), "none", [], "")
        return out

    def add(self, module: Any, x: Tensor, other: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return super().add(module, x, other)
        out: Tensor = self._binary(x, other, *self._of(module), "add")
        return out

    def gated(self, mlp: Any, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return super().gated(mlp, x)
        gate = self._linear(x, *self._of(mlp["gate_proj"]), "swish", [1.0], "")
        out: Tensor = self._binary(x, gate, *self._of(mlp["up_proj"]), "mul")
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


def rounded(count: int, least: int = 16) -> int:
    """Returns a number of rows that is not smaller, of which there are few.

    Up to 16 these are the powers of two from `least`, up to 128 the multiples of 16; above, there
    are eight between a power of two and the next.
    """
    if count <= 16:
        return max(least, 1 << (count - 1).bit_length())
    step = 16 if count <= _MANY else 1 << (int(count - 1).bit_length() - 4)
    return -(-count // step) * step
