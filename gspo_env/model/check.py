"""Decides once how a model is run: packed with shared prefixes, packed, or one by one.

Two random sequences that begin alike are scored alone with the model's own attention, which is the
truth. Then they are scored packed, packed with their common prefix once, and by the cache of the
embedded engine. The fastest way that gives the same log-probabilities is taken.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.packing import pack
from gspo_env.batch.prefix import build_tree, sort_by_prefix
from gspo_env.batch.sample import Sample
from gspo_env.engines.embedded.kv_cache import KVCache
from gspo_env.engines.embedded.own_cache import OwnCache
from gspo_env.errors import ModelError
from gspo_env.model.adapters import plain_model
from gspo_env.model.attention import RAGGED, use_ragged_attention
from gspo_env.model.limits import attention_limit, rope_limit
from gspo_env.model.scorer import Scorer
from gspo_env.model.trace import Trace

logger = logging.getLogger(__name__)

BOUND = 1e-4
"""Largest difference of log-probabilities, in nats, that counts as equal in float32."""
NOISE = 8
"""In half precision the bound is this many times the larger of what rounding changes and of what a
batch of both sequences changes with the model's own attention."""
_SPREAD = 2
"""Rounding changes log-probabilities by the dtype's epsilon times this many standard deviations of
the logits, or by one epsilon if that is more."""
_SHARED, _LONG, _SHORT = 20, 32, 26
"""Tokens of the common prefix (a tree shares 16 or more) and of the two sequences."""
_NOTE = "_gspo_check"


class RunMode(StrEnum):
    """How a model is run."""

    SHARED = "packed with shared prefixes"
    PACKED = "packed without sharing"
    UNPACKED = "one sequence a row with the model's own attention and cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How much one way differs from the model's own attention on each sequence alone."""

    nats: float
    """Largest difference of a token's log-probability; infinite if the model cannot run so."""
    cause: str = ""
    """The first layer whose output differs, or the error; empty if all outputs are the same."""

    def within(self, bound: float) -> bool:
        """Returns whether the way counts as equal."""
        return self.nats <= bound and not self.cause

    def __str__(self) -> str:
        """Describes the difference in a few words."""
        if math.isinf(self.nats):
            return f"fail with {self.cause}"
        where = f", first in {self.cause}" if self.cause else ""
        return f"change log-probabilities by {self.nats:.2g}{where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCheck:
    """The way in which a model is run, and what decided it."""

    mode: RunMode
    bound: float
    """Largest difference in nats that counts as equal."""
    packed: Difference
    shared: Difference
    engine: Difference
    """Of the embedded engine's continuous batching."""
    own_cache: Difference | None = None
    """Of the model's own cache; None if it is not used."""
    whole_turns: bool = True
    """Whether the own cache takes several new tokens in one pass."""
    padded: bool = False
    """Whether sequences of similar length may run as one padded batch with the own attention."""
    reason: str = ""
    """Why no faster way is taken; empty for the fastest."""
    attention: str = RAGGED
    """Name of the attention that the model gets."""
    limit: int | None = None
    """Tokens of a sequence beyond which packed rows would be wrong."""
    longest: int | None = None
    """Tokens of a sequence beyond which the model changes the positions of its first tokens."""


def check_model(model: Any, *, max_context: int | None = None) -> ModelCheck:
    """Decides how a model is run, sets its attention so, and remembers the result for later calls.

    Args:
        model: A `transformers` causal LM, or one wrapped by PEFT.
        max_context: Maximum tokens of a sequence; None if it is not known.

    Raises:
        ModelError: Even one sequence a row gives other log-probabilities than the model itself, or
            an earlier call prepared the model for shorter sequences.
    """
    noted: ModelCheck | None = getattr(model, _NOTE, None)
    if noted is None:
        noted = _Checker(model).check(max_context)
        note_check(model, noted)
        if noted.mode is not RunMode.SHARED:
            logger.warning("%s runs %s: %s", _name(model), noted.mode, noted.reason)
    if noted.limit is not None and noted.limit < (max_context or 0):
        raise ModelError(
            f"{_name(model)} was prepared for at most {noted.limit} tokens a sequence, and "
            f"max_context is {max_context}; expected the largest max_context in the first call"
        )
    if model.config._attn_implementation != noted.attention:
        model.set_attn_implementation(noted.attention)
    return noted


def note_check(model: Any, check: ModelCheck) -> None:
    """Lets later calls of `check_model` take this result for the model."""
    setattr(model, _NOTE, check)


