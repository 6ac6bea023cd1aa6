"""Decides once how a model is run: packed with shared prefixes, packed, or one by one.

Two random sequences that begin alike are scored alone with the model's own attention, which is the
truth. Then they are scored packed, and packed with their common prefix once. The fastest mode that
gives the same log-probabilities is taken.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from gspo_env.batch.packing import pack
from gspo_env.batch.sample import Sample
from gspo_env.errors import ModelError
from gspo_env.model.attention import RAGGED, PackedAttention, use_ragged_attention
from gspo_env.model.head import plain_model, usable_ids
from gspo_env.model.scorer import Scorer

logger = logging.getLogger(__name__)

BOUND = 1e-4
"""Largest difference of log-probabilities, in nats, that counts as equal in float32, unless
rounding changes a part of it: a few tokens of some models are that sensitive."""
_LARGEST_BOUND = 0.01
"""The same for any model in float32; a wrong mask or position changes more."""
NOISE, _NOISE_32 = 8, 32
"""The bound is this many times what rounding changes; in half precision also, if that is more, what
a batch of both sequences changes with the model's own attention. In float32, products of oneDNN
have changed ten times what the disturbed outputs of layers do, with an adapter of SmolLM2."""
_SPREAD = 2
"""Rounding changes log-probabilities by the dtype's epsilon times this many standard deviations of
the logits, or by one epsilon if that is more."""
SHARED_TOKENS, LONG, SHORT = 20, 32, 26
"""Tokens of the common prefix (a tree shares 16 or more) and of the two sequences."""
_NOTE = "_gspo_check"


class RunMode(StrEnum):
    """How a model is run."""

    SHARED = "packed with shared prefixes"
    PACKED = "packed without sharing"
    UNPACKED = "one sequence a row with the model's own attention and cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How much one mode differs from the model's own attention on each sequence alone."""

    nats: float
    """Largest difference of a token's log-probability; infinite if the model cannot run so."""
    error: str = ""
    """Why it cannot."""

    def within(self, bound: float) -> bool:
        """Returns whether the mode counts as equal."""
        return self.nats <= bound

    def __str__(self) -> str:
        """Describes the difference in a few words."""
        if self.error:
            return f"fail with {self.error}"
        return f"change log-probabilities by {self.nats:.2g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCheck:
    """The mode in which a model is run, and what decided it."""

    mode: RunMode
    bound: float = BOUND
    """Largest difference in nats that counts as equal."""
    packed: Difference | None = None
    shared: Difference | None = None
    padded: bool = False
    """Whether sequences of similar length may run as one padded batch with the own attention."""
    reason: str = ""
    """Why no faster mode is taken; empty for the fastest."""
    attention: str = RAGGED
    """Name of the attention that the model gets."""
    limit: int | None = None
    """Tokens of a sequence beyond which packed rows would be wrong."""
    longest: int | None = None
    """Tokens of a sequence beyond which the model changes the positions of its first tokens."""


def check_model(model: Any, *, max_context: int | None = None) -> ModelCheck:
    """Decides how a model is run, sets its attention so, and notes the result for later calls.

    Args:
        model: A `transformers` causal LM, or one wrapped by PEFT.
        max_context: Maximum tokens of a sequence; None if it is unknown.

    Raises:
        ModelError: Even one sequence a row gives other log-probabilities than the model itself, or
            an earlier call prepared the model for shorter sequences.
    """
    check = noted_check(model)
    if check is None:
        check = ModelProbe(model).check(max_context)
        note_check(model, check)
    if check.limit is not None and check.limit < (max_context or 0):
        raise ModelError(
            f"{model_name(model)} was prepared for at most {check.limit} tokens a sequence, and "
            f"max_context is {max_context}; expected the largest max_context in the first call"
        )
    if model.config._attn_implementation != check.attention:
        model.set_attn_implementation(check.attention)
    return check


def noted_check(model: Any) -> ModelCheck | None:
    """Returns the result of an earlier call of `check_model`, if there was one."""
    return getattr(model, _NOTE, None)


def note_check(model: Any, check: ModelCheck) -> None:
    """Lets later calls of `check_model` take this result for the model."""
    setattr(model, _NOTE, check)
    if check.reason and check.mode is not RunMode.SHARED:
        logger.warning("%s runs %s: %s", model_name(model), check.mode, check.reason)


