"""What the adapters of other packages' environments share: seeds, isolation and clean text."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import random
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from gspo_env.env.base import MAX_TEXT_LENGTH, Options, ResetResult, StepResult, TextEnv, clean
from gspo_env.errors import ConfigError, MissingExtraError
from gspo_env.seeding import global_generators_kept
from gspo_envs.rows import TaskRows, begin_chat, read_chat

logger = logging.getLogger(__name__)

_LOCK = threading.RLock()


class PrivateRandom:
    """Python's and NumPy's global generators as one environment alone sees them.

    Many packages seed and draw from the global generators; beside other environments that gives
    other episodes for the same seed, and it would reseed the whole program.
    """

    def __init__(self, seed: int) -> None:
        """Begin both streams from a seed."""
        legacy = np.random.RandomState(seed % 2**32)
        self._states = random.Random(seed).getstate(), legacy.get_state()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put the streams in the place of the global ones for a while."""
        with _LOCK, global_generators_kept():
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()


class ForeignEnv(TextEnv):
    """Base of an adapter: a subclass gives `begin` and `act` in terms of the other package.

    Both run under private random streams that the seed decides. An action on which the package
    raises ends the episode: truncated, without reward, `info["env_error"]` says why.
    """

    blocking: bool | None = False  # private streams are installed by one thread at a time
    gives_outcome = False
    draws = True
    """Whether the package draws from global generators; where it does not, many may run at once."""
    _random: PrivateRandom | None = None

    @abstractmethod
    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Begin an episode that the seed decides."""

    @abstractmethod
    def act(self, action: str) -> StepResult:
        """Take an action."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begin an episode with a seed drawn from ours."""
        super().reset(seed=seed, options=options)
        drawn = int(self.np_random.integers(2**31))
        self._random = PrivateRandom(drawn) if self.draws else None
        with self._privately():
            observation, info = self.begin(drawn, options or {})
        return clean(observation, MAX_TEXT_LENGTH), info

    def step(self, action: str) -> StepResult:
        """Take an action.

        Raises:
            EnvironmentContractError: The episode has ended or has not begun.
        """
        self.require_episode()
        action = clean(action, MAX_TEXT_LENGTH)
        with self._privately():
            observation, reward, terminated, truncated, info = self._try(action)
        terminated, truncated = self.end_turn(terminated, truncated)
        return clean(observation, MAX_TEXT_LENGTH), reward, terminated, truncated, info

    def _privately(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._random is None else self._random.installed()

    def _try(self, action: str) -> StepResult:
        try:
            return self.act(action)
        except Exception as error:  # the package's fault, yet an action must not break a run
            reason = f"{type(error).__name__}: {error}"
            logger.warning("%s raised on an action: %s", type(self).__name__, reason, exc_info=True)
            info = {"env_error": reason, "success": False}
            return "Error: this action cannot be taken.", 0.0, False, True, info


class RowEnv(ForeignEnv):
    """Base of an adapter whose seed picks a row; `options={"row": 3}` names it."""

    blocking = True
    draws = False
    _rows: TaskRows
    _seed: int | None = None

    @abstractmethod
    def open(self, row: Any, index: int, seed: int) -> Any:
        """Begin an episode of a row and give its chat."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> ResetResult:
        """Begin an episode of a row.

        Raises:
            ConfigError: The row does not exist or does not fit the environment.
        """
        self._seed = seed
        return super().reset(seed=seed, options=options)

    def begin(self, seed: int, options: dict[str, Any]) -> ResetResult:
        """Begin an episode of the row that the seed picks."""
        row, index = self._rows.pick(self.np_random, self._seed, options.get("row"))
        self.close()
        chat = self.open(row, index, seed)
        name = type(self).__name__.removesuffix("Env")
        self.system_prompt, messages = read_chat(chat, f"{name}: prompt of row {index}")
        return begin_chat(messages, index)


def load(module: str, package: str, extra: str) -> ModuleType:
    """Import a module of another package without its grip on our logging.

    Raises:
        MissingExtraError: The package, or one that it needs, is not installed.
    """
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{package} cannot be imported ({error}): pip install 'gspo-env[{extra}]'."
        ) from error
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


@contextlib.contextmanager
def making(name: str, how: str, *refusals: type[Exception]) -> Iterator[None]:
    """Try something of a package out, under private random streams.

    Args:
        name: What is made.
        how: Follows "cannot be" in the message.
        refusals: What the package raises on wrong arguments.

    Raises:
        ConfigError: The package refused.
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


def check_name(package: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that a package does not know.

    Raises:
        ConfigError: The name is unknown; the message has the nearest.
    """
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(str(name), names, n=3) or names[:3]
        raise ConfigError(f"{package} has no {name!r}, did you mean {' or '.join(near)}?")
