"""The `transformers` engine: continuous batching with the learner's own weights.

Each session (an episode) keeps its slot of the key-value cache from turn to turn, so a new turn
computes only its new tokens. Each step feeds one ragged row: one token of each sequence that
decodes and the new prompt tokens of each turn that starts. A finished sequence leaves the batch at
once. A prompt that is already cached in another slot is not computed again: both slots share its
keys and values.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.upload import upload
from gspo_env.engines.base import (
    Completion,
    NamedTensors,
    Sampling,
    check_room,
    drained,
    version_runs,
)
from gspo_env.errors import EngineError
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.direct import Direct, fast_forward
from gspo_env.model.kv_cache import KVCache
from gspo_env.model.kv_shared import Shared
from gspo_env.model.threads import keep_memory

_LEAST_SHARED = 64
"""Least tokens of a prompt that slots share; a copy of fewer costs less than another product."""


@dataclass(slots=True)
class _Slot:
    index: int
    session: str | None = None
    tokens: list[int] = field(default_factory=list)
    """The ids whose keys and values are in the cache."""
    shared: Shared | None = None
    """The place of the first of them, if other slots begin with the same."""
    busy: bool = False


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    sampling: Sampling
    session: str | None
    future: asyncio.Future[Completion]
    draw: Callable[[], float]
    """Uniform numbers in [0, 1) from the request's own generator."""
    slot: _Slot | None = None
    pending: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """See `version_runs`."""


