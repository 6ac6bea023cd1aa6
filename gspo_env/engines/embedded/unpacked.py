"""The engine for models that take no packed rows: one sequence a pass, with the model's own cache.

Each session (an episode) keeps the cache that its model makes, so a new turn computes only its new
tokens. A first prompt that another session had is copied, which costs less than one token. Running
requests take turns, one pass each.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gspo_env.batch.packing import upload
from gspo_env.engines.base import Completion, Engine, NamedTensors, Sampling, check_room, drained
from gspo_env.engines.embedded.engine import sample
from gspo_env.errors import EngineError, ModelError
from gspo_env.model.head import usable_ids

_Key = TypeVar("_Key")


class UnbatchedEngine(Engine):
    """Samples from an unmodified `transformers` causal LM with the weights of the learner.

    Args:
        model: The causal LM, with its own attention.
        max_slots: Maximum number of requests that run, and of caches that wait for the next turn;
            a quarter as many are kept of first prompts.
        max_context: Maximum tokens of one sequence.
        whole_turns: Feeds the new tokens of a turn in one pass. Some models continue a cache only
            one token at a time.
    """

    updates_in_flight = True

    def __init__(
        self, model: Any, *, max_slots: int = 128, max_context: int = 4096, whole_turns: bool = True
    ) -> None:
        self._model, self._ids = model, usable_ids(model)
        self._max_slots, self._max_context = max_slots, max_context
        self._whole_turns = whole_turns
        # of sessions that wait for their next turn, and after first prompts; the oldest first
        self._caches: dict[str, ModelCache] = {}
        self._prompts: dict[tuple[int, ...], ModelCache] = {}
        self._running = 0
        self._updates = 0
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
        check_room(prompt_ids, sampling, self._max_context)
        while self._running >= self._max_slots:
            await asyncio.sleep(0)
        if self._closed:
            raise EngineError("the engine is closed")
        self._model.eval()  # layers in training mode that checkpoint would drop the cache
        prefix = self._cache_for(list(prompt_ids), session)
        self._running += 1
        try:
            completion, cache = await self._sample(prefix, list(prompt_ids), sampling)
        finally:
            self._running -= 1
        if session and cache is not None and not self._closed:
            _keep(self._caches, session, cache, self._max_slots)
        return completion

    def _cache_for(self, prompt: list[int], session: str | None) -> ModelCache:
        """Returns a cache of the prompt's first tokens, or of all of them."""
        held = self._caches.pop(session, None) if session else None
        if held is not None and held.tokens == prompt[: min(len(held.tokens), len(prompt) - 1)]:
            return held  # another prompt starts again, because the state cannot go back
        computed = self._prompts.get(tuple(prompt))
        return ModelCache(self._model) if computed is None else computed.copy()

    async def _sample(
        self, cache: ModelCache, prompt: list[int], sampling: Sampling
    ) -> tuple[Completion, ModelCache | None]:
        """Returns the action and the cache; no cache if the weights changed after the last id."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        draw = random.Random(sampling.seed).random
        pending = prompt[len(cache.tokens) :]
        stopped = False
        updates, versions = self._updates, [(self.weights_version, 0)]
        while len(token_ids) < sampling.max_tokens:
            if updates != self._updates:
                updates, cache = self._updates, ModelCache(self._model)
                pending = prompt + token_ids
                versions.append((self.weights_version, len(token_ids)))
            if pending:
                pending = self._feed(cache, pending)
            if not pending and cache.logits is not None:
                [token], [logprob] = sample(
                    cache.logits[..., : self._ids], [sampling.temperature], [draw()]
                )
                token_ids.append(token)
                logprobs.append(logprob)
                stopped = sampling.ended(token_ids)
                if stopped:
                    break
                pending = [token]
            await asyncio.sleep(0)
        reason = "stop" if stopped else "length"
        completion = Completion.of(token_ids, logprobs, reason, versions)
        return completion, cache if updates == self._updates else None

    def _feed(self, cache: ModelCache, pending: list[int]) -> list[int]:
        """Runs one pass; returns the ids that remain."""
        first = not cache.tokens
        size = len(pending) if first or self._whole_turns else 1
        cache.feed(pending[:size])
        self.fed_tokens += size
        if first:
            _keep(self._prompts, tuple(pending), cache.copy(), -(-self._max_slots // 4))
        return pending[size:]

    def release(self, session: str) -> None:
        """Drops the cache of a session."""
        self._caches.pop(session, None)

    async def forget(self) -> None:
        """Drops every cache; see `Engine.forget`."""
        await self.drain()
        self._drop()

    async def sleep(self) -> None:
        """Drops every cache; the weights are the learner's."""
        self._drop()

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Drops every cache; the engine already shares the learner's weights."""
        await self.drain()
        await self.update_in_flight(named_tensors, version)

    async def update_in_flight(self, named_tensors: NamedTensors, version: int) -> None:
        """Drops every cache; each request computes its own anew before its next token."""
        self._drop()
        self._updates += 1
        self.weights_version = version

    async def drain(self) -> None:
        """Waits until no request is in flight.

        Raises:
            EngineError: Requests still run after minutes.
        """
        await drained(lambda: self._running)

    def close(self) -> None:
        """Frees every cache and rejects further requests."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        self._caches.clear()
        self._prompts.clear()


def _keep(caches: dict[_Key, ModelCache], key: _Key, cache: ModelCache, most: int) -> None:
    """Adds a cache; drops the oldest beyond `most`."""
    caches[key] = cache
    while len(caches) > most:
        del caches[next(iter(caches))]


_NAMES = ("past_key_values", "cache_params")
"""The names that models of `transformers` use for their cache."""


class ModelCache:
    """The state of one sequence: keys and values, and convolution and recurrent states.

    It cannot go back: a prompt that does not continue `tokens` needs a new cache.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._state: dict[str, Any] = {}
        self.tokens: list[int] = []
        """The ids that were fed."""
        self.logits: Tensor | None = None
        """Of the last id, (1, V)."""

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Feeds the next ids in one forward pass; returns the logits of the last, (1, V).

        Raises:
            ModelError: The model returns no cache.
        """
        device = next(self._model.parameters()).device
        start = len(self.tokens)
        (new,) = upload([np.array([ids], dtype=np.int64)], device)
        output = self._model(
            input_ids=new,
            position_ids=torch.arange(start, start + len(ids), device=device)[None],
            use_cache=True,
            logits_to_keep=1,
            **self._state,
        )
        self._state = {name: output[name] for name in _NAMES if output.get(name) is not None}
        if not self._state:
            raise ModelError(f"{type(self._model).__name__} returns no cache that can be kept")
        self.tokens.extend(ids)
        logits: Tensor = output.logits[:, -1]
        self.logits = logits
        return logits

    def copy(self) -> ModelCache:
        """Returns an independent copy, to continue the same tokens in another way."""
        other = ModelCache(self._model)
        other._state, other.tokens = copy.deepcopy(self._state), list(self.tokens)
        other.logits = self.logits
        return other
