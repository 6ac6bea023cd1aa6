"""The embedded engine: continuous batching over the learner's own weights.

Every session (an episode) owns a slot of the key-value cache that lives across its turns, so a new
turn feeds only what is new. One step feeds one ragged row: a single token for each sequence that
decodes, the new prompt for each that starts a turn. Whoever finishes leaves at once. Prompts that a
running sequence already holds are forked, not computed again.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_env.attention import sdpa, use_ragged_attention
from gspo_env.engines.base import Completion, Sampling
from gspo_env.errors import EngineError

_FIRST_CAPACITY = 128
_IDLE = 2
"""A span of slots is attended whole where at most this many times its rows decode."""


@dataclass(slots=True)
class _Slot:
    index: int
    session: str | None = None
    tokens: list[int] = field(default_factory=list)
    """The ids whose keys and values are cached."""
    busy: bool = False


@dataclass(slots=True)
class _Request:
    prompt: list[int]
    sampling: Sampling
    session: str | None
    future: asyncio.Future[Completion]
    draw: Callable[[], float]
    """Uniform numbers in [0, 1), from a stream of the request's own."""
    slot: _Slot | None = None
    pending: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TransformersEngine:
    """Samples from a `transformers` causal LM that it shares with the learner.

    Args:
        model: The causal LM; its attention is switched to ragged rows.
        max_slots: The most sequences in the cache at once.
        max_context: The most tokens of one sequence.
        max_step_tokens: The most tokens of one forward pass; longer prompts are fed in pieces.
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
        self._model = model
        self._max_context = max_context
        self._max_step_tokens = max(max_step_tokens, max_slots)
        self._slots = [_Slot(index) for index in range(max_slots)]
        self._free = list(range(max_slots))  # a heap: low slots first keep the cache dense
        self._sessions: OrderedDict[str, _Slot] = OrderedDict()
        self._prefixes: dict[tuple[int, ...], _Slot] = {}
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._cache = _Cache(model, max_slots, max_context)
        self._pump: asyncio.Task[None] | None = None
        self._closed = False
        self.weights_version = 0
        self.steps = 0
        self.fed_tokens = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        """Samples one action; see `Engine.generate`.

        Raises:
            EngineError: The prompt is empty or leaves no room for `max_tokens` within the context.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        if not prompt_ids or len(prompt_ids) + sampling.max_tokens > self._max_context:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens and an action of {sampling.max_tokens} "
                f"do not fit a context of {self._max_context} tokens"
            )
        loop = asyncio.get_running_loop()
        request = _Request(
            prompt=list(prompt_ids),
            sampling=sampling,
            session=session,
            future=loop.create_future(),
            draw=random.Random(sampling.seed).random,
        )
        self._waiting.append(request)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run())
        return await request.future

    def release(self, session: str) -> None:
        """Frees the slot of a session; what it holds may still be forked until it is reused."""
        slot = self._sessions.pop(session, None)
        if slot is not None and not slot.busy:
            slot.session = None
            heapq.heappush(self._free, slot.index)
        elif slot is not None:
            slot.session = None

    async def sleep(self) -> None:
        """Nothing to give: the weights are the learner's, and the cache is small."""

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Forgets every cached key and value: the weights themselves are the learner's."""
        if self._running or self._waiting:
            raise EngineError("weights cannot change while requests are running")
        self._prefixes.clear()
        for slot in self._slots:
            slot.tokens = []
        self.weights_version = version

    def close(self) -> None:
        """Drops the cache and refuses further requests."""
        self._closed = True
        self._cache.drop()

    async def _run(self) -> None:
        try:
            while self._waiting or self._running:
                self._admit()
                self._step()
                # Whoever just finished may hand in its next turn before the next step.
                await asyncio.sleep(0)
        except Exception as error:
            for request in [*self._running, *self._waiting]:
                if not request.future.done():
                    request.future.set_exception(error)
            self._running, self._waiting = [], deque()

    def _admit(self) -> None:
        fresh: set[tuple[int, ...]] = set()
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request.future.done():
                continue
            if not self._place(request, fresh):
                self._waiting.append(request)

    def _place(self, request: _Request, fresh: set[tuple[int, ...]]) -> bool:
        slot = self._sessions.get(request.session) if request.session else None
        if slot is None:
            key = tuple(request.prompt)
            if key in fresh:
                return False  # a twin is being computed in this very step: fork it in the next
            slot = self._take_slot()
            if slot is None:
                return False
            self._fork(slot, request.prompt, key, fresh)
            if request.session is not None:
                slot.session = request.session
                self._sessions[request.session] = slot
        held = _common(slot.tokens, request.prompt)
        slot.tokens = slot.tokens[: min(held, len(request.prompt) - 1)]
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
        source = self._prefixes.get(key)
        slot.tokens = slot.tokens if source is slot else []
        if source is None or source.tokens[: len(prompt) - 1] != prompt[:-1]:
            self._prefixes[key] = slot
            fresh.add(key)
        elif source is not slot:
            self._cache.copy(source.index, slot.index, len(prompt) - 1)
            slot.tokens = prompt[:-1]

    def _step(self) -> None:
        rows = self._select()
        if not rows:
            return
        slots = [r.slot for r in rows if r.slot is not None]
        feeds = self._feeds(rows)
        starts = [len(s.tokens) for s in slots]
        logits = self._cache.forward(self._model, [s.index for s in slots], starts, feeds)
        self.steps += 1
        self.fed_tokens += sum(map(len, feeds))
        ready = []
        for n, (request, slot, feed) in enumerate(zip(rows, slots, feeds, strict=True)):
            slot.tokens.extend(feed)
            del request.pending[: len(feed)]
            if not request.pending:
                ready.append(n)
        self._sample([rows[n] for n in ready], logits[ready] if len(ready) < len(rows) else logits)
        self._running = [r for r in self._running if r.slot is not None]

    def _select(self) -> list[_Request]:
        for request in self._running:
            if request.future.done():  # cancelled by its caller
                self._leave(request)
        self._running = [r for r in self._running if r.slot is not None]
        return self._running[: self._max_step_tokens]

    def _feeds(self, rows: list[_Request]) -> list[list[int]]:
        spare = self._max_step_tokens - len(rows)
        feeds = []
        for request in rows:
            size = min(len(request.pending), 1 + spare)
            spare -= size - 1
            feeds.append(request.pending[:size])
        return feeds

    def _sample(self, requests: list[_Request], logits: Tensor) -> None:
        if not requests:
            return
        draws = [r.draw() for r in requests]
        temperatures = [r.sampling.temperature for r in requests]
        tokens, logprobs = sample(logits, temperatures, draws)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.pending = [token]
            if token in request.sampling.stop_ids:
                self._finish(request, "stop")
            elif len(request.token_ids) == request.sampling.max_tokens:
                self._finish(request, "length")

    def _finish(self, request: _Request, reason: Any) -> None:
        self._leave(request)
        request.future.set_result(
            Completion(
                token_ids=tuple(request.token_ids),
                logprobs=tuple(request.logprobs),
                finish_reason=reason,
                weights_version=self.weights_version,
            )
        )

    def _leave(self, request: _Request) -> None:
        slot, request.slot = request.slot, None
        if slot is not None:
            slot.busy = False
            if slot.session is None:
                heapq.heappush(self._free, slot.index)