class TransformersEngine:
    """Samples from a `transformers` causal LM whose weights it shares with the learner.

    Args:
        model: The causal LM. Its attention is replaced by ragged attention.
        max_slots: Maximum number of sequences in the cache.
        max_context: Maximum tokens of one sequence.
        max_step_tokens: Maximum tokens of one forward pass; a longer prompt takes several.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_slots: int = 128,
        max_context: int = 4096,
        max_step_tokens: int = 8192,
    ) -> None:
        use_ragged_attention(model)
        keep_memory()
        self._model = model
        self._max_context = max_context
        self._max_step_tokens = max(max_step_tokens, max_slots)
        self._slots = [_Slot(index) for index in range(max_slots)]
        self._free = list(range(max_slots))  # a heap: low slots first keep the cache dense
        self._sessions: dict[str, _Slot] = {}  # the oldest first
        self._prefixes: dict[tuple[int, ...], _Slot] = {}
        self._users = [0] * max_slots
        """How many slots begin with each shared prompt."""
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._cache = KVCache(model, max_slots, max_context)
        self._direct = fast_forward(model)
        self._pump: asyncio.Task[None] | None = None
        self._closed = False
        self.weights_version = 0
        self.fed_tokens = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`.

        Raises:
            EngineError: The engine is closed, the prompt is empty, or it leaves no room for
                `max_tokens` in the context.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        check_room(prompt_ids, sampling, self._max_context)
        loop = asyncio.get_running_loop()
        request = _Request(
            prompt=list(prompt_ids),
            sampling=sampling,
            session=session,
            future=loop.create_future(),
            draw=random.Random(sampling.seed).random,
            versions=[(self.weights_version, 0)],
        )
        self._waiting.append(request)
        self._ensure_running()
        return await request.future

    def _ensure_running(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run())

    def release(self, session: str) -> None:
        """Frees a session's slot. Its prompt can still be copied until the slot is reused."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            slot.session = None
            if not slot.busy:
                heapq.heappush(self._free, slot.index)

    async def sleep(self) -> None:
        """Does nothing: the weights are the learner's, and the cache is small."""

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Clears the cache; the engine already shares the learner's weights.

        Afterwards the engine is as a new one, so that what it samples does not depend on what it
        served before.

        Raises:
            EngineError: Requests still run after minutes.
        """
        await self.drain()
        if self._direct is not None and not Direct.fits(self._model):
            self._direct = None  # such as after an adapter was added
        self._prefixes.clear()
        self._sessions.clear()
        self._slots = [_Slot(slot.index) for slot in self._slots]
        self._free = [slot.index for slot in self._slots]
        self._users = [0] * len(self._slots)
        self.weights_version = version

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Clears the cache; see `UpdatesInFlight.update_in_flight`.

        The next step computes the keys and values of each request anew.
        """
        self._prefixes.clear()
        for slot in self._slots:
            self._empty(slot)
        for request in self._running:
            request.pending = request.prompt + request.token_ids
        for request in [*self._running, *self._waiting]:
            request.versions.append((version, len(request.token_ids)))
        self.weights_version = version

    async def drain(self) -> None:
        """Waits until no request is in flight.

        Raises:
            EngineError: Requests still run after minutes.
        """
        if self._running or self._waiting:  # some may be cancelled, which the next step notices
            self._ensure_running()
            await drained(lambda: len(self._running) + len(self._waiting))

    def close(self) -> None:
        """Frees the cache and rejects further requests."""
        self._closed = True
        self._cache.drop()

    async def _run(self) -> None:
        try:
            while self._waiting or self._running:
                self._admit()
                self._step()
                # Lets a finished episode request its next turn before the next step.
                await asyncio.sleep(0)
        except Exception as error:
            for request in [*self._running, *self._waiting]:
                if not request.future.done():
                    request.future.set_exception(error)
            self._running, self._waiting = [], []

    def _admit(self) -> None:
        fresh: set[tuple[int, ...]] = set()
        waiting = [r for r in self._waiting if not r.future.done()]
        self._waiting = [r for r in waiting if not self._place(r, fresh)]

    def _place(self, request: _Request, fresh: set[tuple[int, ...]]) -> bool:
        slot = self._sessions.get(request.session) if request.session else None
        if slot is None:
            key = tuple(request.prompt)
            if key in fresh:
                return False  # this step computes the same prompt; the next one copies it
            slot = self._take_slot()
            if slot is None:
                return False
            self._fork(slot, request.prompt, key, fresh)
            if request.session is not None:
                slot.session = request.session
                self._sessions[request.session] = slot
        held = min(_common(slot.tokens, request.prompt), len(request.prompt) - 1)
        if slot.shared is not None and held < slot.shared.length:
            self._empty(slot)
        slot.tokens = slot.tokens[:held]
        slot.busy = True
        request.slot = slot
        request.pending = request.prompt[len(slot.tokens) :]
        self._running.append(request)
        return True

    def _take_slot(self) -> _Slot | None:
        if self._free:
            return self._slots[heapq.heappop(self._free)]
        idle = next((s for s in self._sessions.values() if not s.busy), None)
        if idle is not None and idle.session is not None:
            del self._sessions[idle.session]
            idle.session = None
        return idle

    def _fork(
        self, slot: _Slot, prompt: list[int], key: tuple[int, ...], fresh: set[tuple[int, ...]]
    ) -> None:
        source, length = self._prefixes.get(key), len(prompt) - 1
        if source is not slot:
            self._empty(slot)
        if source is None or not _begins(source, prompt):
            self._prefixes[key] = slot
            fresh.add(key)
        elif source is not slot:
            self._continue(slot, source, length)
            slot.tokens = prompt[:-1]

    def _continue(self, slot: _Slot, source: _Slot, length: int) -> None:
        """Gives a slot the first keys and values of another one.

        They are shared, or copied if they are few, or if the device has no products for that.
        """
        if source.shared is None and length >= _LEAST_SHARED and self._cache.shares:
            source.shared = Shared(index=self._users.index(0), length=length)
            self._cache.share(source.index, source.shared, len(source.tokens))
            self._users[source.shared.index] = 1
        if source.shared is None:
            self._cache.copy(source.index, slot.index, length)
        else:
            slot.shared = source.shared
            self._users[source.shared.index] += 1

    def _empty(self, slot: _Slot) -> None:
        if slot.shared is not None:
            self._users[slot.shared.index] -= 1
        slot.tokens, slot.shared = [], None

    def _step(self) -> None:
        for request in self._running:
            if request.future.done():  # cancelled by its caller
                self._leave(request)
        rows = self._running = [r for r in self._running if r.slot is not None]
        if not rows:
            return
        slots = [r.slot for r in rows if r.slot is not None]
        feeds = self._feeds(rows)
        starts = [len(s.tokens) for s in slots]
        direct = self._direct if self._direct and self._direct.usable else None
        shared = [s.shared for s in slots]
        logits = self._cache.forward(
            self._model, [s.index for s in slots], starts, feeds, direct, shared
        )
        self.fed_tokens += sum(map(len, feeds))
        for request, slot, feed in zip(rows, slots, feeds, strict=True):
            slot.tokens.extend(feed)
            del request.pending[: len(feed)]
        ready = [n for n, request in enumerate(rows) if not request.pending]
        if ready:
            self._sample(rows, logits, ready)
        self._running = [r for r in self._running if r.slot is not None]

    def _feeds(self, rows: list[_Request]) -> list[list[int]]:
        spare = self._max_step_tokens - len(rows)
        feeds = []
        for request in rows:
            size = min(len(request.pending), 1 + spare)
            spare -= size - 1
            feeds.append(request.pending[:size])
        return feeds

    def _sample(self, rows: list[_Request], logits: Tensor, ready: list[int]) -> None:
        requests = [rows[n] for n in ready]
        draws = [r.draw() for r in requests]
        temperatures = [r.sampling.temperature for r in requests]
        chosen = ready if len(ready) < len(rows) else None
        tokens, logprobs = sample(logits, temperatures, draws, chosen)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.pending = [token]
            stopped = request.sampling.ended(request.token_ids)
            if stopped or len(request.token_ids) == request.sampling.max_tokens:
                self._leave(request)
                lowest, runs = version_runs(request.versions, len(request.token_ids))
                completion = Completion(
                    token_ids=tuple(request.token_ids),
                    logprobs=tuple(request.logprobs),
                    finish_reason="stop" if stopped else "length",
                    weights_version=lowest,
                    weights_versions=runs,
                )
                request.future.set_result(completion)

    def _leave(self, request: _Request) -> None:
        slot, request.slot = request.slot, None
        if slot is not None:
            slot.busy = False
            if slot.session is None:
                heapq.heappush(self._free, slot.index)


