"""An environment that fails on purpose, to see what training makes of failures."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import gymnasium

from gspo_env.env.base import MAX_OBSERVATION
from gspo_env.env.isolated import ISOLATED
from gspo_env.env.registration import make_env
from gspo_env.seeding import derive_seed

KINDS = {
    "exception": "`step` or `reset` raises.",
    "exit": "It raises `SystemExit`.",
    "hang": "It does not return for `hang` seconds; in the main thread it raises.",
    "nan": "The reward is NaN; `reset` returns no text.",
    "type": "The result is not a tuple.",
    "long": "The observation has 10 million characters.",
    "crash": 'The process ends at once; for `rollout.isolation = "process"`.',
}
"""The kinds of failure, each with what it does."""


class Faulty(gymnasium.Wrapper[str, str, str, str]):
    """Wraps an environment; a call of `reset` or `step` fails with a given probability.

    The failures follow from `seed`, the seed of the episode, and the number of environments and
    episodes before, so that a retry does not fail in the same place.

    Args:
        env: The environment, or a specification for `make_env`.
        rates: For each kind of `KINDS`, the share of the calls that fail so.
        seed: Seed of the failures.
        log: File to which every environment with this path, in any process, adds a line for each
            failure, with the kind and its `name`.
        hang: Seconds of a hang.
        env_kwargs: Arguments of an environment that is given by its specification.
    """

    blocking = None
    """Its calls may hang, so they run in a thread whatever the environment declares."""
    _numbers = itertools.count(1)

    def __init__(self, env, rates, seed=0, log="", hang=3600.0, **env_kwargs):
        """See the class."""
        super().__init__(make_env(env, **env_kwargs) if isinstance(env, str) else env)
        self.injected: Counter[str] = Counter()
        """The failures of this environment so far, by kind."""
        self._rates, self._seed, self._log, self._hang = dict(rates), seed, log, hang
        number = next(Faulty._numbers)
        self.name = f"{os.getpid()}.{number}"
        """The environment in the log: its process, and its number there."""
        line = _append(log, f"made {self.name}") if log else number
        self._rng = random.Random(derive_seed("faulty", seed, line))

    def reset(self, *, seed=None, options=None):
        """Begins an episode, or fails."""
        result: Any = self.env.reset(seed=seed, options=options)
        fault = self._fault()
        if fault == "nan":
            return None, {}
        spoilt: tuple[str, dict[str, Any]] = self._spoilt(fault, result)
        return spoilt

    def step(self, action):
        """Takes a turn, or fails."""
        result: Any = self.env.step(action)
        fault = self._fault()
        if fault == "nan":
            return (result[0], float("nan"), *result[2:])
        spoilt: tuple[str, float, bool, bool, dict[str, Any]] = self._spoilt(fault, result)
        return spoilt

    def _fault(self):
        """Draws and performs a failure; returns its kind, or nothing."""
        draw = self._rng.random()
        ends = zip(accumulate(self._rates.values()), self._rates, strict=True)
        kind = next((kind for end, kind in ends if draw < end), "")
        if not kind:
            return ""
        self.injected[kind] += 1
        if self._log:
            _append(self._log, f"{kind} {self.name}")
        perform: dict[str, Callable[[], Any]] = {
            "hang": self._wait,
            "exit": lambda: sys.exit("injected"),
            "crash": lambda: os._exit(66),
        }
        perform.get(kind, lambda: None)()
        if kind in ("exception", "hang"):
            raise RuntimeError(f"injected: {kind}")
        return kind

    def _wait(self):
        """Hangs, but not in the main thread of training, where nothing could end it."""
        if ISOLATED in os.environ or threading.current_thread() is not threading.main_thread():
            time.sleep(self._hang)

    def _spoilt(self, fault, result):
        if fault == "type":
            return "injected"
        return ("a" * 10 * MAX_OBSERVATION, *result[1:]) if fault == "long" else result


def _append(log, line):
    """Adds a line to a file that several processes write; returns the number of lines."""
    with open(log, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{line}\n".encode())
        file.seek(0)
        return file.read().count(b"\n")
