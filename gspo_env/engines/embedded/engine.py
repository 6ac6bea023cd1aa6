"""The `transformers` engine: continuous batching with the learner's own weights.

Each session (an episode) keeps its slot of the key-value cache from turn to turn, so a new turn
computes only its new tokens. Each step feeds one ragged row: one token of each sequence that
decodes and the new prompt tokens of each turn that starts. A finished sequence leaves the batch at
once. What several requests have in common is computed once: see `gspo_env.engines.embedded.slots`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gspo_env.batch.packing import upload
from gspo_env.engines.base import Completion, Engine, NamedTensors, Sampling, check_room, drained
from gspo_env.engines.embedded.direct import DirectForward, start_direct
from gspo_env.engines.embedded.kv_cache import KVCache
from gspo_env.engines.embedded.slots import Request, Sequences, Slot
from gspo_env.errors import EngineError
from gspo_env.model.attention import use_ragged_attention
from gspo_env.model.head import usable_ids
from gspo_env.model.threads import keep_memory

_MOST_LOGITS = 1 << 19
"""Logits that a CPU samples from at the same time: more do not fit into its cache."""
_LARGE, _BLOCK = 8192, 128
"""Ids from which a CPU draws a block of so many ids first."""
_BELOW_1 = 1.0 - 2.0**-53


class TransformersEngine(Engine):
    """Samples from a `transformers` causal LM whose weights it shares with the learner.

    Args:
        model: The causal LM. Its attention is replaced by ragged attention.
        max_slots: Maximum number of sequences in the cache.
        max_context: Maximum tokens of one sequence.
        max_step_tokens: Maximum tokens of one forward pass; a longer prompt takes several.
    """

    updates_in_flight = True

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
        self._model, self._ids = model, usable_ids(model)
        self._max_context = max_context
        self._max_step_tokens = max(max_step_tokens, max_slots)
        self._waiting: list[Request] = []
        self._direct = start_direct(model)
        self._cache = KVCache(model, max_slots, max_context)
        self._sequences = Sequences(self._cache, max_slots)
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
        request = Request(
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
        self._sequences.release(session)

    async def forget(self) -> None:
        """Clears the cache; see `Engine.forget`.

        Raises:
            EngineError: Requests still run after minutes.
        """
        await self.drain()
        self._sequences.clear()

    async def sleep(self) -> None:
        """Frees a large cache on a CPU; the weights are the learner's.

        Raises:
            EngineError: Requests still run after minutes.
        """
        await self.forget()
        self._cache.lend()

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Clears the cache; the engine already shares the learner's weights.

        Raises:
            EngineError: Requests still run after minutes.
        """
        await self.forget()
        if self._direct is not None and not DirectForward.fits(self._model):
            self._direct = None  # such as after an adapter was added
        if self._direct is not None:
            self._direct.forget()
        self._cache.check_weights()
        self.weights_version = version

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Clears the cache; see `Engine.update_in_flight`.

        The next step computes the keys and values of each request anew.
        """
        self._sequences.forget()
        if self._direct is not None:
            self._direct.forget()
        self._cache.check_weights()
        for request in self._requests():
            request.versions.append((version, len(request.token_ids)))
        self.weights_version = version

    async def drain(self) -> None:
        """Waits until no request is in flight.

        Raises:
            EngineError: Requests still run after minutes.
        """
        if self._in_flight():  # some may be cancelled, which the next step notices
            self._ensure_running()
            await drained(self._in_flight)

    def close(self) -> None:
        """Frees the cache; requests in flight and later ones raise EngineError."""
        self._closed = True
        if self._pump is None or self._pump.done():  # else it may be using the cache
            self._cache.drop()

    def _in_flight(self) -> int:
        return self._sequences.requests + len(self._waiting)

    def _requests(self) -> list[Request]:
        running = [request for slot in self._sequences.running() for request in slot.requests]
        return running + self._waiting

    async def _run(self) -> None:
        try:
            while self._in_flight():
                if self._closed:
                    raise EngineError("the engine is closed")
                waiting = [r for r in self._waiting if not r.future.done()]
                self._waiting = self._sequences.admit(waiting)
                self._step()
                # Lets a finished episode request its next turn before the next step.
                await asyncio.sleep(0)
        except Exception as error:
            for request in self._requests():
                if not request.future.done():
                    request.future.set_exception(error)
            self._waiting = []
            self._sequences.clear()
        finally:
            if self._closed:
                self._cache.drop()

    def _step(self) -> None:
        sequences = self._sequences
        for slot in sequences.running():
            if cancelled := [r for r in slot.requests if r.future.done()]:
                sequences.leave(slot, cancelled)
        rows = sequences.running()
        if not rows:
            return
        sequences.finish_copies()
        feeds = self._feeds(rows)
        logits = self._cache.forward(
            self._model,
            [slot.index for slot in rows],
            [len(slot.tokens) for slot in rows],
            feeds,
            self._direct if self._direct is not None and self._direct.usable else None,
            [slot.family for slot in rows],
        )
        self.fed_tokens += sum(map(len, feeds))
        for slot, feed in zip(rows, feeds, strict=True):
            slot.tokens.extend(feed)
            del slot.pending[: len(feed)]
        self._sample(rows, logits)

    def _feeds(self, rows: list[Slot]) -> list[list[int]]:
        spare = self._max_step_tokens - len(rows)
        feeds = []
        for slot in rows:
            size = min(len(slot.pending), 1 + spare)
            spare -= size - 1
            feeds.append(slot.pending[:size])
        return feeds

    def _sample(self, rows: list[Slot], logits: Tensor) -> None:
        ready = [(n, r) for n, slot in enumerate(rows) if not slot.pending for r in slot.requests]
        if not ready:
            return
        tokens, logprobs = sample(
            logits[..., : self._ids],
            [request.sampling.temperature for _, request in ready],
            [request.draw() for _, request in ready],
            [n for n, _ in ready],
        )
        drawn = zip(tokens, logprobs, strict=True)
        for slot in [slot for slot in rows if not slot.pending]:
            parts: dict[int, list[Request]] = {}
            ended = []
            for request in slot.requests:
                token, logprob = next(drawn)
                request.token_ids.append(token)
                request.logprobs.append(logprob)
                if self._ended(request):
                    ended.append(request)
                else:
                    parts.setdefault(token, []).append(request)
            if ended:
                self._sequences.leave(slot, ended)
            self._sequences.part(slot, parts)
        if isnan(sum(logprobs)):  # its keys and values would spoil later sequences of the slot
            self._cache.drop()
            self._sequences.forget()

    def _ended(self, request: Request) -> bool:
        """Completes a request if its last token ends the action, or came from no distribution."""
        stopped = request.sampling.ended(request.token_ids)
        ended = stopped or isnan(request.logprobs[-1])
        if not ended and len(request.token_ids) < request.sampling.max_tokens:
            return False
        reason = "stop" if stopped else "length"
        request.future.set_result(
            Completion.of(request.token_ids, request.logprobs, reason, request.versions)
        )
        return True


def sample(
    logits: Tensor,
    temperatures: Sequence[float],
    draws: Sequence[float],
    rows: Sequence[int] | None = None,
) -> tuple[list[int], list[float]]:
    """Samples ids by inverse transform sampling; returns them and their log-probabilities.

    A GPU is waited for once, for the results. A distribution is computed once for neighbours that
    sample from the same row at the same temperature; letter D.

    Args:
        logits: (R, V)
        temperatures: (B,); 0 takes the most likely id and its log-probability at temperature 1.
        draws: (B,) uniform numbers in [0, 1).
        rows: (B,) the row of each; None for one of each row.
    """
    rows = range(len(draws)) if rows is None else rows
    row_D, temperature_D, index_B, nth_B = _distributions(rows, temperatures)
    draw_DN = np.zeros((len(row_D), nth_B.max() + 1))
    draw_DN[index_B, nth_B] = draws
    scale_D = np.where(temperature_D == 0, 1.0, temperature_D).astype(np.float32)
    arrays = [row_D, scale_D, temperature_D == 0, draw_DN, index_B, nth_B]
    picked_rows, scale, greedy, drawn, places, nth = upload(arrays, logits.device)
    if not np.array_equal(row_D, np.arange(len(logits))):
        logits = logits.index_select(0, picked_rows)
    size = max(1, _MOST_LOGITS // logits.shape[-1]) if logits.device.type == "cpu" else len(row_D)
    parts = []
    for part in (slice(n, n + size) for n in range(0, len(row_D), size)):
        rows_DV = logits[part].float()
        if (scale_D[part] != 1.0).any():
            rows_DV = rows_DV / scale[part, None]
        parts.append(_draw(rows_DV, drawn[part], greedy[part] if 0 in temperatures else None))
    tokens, logprobs = torch.cat(parts, 1)[:, places, nth].tolist()
    return list(map(int, tokens)), logprobs


def _draw(logits_DV: Tensor, draw_DN: Tensor, greedy_D: Tensor | None) -> Tensor:
    """Draws N ids from each of D rows; returns them and their log-probabilities, (2, D, N)."""
    probs = logits_DV.softmax(-1)
    is_large = probs.device.type == "cpu" and probs.shape[-1] >= _LARGE
    ids = _draw_in_blocks(probs, draw_DN) if is_large else _pass(probs, draw_DN)[0]
    if greedy_D is not None:
        ids = torch.where(greedy_D[:, None], probs.argmax(-1, keepdim=True), ids)
    # float64 holds every id and every float32 exactly
    return torch.stack([ids.double(), probs.gather(-1, ids).log().double()])


def _pass(weights_DV: Tensor, draw_DN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where the sums of weights pass a share of the whole; the sums, and these shares."""
    # float64, because rounding in a float32 sum would make the last ids of a large vocabulary rarer
    total = weights_DV.cumsum(-1, dtype=torch.float64)
    target = draw_DN * total[:, -1:]
    ids = torch.searchsorted(total, target, right=True)
    return ids.clamp_(max=weights_DV.shape[-1] - 1), total, target


