"""The engine for models that take no packed rows: one sequence a pass, with the model's own cache.

Each session (an episode) keeps the cache that its model makes, so a new turn computes only its new
tokens. Running requests take turns, one pass each.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from gspo_env.engines.base import Completion, NamedTensors, Sampling, check_room
from gspo_env.engines.transformers import sample
from gspo_env.errors import EngineError
from gspo_env.model.own_cache import OwnCache


class UnbatchedEngine:
    """Samples from a `transformers` causal LM as it is, with the weights of the learner.

    Args:
        model: The causal LM, with its own attention.
        max_slots: Maximum number of requests that run, and of caches that wait for the next turn.
        max_context: Maximum tokens of one sequence.
        whole_turns: Feeds the new tokens of a turn in one pass. Some models continue a cache only
            one token at a time.
    """

    def __init__(
        self, model: Any, *, max_slots: int = 128, max_context: int = 4096, whole_turns: bool = True
    ) -> None:
        self._model = model
        self._max_slots, self._max_context = max_slots, max_context
        self._whole_turns = whole_turns
        self._caches: dict[str, OwnCache] = {}  # of sessions that wait; the oldest first
        self._running = 0
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
        cache = self._caches.pop(session, None) if session else None
        prompt = list(prompt_ids)
        if cache is None or cache.tokens != prompt[: len(cache.tokens)] or cache.tokens == prompt:
            cache = OwnCache(self._model)  # the state cannot go back, so it starts again
        self._running += 1
        try:
            completion = await self._sample(cache, prompt, sampling)
        finally:
            self._running -= 1
        if session and not self._closed:
            self._caches[session] = cache
            while len(self._caches) > self._max_slots:
                del self._caches[next(iter(self._caches))]
        return completion

    async def _sample(self, cache: OwnCache, prompt: list[int], sampling: Sampling) -> Completion:
        token_ids: list[int] = []
        logprobs: list[float] = []
        draw = random.Random(sampling.seed).random
        pending = prompt[len(cache.tokens) :]
        while len(token_ids) < sampling.max_tokens:
            size = len(pending) if self._whole_turns or not cache.tokens else 1
            logits = cache.feed(pending[:size])
            self.fed_tokens += size
            pending = pending[size:]
            if not pending:
                [token], [logprob] = sample(logits, [sampling.temperature], [draw()])
                token_ids.append(token)
                logprobs.append(logprob)
                if token in sampling.stop_ids:
                    break
                pending = [token]
            await asyncio.sleep(0)
        return Completion(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason="stop" if token_ids[-1] in sampling.stop_ids else "length",
            weights_version=self.weights_version,
        )

    def release(self, session: str) -> None:
        """Drops the cache of a session."""
        self._caches.pop(session, None)

    async def sleep(self) -> None:
        """Drops every cache; the weights are the learner's."""
        self._caches.clear()

    async def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Drops every cache; the engine already shares the learner's weights."""
        if self._running:
            raise EngineError("weights cannot change while requests are running")
        self._caches.clear()
        self.weights_version = version

    def close(self) -> None:
        """Frees every cache and rejects further requests."""
        self._closed = True
        self._caches.clear()