def check_engine(model: Any, max_context: int) -> ModelCheck:
    """Does the same for a model that the embedded engine is to run.

    Raises:
        ModelError: Its own cache gives other log-probabilities, or `max_context` is too large.
    """
    check = check_model(model, max_context=max_context)
    if check.longest is not None and max_context > check.longest:
        raise ModelError(
            f"{_name(model)} changes the positions of all tokens of a sequence beyond "
            f"{check.longest} tokens, so those in a cache become wrong; max_context is "
            f"{max_context}, expected at most {check.longest}"
        )
    if check.own_cache is not None and not check.own_cache.within(check.bound):
        raise ModelError(
            f"{_name(model)} cannot be sampled by the embedded engine: {check.reason}, and turns "
            f"with its own cache {check.own_cache}; expected the engine vllm, or another model"
        )
    return check


class _Checker:
    """Scores two random sequences in every way."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.own = model.config._attn_implementation
        if self.own == RAGGED:
            self.own = "sdpa"
            model.set_attn_implementation(self.own)
        self.device = next(model.parameters()).device
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = np.random.default_rng(0).integers(min(3, vocabulary - 1), vocabulary, _LONG + _SHORT)
        ids[_LONG : _LONG + _SHARED] = ids[:_SHARED]
        self.ids = np.split(ids, [_LONG])
        self.samples = [
            Sample(
                token_ids=row,
                turn_ids=np.r_[-1, np.zeros(len(row) - 1, dtype=np.int64)],
                advantages=np.zeros(len(row) - 1),
            )
            for row in self.ids
        ]
        self.trace = Trace(model)

    @torch.no_grad()
    def check(self, max_context: int | None) -> ModelCheck:
        """Measures the faster ways, and the slower one if they differ."""
        training = self.model.training
        self.model.eval()
        try:
            self.find_truth()
            self.bound = self.find_bound()
            found = self.faster(max_context)
            return self.slower(found) if found.mode is RunMode.UNPACKED else found
        finally:
            self.model.train(training)

    def find_truth(self) -> None:
        """Scores each sequence with the model's own attention.

        Raises:
            ModelError: The model cannot run on random tokens.
        """
        rows, self.spread = [], 0.0
        for ids in (torch.from_numpy(row).to(self.device) for row in self.ids):
            try:
                with self.trace.record(len(ids)):
                    logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model cannot do
                raise ModelError(
                    f"{_name(self.model)} cannot score {len(ids)} random tokens: {_line(error)}"
                ) from error
            rows.append(_picked(logits[:-1], ids[1:]))
            self.spread = max(self.spread, float(logits.float().std(-1).mean()))
        self.truth = torch.cat(rows)

    def find_bound(self) -> float:
        """Returns the bound; in half precision it follows from both sequences as one batch."""
        precision = torch.finfo(self.model.dtype)
        if precision.bits > 16:
            return BOUND
        ids = torch.from_numpy(np.stack([row[:_SHORT] for row in self.ids])).to(self.device)
        logits = self.model(input_ids=ids, use_cache=False).logits
        rows = [_picked(a[:-1], b[1:]) for a, b in zip(logits, ids, strict=True)]
        alone = torch.split(self.truth, [_LONG - 1, _SHORT - 1])
        noise = [_distance(a[: len(b)], b) for a, b in zip(alone, rows, strict=True)]
        return NOISE * max(*noise, precision.eps * max(1.0, _SPREAD * self.spread))

    def faster(self, max_context: int | None) -> ModelCheck:
        """Measures ragged attention; the way is UNPACKED if it gives other numbers."""
        try:
            use_ragged_attention(self.model)
            packed = self.measure(self.scored)
        except ModelError as error:
            packed = Difference(nats=math.inf, cause=str(error))
        shared = engine = packed
        if packed.within(self.bound):
            shared = self.measure(lambda causes: self.scored(causes, share=True))
            engine = self.measure(self.stepped)
        found = ModelCheck(
            mode=RunMode.SHARED, bound=self.bound, packed=packed, shared=shared, engine=engine
        )
        found = replace(found, longest=rope_limit(self.model))
        if not packed.within(self.bound):
            return replace(found, mode=RunMode.UNPACKED, reason=f"packed rows {packed}")
        if not engine.within(self.bound):
            return replace(found, mode=RunMode.UNPACKED, reason=f"batches of the engine {engine}")
        limit = min(attention_limit(self.model), found.longest or math.inf)
        if limit < (max_context or math.inf):
            length = "not known" if max_context is None else str(max_context)
            reason = (
                f"packed rows are wrong beyond {limit} tokens a sequence; max_context is {length}"
            )
            return replace(found, mode=RunMode.UNPACKED, reason=reason)
        found = replace(found, limit=None if math.isinf(limit) else int(limit))
        if not shared.within(self.bound):
            return replace(found, mode=RunMode.PACKED, reason=f"shared prefixes {shared}")
        return found

    def slower(self, found: ModelCheck) -> ModelCheck:
        """Measures one sequence a row and the model's own cache.

        Raises:
            ModelError: One sequence a row gives other log-probabilities than the model itself.
        """
        if self.model.config._attn_implementation != self.own:
            self.model.set_attn_implementation(self.own)
        found = replace(found, attention=self.own)
        if found.longest is None:  # otherwise the longest of a batch changes the others
            batch = self.measure(lambda causes: self.scored(causes, packed=False, padded=True))
            found = replace(found, padded=batch.within(self.bound))
        scored = self.measure(lambda causes: self.scored(causes, packed=False))
        if not scored.within(self.bound):
            raise ModelError(
                f"{_name(self.model)} cannot be trained: {found.reason}; single sequences {scored}"
            )
        whole = self.measure(self.continued)
        if whole.within(self.bound):
            return replace(found, own_cache=whole)
        single = self.measure(lambda causes: self.continued(causes, most=1))
        return replace(found, own_cache=single, whole_turns=False)

    def measure(self, run: Callable[[list[str]], float]) -> Difference:
        """Calls `run`, which returns the largest difference and lists causes."""
        causes: list[str] = []
        self.model.eval()  # layers that a scorer has set to checkpoint would drop a cache
        try:
            nats = run(causes)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model cannot do; it is reported
            return Difference(nats=math.inf, cause=_line(error))
        # in half precision a router that takes another expert is noise, so the bound alone decides
        counts = nats > self.bound or torch.finfo(self.model.dtype).bits > 16
        return Difference(nats=nats, cause=causes[0] if causes and counts else "")

    def scored(self, causes: list[str], share: bool = False, **how: bool) -> float:
        """Scores both sequences in one row, as the learner does."""
        row = pack(self.samples, self.device, share=share)
        scorer = Scorer(self.model, self.model, 1.0, **how)
        places = np.arange(_LONG + _SHORT)
        if row.runs:
            tree = build_tree(self.ids, sort_by_prefix(self.ids))
            places = np.unique(np.concatenate(tree.places), return_index=True)[1]
        with self.trace.compare(torch.from_numpy(places).to(self.device)) as found:
            logprobs = scorer(row)[0].logprobs_N
        causes += found
        return _distance(logprobs, self.truth)

    def stepped(self, causes: list[str]) -> float:
        """Feeds a prompt, a copy of its prefix that goes on otherwise, and single tokens of both.

        These are the steps of the embedded engine; each gives the next token's log-probability.
        """
        cache = KVCache(self.model, 2, _LONG)
        worst = self.step(cache, causes, [(0, 0, 24)])
        cache.copy([0], [1], [_SHARED])
        worst = max(worst, self.step(cache, causes, [(0, 24, 25), (1, _SHARED, 23)]))
        for n in range(2):
            feeds = [(0, 25 + n, 26 + n), (1, 23 + n, 24 + n)]
            worst = max(worst, self.step(cache, causes, feeds))
        return worst

    def step(self, cache: KVCache, causes: list[str], feeds: list[tuple[int, int, int]]) -> float:
        """Feeds tokens from `start` to `stop` of each sequence n, given as (n, start, stop)."""
        tokens = [self.ids[n][start:stop].tolist() for n, start, stop in feeds]
        places = np.concatenate([np.arange(a, b) + _LONG * n for n, a, b in feeds])
        with self.trace.compare(torch.from_numpy(places).to(self.device)) as found:
            slots, starts = [n for n, _, _ in feeds], [start for _, start, _ in feeds]
            logits = cache.forward(self.model, slots, starts, tokens)
        causes += found
        return self.predicted(logits, [(n, stop) for n, _, stop in feeds])

    def continued(self, causes: list[str], most: int = 5) -> float:
        """Feeds a prompt to the model's own cache, then further tokens, at most `most` at once."""
        cache, worst, stops = OwnCache(self.model), 0.0, [22, 23, 28, 29, 30]
        stops = stops if most > 1 else list(range(22, 31))
        for start, stop in zip([0, *stops], stops, strict=False):
            places = torch.arange(start, stop, device=self.device)
            with self.trace.compare(places) as found:
                logits = cache.feed(self.ids[0][start:stop].tolist())
            causes += found
            worst = max(worst, self.predicted(logits, [(0, stop)]))
        return worst

    def predicted(self, logits: Tensor, tokens: list[tuple[int, int]]) -> float:
        """Compares the prediction of token t of each sequence n, given as (n, t)."""
        targets = torch.tensor([self.ids[n][t] for n, t in tokens], device=self.device)
        places = [t - 1 + n * (_LONG - 1) for n, t in tokens]
        return _distance(_picked(logits, targets), self.truth[places])


def _picked(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return logits_TV.log_softmax(-1).gather(-1, ids_T[:, None])[:, 0]


def _distance(one: Tensor, other: Tensor) -> float:
    distance = float((one - other).abs().max())
    return math.inf if math.isnan(distance) else distance


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"


def _name(model: Any) -> str:
    return type(plain_model(model)).__name__
