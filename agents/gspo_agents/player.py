"""Players of a game: the agent that trains, and frozen ones from a folder."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

import torch

from gspo_env.chat.conversation import Transcript
from gspo_env.chat.transcript import ChatTokenizer
from gspo_env.config import from_dict
from gspo_env.engines import Completion, Engine, Sampling, Transformers, check_completion
from gspo_env.errors import ConfigError, EngineError
from gspo_env.model.load import load_model
from gspo_env.model.threads import use_threads
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.runtime.loops import rare_garbage_collection, run, run_alone
from gspo_env.trust import read_saved
from gspo_env.types import Prompt, Role

T = TypeVar("T")
_LOOP = "players"
"""The background loop of frozen agents, and of calls from an event loop of another owner."""
_PATIENCE = 60.0
"""Seconds that a run waits for calls of `act` that began before it."""
_SLOTS = 256
"""Maximum number of sequences in the cache of a frozen agent."""


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
        loop, own = self._loop, _running()
        if loop is not None and loop is own:
            coroutine.close()
            raise ConfigError(
                "act was called on the event loop of the rollout, which cannot wait for itself: "
                "declare `blocking = True` in the environment, so that it runs in a thread"
            )
        try:
            if loop is not None:
                return asyncio.run_coroutine_threadsafe(coroutine, loop).result(seconds)
            with self._alone:  # each use takes at most `seconds`
                if own is not None:
                    return run(coroutine, _LOOP, seconds)
                return asyncio.run(asyncio.wait_for(coroutine, seconds))
        except TimeoutError as error:
            raise EngineError(f"an action was not sampled within {seconds:g} s") from error
        except CancelledError as error:
            raise EngineError("the run ended while an action was sampled") from error


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


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


class FrozenAgent:
    """A trained model that only plays, with an engine of its own that all environments share.

    Args:
        folder: Folder of a run or of a model, read as data: of its settings only numbers are used.

    Raises:
        ConfigError: The saved settings are damaged.
        ModelError: The folder has no model that can be loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        saved = read_saved(folder)
        tree = saved.tree.get("rollout", {}) if saved else {}
        self.limits = from_dict({"rollout": tree}).rollout
        self.model, tokenizer = load_model(str(folder))
        if torch.cuda.is_available():
            self.model.to("cuda")
        use_threads(self.model)
        self.chat = ChatTokenizer(tokenizer)
        self._size = self.model.get_input_embeddings().num_embeddings
        self._engine: Engine = Transformers().start(
            self.model,
            max_slots=min(self.limits.concurrency, _SLOTS),
            max_context=self.limits.max_context,
        )

    @classmethod
    def load(cls, folder: str | Path) -> FrozenAgent:
        """Returns the agent of a folder, which is loaded once in a process."""
        path = Path(folder).resolve()
        with _LOCK:
            if path not in _LOADED:
                _LOADED[path] = cls(path)
            return _LOADED[path]

    def player(self, prompt: Prompt | None = None, temperature: float | None = None) -> Player:
        """Returns a player for one episode.

        Args:
            prompt: What it reads before the first observation.
            temperature: The one that it was trained with by default; 0 is greedy.
        """
        heat = self.limits.temperature if temperature is None else temperature
        return Player(self.chat, prompt or Prompt(), self._generate, self.limits, heat)

    def _generate(self, ids: list[int], sampling: Sampling) -> Completion:
        try:
            done = run(self._engine.generate(ids, sampling), _LOOP, self.limits.episode_timeout)
        except TimeoutError as error:
            seconds = self.limits.episode_timeout
            raise EngineError(f"an action was not sampled within {seconds:g} s") from error
        check_completion(done, sampling, self._size)
        return done


_LOADED: dict[Path, FrozenAgent] = {}
_LOCK = threading.Lock()
