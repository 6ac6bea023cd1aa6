"""Base classes of adapters to other packages' environments: seeds, isolation, clean text."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import random
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from gspo_env.env.base import MAX_TEXT_LENGTH, Options, ResetResult, StepResult, TextEnv
from gspo_env.errors import ConfigError, MissingExtraError, raised_as
from gspo_env.redaction import clean
from gspo_env.runtime.threads import log_once
from gspo_env.seeding import fingerprint, global_generators_kept
from gspo_envs.data.rows import TaskRows, as_json, begin_chat, read_chat

_LOCK = threading.RLock()
_LARGE = 4096
"""Items of an attribute that is not part of a task key."""


class PrivateRandom:
    """Private states of Python's and NumPy's global generators for one environment.

    Many packages seed and draw from the global generators. Next to other environments, the same
    seed would then give other episodes, and the whole program would be reseeded.
    """

    def __init__(self, seed: int) -> None:
        """Seeds both streams."""
        legacy = np.random.RandomState(seed % 2**32)
        self._states = random.Random(seed).getstate(), legacy.get_state()
        self._installed = contextlib.ExitStack()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replaces the global streams by these inside the context."""
        with contextlib.ExitStack() as stack:
            self._installed = stack
            stack.enter_context(self._swapped())
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside `installed`: puts the global streams back, so that others may go on."""
        self._installed.close()
        try:
            yield
        finally:
            self._installed.enter_context(self._swapped())

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        with _LOCK, global_generators_kept():
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()


class ForeignEnv(TextEnv):
    """Base of an adapter: a subclass implements `begin` and `act` with the other package.

    Both run with private random streams from the seed. If the package raises on an action, the
    episode is truncated without reward, and `info["env_error"]` has the reason.
    """

    blocking: bool | None = False  # only one thread at a time may install private streams
    credit_score = "turns"
    draws = True
    """Whether the package draws from global generators; if not, several environments may run at
    once."""
    _random: PrivateRandom | None = None

    @abstractmethod
    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Begins an episode that follows from the seed."""

    @abstractmethod
    def act(self, action: str) -> StepResult:
        """Takes an action."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins an episode with a seed drawn from ours."""
        super().reset(seed=seed, options=options)
        drawn = int(self.np_random.integers(2**31))
        self._random = PrivateRandom(drawn) if self.draws else None
        with self._privately():
            observation, info = self.begin(drawn, options or {})
        return clean(observation, self.observation_space.max_length), info

    def step(self, action: str) -> StepResult:
        """Takes an action.

        Raises:
            EnvironmentContractError: The episode has ended or has not begun.
        """
        self.require_episode()
        action = clean(action, MAX_TEXT_LENGTH)
        with self._privately():
            observation, reward, terminated, truncated, info = self._try(action)
        terminated, truncated = self.end_turn(terminated, truncated)
        observation = clean(observation, self.observation_space.max_length)
        return observation, reward, terminated, truncated, info

    def _privately(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._random is None else self._random.installed()

    def _elsewhere(self) -> contextlib.AbstractContextManager[None]:
        """Inside `begin` and `act`: lets other environments play while this one waits."""
        return contextlib.nullcontext() if self._random is None else self._random.paused()

    def _try(self, action: str) -> StepResult:
        try:
            return self.act(action)
        except Exception as error:  # an error of the package must not break a run
            log_once(type(self).__name__, error, "its episode is cut, and ", trace=True)
            info = {"env_error": f"{type(error).__name__}: {error}", "success": False}
            return "Error: this action cannot be taken.", 0.0, False, True, info


class RowEnv(ForeignEnv):
    """Base of an adapter whose seed picks a row; `options={"row": 3}` selects row 3."""

    blocking = True
    draws = False
    _rows: TaskRows
    _seed: int | None = None

    @abstractmethod
    def open(self, row: Any, index: int, seed: int) -> Any:
        """Begins an episode of a row and returns its chat."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begins an episode of a row.

        Raises:
            ConfigError: The row does not exist or does not fit the environment.
        """
        self._seed = seed
        return super().reset(seed=seed, options=options)

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Begins an episode of the row that the seed picks."""
        row, index = self._rows.pick(self.np_random, self._seed, options.get("row"))
        self.close()
        chat = self.open(row, index, seed)
        name = type(self).__name__.removesuffix("Env")
        self.system_prompt, messages = read_chat(chat, f"{name}: prompt of row {index}")
        return begin_chat(messages, index, row)


def load(module: str, package: str, extra: str = "", *, install: str = "") -> ModuleType:
    """Imports a module of another package and keeps our logging unchanged.

    Args:
        module: The module.
        package: The package, for the message.
        extra: The extra that installs it.
        install: The arguments of pip for a package that no extra can install.

    Raises:
        MissingExtraError: The package, or one that it needs, is not installed.
    """
    handlers, level = logging.root.handlers[:], logging.root.level
    install = install or f"'gspo-env[{extra}]'"
    what, hint = f"{package} cannot be imported", f"; pip install {install}"
    try:
        with raised_as(MissingExtraError, what, ModuleNotFoundError, mend=hint):
            return importlib.import_module(module)
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def snapshot(*parts: Mapping[str, Any]) -> str:
    """Returns a task key: a hash of the plain attributes of a game that has just begun.

    Attributes that JSON cannot hold, large ones (word lists) and seeds are left out.
    """
    plain = []
    for name, value in (item for part in parts for item in part.items()):
        if name == "seed" or (hasattr(value, "__len__") and len(value) > _LARGE):
            continue
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            plain.append((name, as_json(value)))
    return fingerprint(repr(sorted(plain)))


@contextlib.contextmanager
def making(name: str, how: str, *refusals: type[Exception]) -> Iterator[None]:
    """Tries out something of a package with private random streams.

    Args:
        name: Name of what is made.
        how: Follows "cannot be" in the message.
        refusals: Exceptions that the package raises on wrong arguments.

    Raises:
        ConfigError: The package raised one of `refusals`.
        MissingExtraError: It needs word lists of NLTK, or another package.
    """
    try:
        with PrivateRandom(0).installed():
            yield
    except Exception as error:
        if isinstance(error, LookupError) and "nltk" in str(error).lower():
            command = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
            raise MissingExtraError(f"{name} needs word lists of NLTK: {command}") from error
        if isinstance(error, ImportError):
            raise MissingExtraError(f"{name} needs another package: {error}") from error
        if isinstance(error, refusals):
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{name} cannot be {how}: {reason}") from error
        raise


def check_name(package: str, name: str, names: Iterable[str]) -> None:
    """Rejects a name that a package does not have.

    Raises:
        ConfigError: The name is unknown; the message lists the nearest.
    """
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=3) or names[:3]
        raise ConfigError(f"{package} has no {name!r}, did you mean {' or '.join(near)}?")