class ModelProbe:
    """Two random sequences, scored by the model's own attention and in other ways.

    Raises:
        ModelError: The model cannot run on random tokens.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.own_attention = model.config._attn_implementation
        if self.own_attention == RAGGED:
            self.own_attention = "sdpa"
        self.device = next(model.parameters()).device
        vocabulary = self._ids = usable_ids(model)
        unused = getattr(model.config.get_text_config(), "unused_ids", ())
        used_ids = np.setdiff1d(np.arange(min(3, vocabulary - 1), vocabulary), unused)
        ids = used_ids[np.random.default_rng(0).integers(0, len(used_ids), LONG + SHORT)]
        ids[LONG : LONG + SHARED_TOKENS] = ids[:SHARED_TOKENS]
        self.ids = np.split(ids, [LONG])
        self._samples = [
            Sample(
                token_ids=row,
                turn_ids=np.r_[-1, np.zeros(len(row) - 1, dtype=np.int64)],
                advantages=np.zeros(len(row) - 1),
            )
            for row in self.ids
        ]
        attention = model.config._attn_implementation
        self.use_own_attention()
        with self._evaluating():
            self._truth, spread = self._score_alone()
            self.bound = self._find_bound(spread)
        model.set_attn_implementation(attention)

    def use_own_attention(self) -> None:
        """Gives the model the attention that it had at first."""
        if self.model.config._attn_implementation != self.own_attention:
            self.model.set_attn_implementation(self.own_attention)

    def check(self, max_context: int | None) -> ModelCheck:
        """Measures the faster modes, and the slower one if they differ.

        Raises:
            ModelError: One sequence a row gives other log-probabilities than the model itself.
        """
        try:
            use_ragged_attention(self.model)
            packed = self.measure(self._score)
        except ModelError as error:
            packed = Difference(nats=math.inf, error=str(error))
        shared = packed
        if packed.within(self.bound):
            shared = self.measure(lambda: self._score(share=True))
        longest = rope_limit(self.model)
        check = ModelCheck(
            mode=RunMode.SHARED, bound=self.bound, packed=packed, shared=shared, longest=longest
        )
        if not packed.within(self.bound):
            return self.unpacked(check, f"packed rows {packed}")
        with self._evaluating():
            limit = min(attention_limit(self.model), longest or math.inf)
        if limit < (max_context or math.inf):
            length = "unknown" if max_context is None else str(max_context)
            reason = f"beyond {limit} tokens a sequence; max_context is {length}"
            if not limit:
                reason = "of any length: a layer reads the row otherwise than by attention"
            return self.unpacked(check, f"packed rows are wrong {reason}")
        check = replace(check, limit=None if math.isinf(limit) else int(limit))
        if not shared.within(self.bound):
            return replace(check, mode=RunMode.PACKED, reason=f"shared prefixes {shared}")
        return check

    def unpacked(self, check: ModelCheck, reason: str) -> ModelCheck:
        """Measures one sequence a row with the own attention; returns the check for this mode.

        Raises:
            ModelError: It gives other log-probabilities than the model itself.
        """
        self.use_own_attention()
        padded = False
        if check.longest is None:  # otherwise the longest of a batch changes the others
            batch = self.measure(lambda: self._score(packed=False, padded=True))
            padded = batch.within(self.bound)
        alone = self.measure(lambda: self._score(packed=False))
        if not alone.within(self.bound):
            raise ModelError(
                f"{model_name(self.model)} cannot be trained: {reason}; single sequences {alone}"
            )
        return replace(
            check,
            mode=RunMode.UNPACKED,
            reason=reason,
            padded=padded,
            attention=self.own_attention,
            limit=None,
        )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)

    def measure(self, run: Callable[[], float]) -> Difference:
        """Calls `run`, which returns the largest difference of a log-probability."""
        try:
            with self._evaluating():
                return Difference(nats=run())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model cannot do; it is reported
            return Difference(nats=math.inf, error=_line(error))

    def difference(self, logits_TV: Tensor, tokens: list[tuple[int, int]]) -> float:
        """Compares the prediction of token t of each sequence n, given as (n, t)."""
        targets = torch.tensor([self.ids[n][t] for n, t in tokens], device=self.device)
        places = [t - 1 + n * (LONG - 1) for n, t in tokens]
        return _distance(_logprobs(logits_TV[..., : self._ids], targets), self._truth[places])

    def _score_alone(self) -> tuple[Tensor, float]:
        """Returns the log-probabilities of each sequence alone, and the spread of the logits."""
        rows, spread = [], 0.0
        for ids in (torch.from_numpy(row).to(self.device) for row in self.ids):
            try:
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model cannot do
                raise ModelError(
                    f"{model_name(self.model)} cannot score {len(ids)} random tokens: "
                    f"{_line(error)}"
                ) from error
            rows.append(_logprobs(logits[:-1, : self._ids], ids[1:]))
            spread = max(spread, float(logits.float().std(-1).mean()))
        return torch.cat(rows), spread

    def _find_bound(self, spread: float) -> float:
        """Returns the bound; in half precision it follows from both sequences as one batch."""
        precision = torch.finfo(self.model.dtype)
        if precision.bits > 16:
            return min(max(BOUND, _NOISE_32 * self._rounding(precision.eps)), _LARGEST_BOUND)
        ids = torch.from_numpy(np.stack([row[:SHORT] for row in self.ids])).to(self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits
        rows = [_logprobs(a[:-1, : self._ids], b[1:]) for a, b in zip(logits, ids, strict=True)]
        alone = torch.split(self._truth, [LONG - 1, SHORT - 1])
        noise = [_distance(a[: len(b)], b) for a, b in zip(alone, rows, strict=True)]
        return NOISE * max(*noise, precision.eps * max(1.0, _SPREAD * spread))

    def _rounding(self, eps: float) -> float:
        """Returns what another rounding of the embeddings and of each linear layer changes."""
        generator = torch.Generator().manual_seed(0)

        def disturb(module: Any, inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor):  # of a router
                return output
            return output * (1 + eps * torch.randn(output.shape, generator=generator).to(output))

        kinds = (torch.nn.Linear, torch.nn.Embedding)
        layers = [module for module in self.model.modules() if isinstance(module, kinds)]
        hooks = [layer.register_forward_hook(disturb) for layer in layers]
        try:
            return _distance(self._score_alone()[0], self._truth)
        finally:
            for hook in hooks:
                hook.remove()

    def _score(self, share: bool = False, **options: bool) -> float:
        """Scores both sequences in one row, as the learner does."""
        row = pack(self._samples, self.device, share=share)
        logprobs = Scorer(self.model, 1.0, **options)(row)[0].logprobs_N
        return _distance(logprobs, self._truth)


class _Windows(PackedAttention):
    """Notes the window that each layer asks for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([1], device)
        self.by_layer: dict[int, int | None] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `Ragged.attend`."""
        self.by_layer[layer] = window
        return super().attend(layer, q, k, v, scale, window)


def attention_limit(model: Any) -> float:
    """Returns the tokens beyond which a layer's own mask differs from what it asks ragged for.

    The library's cache knows which layers forget: those with a window, which packed rows follow,
    and those that attend in chunks, which they do not. It is 0 if a layer mixes tokens in another
    way, which the weights of a fresh model can hide.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_temperature_tuning", False):
        return 0  # scales by the position in the row
    device = next(model.parameters()).device
    windows = _Windows(device)
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    model(input_ids=ids, position_ids=ids, use_cache=False, ragged=windows)
    limit = math.inf
    for n, layer in enumerate(DynamicCache(config=config).layers):
        if n not in windows.by_layer or isinstance(layer, LinearAttentionCacheLayerMixin):
            return 0
        remembered = getattr(layer, "sliding_window", None) or math.inf
        window = windows.by_layer[n] or math.inf
        if remembered != window:
            limit = min(limit, remembered, window)
    return limit


def rope_limit(model: Any) -> int | None:
    """Returns the tokens beyond which all rotary positions depend on the length of the sequence."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    limits = []
    for part in [rope, *rope.values()]:  # one for all layers, or one for each type of layer
        kind = part.get("rope_type", "") if isinstance(part, dict) else ""
        if kind == "longrope":
            limits.append(int(part["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


def _logprobs(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return logits_TV.log_softmax(-1).gather(-1, ids_T[:, None])[:, 0]


def _distance(one: Tensor, other: Tensor) -> float:
    distance = float((one - other).abs().max())
    return math.inf if math.isnan(distance) else distance


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"


def model_name(model: Any) -> str:
    """Returns the name of a model's class."""
    return type(plain_model(model)).__name__