def _draw_in_blocks(probs_DV: Tensor, draw_DN: Tensor) -> Tensor:
    """Returns the drawn ids, (D, N): first a block of ids, then one of it.

    On a CPU the sums over a large vocabulary take several times as long.
    """
    vocabulary = probs_DV.shape[-1]
    if missing := -vocabulary % _BLOCK:
        probs_DV = pad(probs_DV, (0, missing))
    blocks = probs_DV.view(len(probs_DV), -1, _BLOCK)
    sums = blocks.sum(-1)
    block_DN, total, target = _pass(sums, draw_DN)
    share = (target - total.gather(1, block_DN)) / sums.gather(1, block_DN) + 1.0
    inside = blocks.gather(1, block_DN[..., None].expand(-1, -1, _BLOCK)).flatten(0, 1)
    ids = _pass(inside, share.clamp_(0.0, _BELOW_1).flatten()[:, None])[0]
    return (block_DN * _BLOCK + ids.view_as(block_DN)).clamp_(max=vocabulary - 1)


def _distributions(
    rows: Sequence[int], temperatures: Sequence[float]
) -> tuple[np.ndarray[Any, Any], ...]:
    """Finds the pairs of a row and a temperature, once where neighbours have the same.

    Returns:
        The row and the temperature of each, (D,), and for each that samples, (B,), the index of its
        pair and how many before it have the same.
    """
    row_B, temperature_B = np.array(rows), np.array(temperatures)
    first_B = np.ones(len(row_B), dtype=bool)
    first_B[1:] = (row_B[1:] != row_B[:-1]) | (temperature_B[1:] != temperature_B[:-1])
    first_D, index_B = np.flatnonzero(first_B), np.cumsum(first_B) - 1
    nth_B = np.arange(len(row_B)) - first_D[index_B]
    return row_B[first_D], temperature_B[first_D], index_B, nth_B
