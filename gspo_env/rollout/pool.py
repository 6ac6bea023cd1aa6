"""A pool of reused environments, which runs their calls on the event loop or in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from gspo_env.env.base import TextEnvironment, attribute


@dataclass(slots=True)
class EnvPool:
    """Environments that are made once and reset for every episode.

    Environments that declare `blocking = False` run on the event loop, without overhead; the calls
    of all others, and the steps for which `blocks` is true, run in threads.
    """

    make: Callable[[], TextEnvironment]
    threads: int = 128
    blocking: bool | None = None
    """The environments' own `blocking`, read from the first one."""
    gives_outcome: bool | None = None
    """Whether finished episodes have an `episodic_reward`; None until it is known."""
    outcome_if_cut: float = 0.0
    _made: bool = False
    _idle: list[TextEnvironment] = field(default_factory=list)
    _executor: ThreadPoolExecutor | None = None

    def acquire(self) -> TextEnvironment:
        """Returns an environment that is not in use."""
        if self._idle:
            return self._idle.pop()
        env = self.make()
        if not self._made:
            self._made = True
            if self.blocking is None:
                self.blocking = attribute(env, "blocking", None)
            self.gives_outcome = attribute(env, "gives_outcome", None)
            self.outcome_if_cut = attribute(env, "outcome_if_cut", 0.0)
        return env

    def give_back(self, env: TextEnvironment) -> None:
        """Puts an environment back for the next episode."""
        self._idle.append(env)

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an environment call: on the event loop if it does not block, else in a thread."""
        if self.blocking is False and not _blocks(function, args):
            return function(*args, **kwargs)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="env")

        def run() -> Any:
            try:
                return function(*args, **kwargs)
            except StopIteration as error:  # asyncio futures do not accept it
                raise RuntimeError(f"StopIteration: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    def close(self) -> None:
        """Closes every environment."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        if self.blocking is not False:  # an environment that blocks in step may block in close
            with ThreadPoolExecutor(self.threads) as closing:
                list(closing.map(lambda env: env.close(), self._idle))
            self._idle.clear()
        while self._idle:
            self._idle.pop().close()


def _blocks(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Returns whether the environment declares that this step may take long."""
    env = getattr(function, "__self__", None)
    if not args or not isinstance(env, gymnasium.Env):
        return False
    return bool(env.has_wrapper_attr("blocks") and env.get_wrapper_attr("blocks")(*args))