def sample(
    logits: Tensor, temperatures: Sequence[float], draws: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One id a row by inverse transform sampling, and its log-probability.

    Args:
        logits: (B, V).
        temperatures: (B,); 0 takes the most likely id, with its log-probability at 1.
        draws: (B,) uniform numbers in [0, 1).
    """
    scale = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    # float64: the rounding of a long float32 sum would starve the last ids of a large vocabulary
    total = logprobs.double().exp().cumsum(-1)
    target = torch.tensor(draws, dtype=torch.float64, device=logits.device) * total[:, -1]
    ids = torch.searchsorted(total, target[:, None], right=True).clamp_(max=logits.shape[-1] - 1)
    if 0 in temperatures:
        greedy = torch.tensor([t == 0 for t in temperatures], device=logits.device)[:, None]
        ids = torch.where(greedy, logprobs.argmax(-1, keepdim=True), ids)
    picked = logprobs.gather(-1, ids)
    return ids[:, 0].tolist(), picked[:, 0].tolist()


def _common(held: list[int], prompt: list[int]) -> int:
    """How many leading ids two sequences share."""
    if prompt[: len(held)] == held:
        return len(held)
    pairs = enumerate(zip(held, prompt, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(held), len(prompt)))


class _Cache:
    """Keys and values: for each layer (S slots, Hkv, capacity, D), grown as sequences grow."""

    def __init__(self, model: Any, slots: int, max_context: int) -> None:
        self._shape = slots
        self._max_context = max_context
        self._capacity = min(_FIRST_CAPACITY, max_context)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._device = next(model.parameters()).device

    def drop(self) -> None:
        """Frees the memory."""
        self._layers.clear()

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot to another."""
        with torch.inference_mode():
            for layer in self._layers.values():
                for tensor in layer:
                    tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def forward(
        self, model: Any, slots: list[int], starts: list[int], feeds: list[list[int]]
    ) -> Tensor:
        """Feeds each slot its new tokens; returns the logits after the last of each, (B, V)."""
        sizes = [len(feed) for feed in feeds]
        self._reserve(max(a + n for a, n in zip(starts, sizes, strict=True)))
        plan = _Plan(self, slots, starts, sizes)
        ids = torch.tensor([[i for feed in feeds for i in feed]], device=self._device)
        if model.training:
            model.eval()
        output = model(
            input_ids=ids,
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=plan.last,
            ragged=plan,
        )
        logits: Tensor = output.logits[0]
        return logits

    def layer(self, index: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, made at its first use."""
        if index not in self._layers:
            shape = (self._shape, key.shape[1], self._capacity, key.shape[2])
            self._layers[index] = (key.new_zeros(shape), key.new_zeros(shape))
        return self._layers[index]

    def _reserve(self, length: int) -> None:
        if length > self._max_context:
            raise EngineError(f"{length} tokens do not fit a context of {self._max_context}")
        while self._capacity < length:
            more = min(self._capacity, self._max_context - self._capacity)
            self._capacity += more
            for index, layer in self._layers.items():
                padded = [torch.nn.functional.pad(t, (0, 0, 0, more)) for t in layer]
                self._layers[index] = (padded[0], padded[1])


class _Plan:
    """One step's `Ragged`: where each fed token is written and what it sees."""

    def __init__(
        self, cache: _Cache, slots: list[int], starts: list[int], sizes: list[int]
    ) -> None:
        self._cache = cache
        device = cache._device
        slot_B, start_B, size_B = (np.array(x, dtype=np.int64) for x in (slots, starts, sizes))
        first_B = np.cumsum(size_B) - size_B
        row_T = np.repeat(np.arange(len(slots)), size_B)
        offset_T = np.arange(len(row_T)) - first_B[row_T]
        self.positions = torch.from_numpy(start_B[row_T] + offset_T).to(device)
        self.last = torch.from_numpy(first_B + size_B - 1).to(device)
        self._slot_T = torch.from_numpy(slot_B[row_T]).to(device)
        # Decoding rows and prompts are attended apart, so that a long prompt pads no decoding row.
        members = [np.flatnonzero(size_B == 1), np.flatnonzero(size_B > 1)]
        self._groups = [
            _Rows(slot_B[m], start_B[m], size_B[m], first_B[m], device) for m in members if len(m)
        ]
        order = np.concatenate([m for m in members if len(m)])
        restore = np.empty(len(row_T), dtype=np.int64)
        restore[np.concatenate([np.arange(first_B[b], first_B[b] + size_B[b]) for b in order])] = (
            np.arange(len(row_T))
        )
        self._restore = torch.from_numpy(restore).to(device) if len(self._groups) > 1 else None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """See `Ragged.attend`."""
        keys, values = self._cache.layer(layer, key)
        keys[self._slot_T, :, self.positions] = key
        values[self._slot_T, :, self.positions] = value
        outs = [group.attend(query, keys, values, scale, window) for group in self._groups]
        return outs[0] if self._restore is None else torch.cat(outs).index_select(0, self._restore)


class _Rows:
    """Rows of one step that are attended together.

    Decoding rows that fill most of a span of slots are attended over the whole span, idle slots
    included: a view of the cache costs nothing, a copy of its rows more than the attention.
    """

    def __init__(self, slot_B: Any, start_B: Any, size_B: Any, first_B: Any, device: Any) -> None:
        self._length = int((start_B + size_B).max())
        self._decode = bool(size_B.max() == 1)
        low, high = int(slot_B.min()), int(slot_B.max()) + 1
        self._span = (low, high) if self._decode and high - low <= _IDLE * len(slot_B) else None
        column = np.arange(int(size_B.max()))
        inside = column < size_B[:, None]
        self._index = torch.from_numpy(first_B[:, None] + np.where(inside, column, 0)).to(device)
        everything = bool(inside.all())
        self._inside = None if everything else torch.from_numpy(np.flatnonzero(inside)).to(device)
        self._slots = torch.from_numpy(slot_B - low if self._span else slot_B).to(device)
        place = start_B[:, None] + column
        if self._span:
            every = np.zeros((high - low, 1), dtype=np.int64)
            every[slot_B - low] = place
            place = every
        # (B, 1, q, length): a token sees the positions up to its own
        position = torch.from_numpy(place).to(device)[:, None, :, None]
        self._distance = position - torch.arange(self._length, device=device)
        self._mask = self._distance >= 0

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        mask = self._mask if window is None else self._mask & (self._distance < window)
        if self._decode:
            return self._attend_one(query, keys, values, scale, mask)
        q = query[self._index].transpose(1, 2)
        k, v = (t[:, :, : self._length].index_select(0, self._slots) for t in (keys, values))
        out = sdpa(q, k, v, scale, mask, causal=False).transpose(1, 2).flatten(0, 1)
        return out if self._inside is None else out.index_select(0, self._inside)

    def _attend_one(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor
    ) -> Tensor:
        """One query a row; those that share a key head become the queries of one head."""
        q = query.index_select(0, self._index[:, 0]).view(
            len(self._index), keys.shape[1], -1, query.shape[-1]
        )
        k, v = (t[:, :, : self._length] for t in (keys, values))
        if self._span is None:
            k, v = (t.index_select(0, self._slots) for t in (k, v))
            return sdpa(q, k, v, scale, mask, causal=False).flatten(1, 2)
        low, high = self._span
        spread = q.new_zeros(high - low, *q.shape[1:]).index_copy_(0, self._slots, q)
        out = sdpa(spread, k[low:high], v[low:high], scale, mask, causal=False)
        return out.index_select(0, self._slots).flatten(1, 2)
