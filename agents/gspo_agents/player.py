"""One player of one conversation, and the event loop of the engine that samples for it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from gspo_env.chat.conversation import Transcript
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines import Completion, Sampling
from gspo_env.errors import ConfigError, EngineError
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runtime.loops import rare_garbage_collection, run, run_alone, running_loop
from gspo_env.types import Prompt, Role

T = TypeVar("T")
_LOOP = "players"
"""The background loop of calls outside of a run."""
_PATIENCE = 60.0
"""Seconds that a run waits for calls of `act` that began before it."""


class EngineLoop:
    """Runs an engine on one event loop, and takes requests for it from other threads."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alone = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine that uses the engine; see `run_alone`.

        Raises:
            ConfigError: Another thread runs one.
        """

        async def main() -> T:
            self._loop = asyncio.get_running_loop()
            try:
                with rare_garbage_collection():
                    return await coroutine
            finally:
                self._loop = None

        if self._loop is not None or not self._alone.acquire(timeout=_PATIENCE):
            coroutine.close()
            raise ConfigError("the agent is playing; expected calls of act alone until it is done")
        try:
            return run_alone(main())
        finally:
            self._alone.release()

    def wait(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """Runs a coroutine on the loop of `run`, or alone if nothing runs; waits for it.

        Raises:
            ConfigError: It is called on the loop of `run`, which cannot wait for itself.
            EngineError: The run ended, or there was no answer in time.
        """
        loop, current = self._loop, running_loop()
        if loop is not None and loop is current:
            coroutine.close()
            raise ConfigError(
                "act was called on the event loop of the rollout, which cannot wait for itself: "
                "declare `blocking = True` in the environment, so that it runs in a thread"
            )
        try:
            if loop is not None:
                return asyncio.run_coroutine_threadsafe(coroutine, loop).result(seconds)
            with self._alone:  # each use takes at most `seconds`
                return run(coroutine, _LOOP, seconds)  # one loop: an engine keeps clients for it
        except TimeoutError as error:
            raise EngineError(f"an action was not sampled within {seconds:g} s") from error
        except CancelledError as error:
            raise EngineError("the run ended while an action was sampled") from error


class Player:
    """One player in one conversation; what it samples is kept token by token.

    Args:
        chat: The tokenizer.
        prompt: What the player reads before the first observation.
        generate: Samples an action for token ids.
        limits: Limits of the rollout.
        temperature: 0 is greedy.
    """

    def __init__(
        self,
        chat: ChatTokenizer,
        prompt: Prompt,
        generate: Callable[[list[int], Sampling], Completion],
        limits: RolloutConfig,
        temperature: float = 0.0,
    ) -> None:
        self._chat, self._limits, self._temperature = chat, limits, temperature
        self._transcript, self._generate = Transcript(chat, prompt), generate

    @property
    def ids(self) -> list[int]:
        """The token ids of the conversation so far."""
        return self._transcript.ids

    def __call__(self, rng: random.Random, observation: str) -> str:
        """Returns an action as an opponent of an environment; `rng` draws the seed."""
        return self.act(observation, seed=rng.getrandbits(62))

    def act(self, observation: str, role: Role = "user", seed: int = 0) -> str:
        """Returns the action that follows an observation.

        Raises:
            EngineError: The conversation is longer than `rollout.max_context`.
        """
        self._transcript.read(observation, role)
        sampling = Sampling(
            max_tokens=self._limits.max_turn_tokens,
            temperature=self._temperature,
            stop_ids=self._chat.stop_ids,
            seed=seed,
        )
        done = self._generate(self._transcript.ids, sampling)
        self._transcript.write(done.token_ids)
        return self._chat.decode(done.token_ids)
