"""The event loop of an engine, which takes requests from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from gspo_env.errors import ConfigError, EngineError
from gspo_env.runtime.loops import rare_garbage_collection, run, run_alone, running_loop

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
