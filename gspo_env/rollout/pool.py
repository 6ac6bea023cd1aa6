"""Environments that are reused, and where their calls run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gspo_env.env.base import TextEnvironment

logger = logging.getLogger(__name__)

_WAITING = 1e-3
"""Seconds off the processor in one environment call that make it a waiting one."""
_TRIALS = 8


@dataclass(slots=True)
class EnvPool:
    """Environments that are made once and reset for every episode.

    Calls that turn out to wait (sleep, network, a subprocess) move to threads; quick ones stay on
    the event loop, where they cost nothing and run in the same order every time.
    """

    make: Callable[[], TextEnvironment]
    threads: int = 128
    _idle: list[TextEnvironment] = field(default_factory=list)
    _executor: ThreadPoolExecutor | None = None
    _calls: int = 0
    _waits: int = 0
    blocking: bool | None = None

    def acquire(self) -> TextEnvironment:
        """An environment that nobody else uses."""
        if self._idle:
            return self._idle.pop()
        env = self.make()
        if self.blocking is None and env.has_wrapper_attr("blocking"):
            self.blocking = env.get_wrapper_attr("blocking")
        return env

    def give_back(self, env: TextEnvironment) -> None:
        """Keeps an environment for the next episode."""
        self._idle.append(env)

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an environment call on the event loop or, if such calls wait, in a thread."""
        if self.blocking:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="env")
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))
        if self.blocking is None and self._calls < 4 * _TRIALS:
            return self._try(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _try(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wall, busy = time.perf_counter(), time.thread_time()
        result = function(*args, **kwargs)
        waited = time.perf_counter() - wall - (time.thread_time() - busy)
        self._calls += 1
        self._waits += waited > _WAITING
        if self._calls >= _TRIALS and 2 * self._waits > self._calls:
            self.blocking = True
            logger.info("environment calls wait: they run in threads from now on")
        return result

    def close(self) -> None:
        """Closes every environment."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        if self.blocking:  # what waits in step may wait in close, and then does so side by side
            with ThreadPoolExecutor(self.threads) as closing:
                list(closing.map(lambda env: env.close(), self._idle))
            self._idle.clear()
        while self._idle:
            self._idle.pop().close()