def sample(
    logits: Tensor,
    temperatures: Sequence[float],
    draws: Sequence[float],
    rows: Sequence[int] | None = None,
) -> tuple[list[int], list[float]]:
    """Samples one id of each row by inverse transform sampling; returns ids and log-probabilities.

    A GPU is waited for once, for the results.

    Args:
        logits: (B, V), or more rows if `rows` selects B of them.
        temperatures: (B,); 0 takes the most likely id and its log-probability at temperature 1.
        draws: (B,) uniform numbers in [0, 1).
        rows: (B,) positions of rows; None for all.
    """
    if logits.device.type == "mps":  # it has no float64
        logits = logits.cpu()
    arrays: list[np.ndarray[Any, Any]] = [
        np.array([t or 1.0 for t in temperatures], dtype=np.float32),
        np.array(draws, dtype=np.float64),
        np.array([t == 0 for t in temperatures]),
        np.array(() if rows is None else rows, dtype=np.int64),
    ]
    scale, draw, greedy, chosen = upload(arrays, logits.device)
    logits = (logits if rows is None else logits.index_select(0, chosen)).float()
    if (arrays[0] != 1.0).any():
        logits = logits / scale[:, None]
    probs = logits.softmax(-1)
    # float64, because rounding in a float32 sum would make the last ids of a large vocabulary rarer
    total = probs.cumsum(-1, dtype=torch.float64)
    target = draw[:, None] * total[:, -1:]
    ids = torch.searchsorted(total, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if 0 in temperatures:
        ids = torch.where(greedy[:, None], probs.argmax(-1, keepdim=True), ids)
    # float64 holds every id and every float32 exactly
    picked = torch.cat([ids.double(), probs.gather(-1, ids).log().double()], dim=-1)
    tokens, logprobs = picked.T.tolist()
    return list(map(int, tokens)), logprobs


def _begins(slot: _Slot, prompt: list[int]) -> bool:
    """Returns whether a slot has all but the last token of a prompt, all of them shared or none."""
    length = len(prompt) - 1
    if slot.shared is not None and slot.shared.length != length:
        return False
    return slot.tokens[:length] == prompt[:-1]


def _common(held: list[int], prompt: list[int]) -> int:
    """Returns the number of leading ids that two sequences share."""
    if prompt[: len(held)] == held:
        return len(held)
    pairs = enumerate(zip(held, prompt, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(held), len(prompt)))
