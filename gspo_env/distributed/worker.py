"""What runs in the process of a worker: environments, transcripts and requests of whole groups.

Imports no torch. Nothing here knows how the process was started or how messages reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_env.chat.transcript import ChatTokenizer, History
from gspo_env.engines.vllm.requests import ServerAddress, ServerClient, ServerList
from gspo_env.env.isolated import described_tool
from gspo_env.env.tools import Tool
from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import Collector, RolloutRequest
from gspo_env.rollout.failures import FaultLog
from gspo_env.rollout.gate import Gate
from gspo_env.rollout.pool import EnvPool, EnvPools
from gspo_env.rollout.progress import Heartbeat
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Episode, Fault, Group, Task

logger = logging.getLogger(__name__)

Lines = tuple[tuple[int, str], ...]
"""Lines of a log, each with its level."""

_MOST_LINES = 100
"""Most lines of the log that a worker keeps until the trainer takes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What a worker is made from."""

    make_pool: Callable[[FaultLog], EnvPool | EnvPools]
    """Makes the pool of environments with a log of failures; it can be pickled."""
    tokenizer: Any
    history: History
    """See `ChatTokenizer`."""
    config: RolloutConfig
    vocab_size: int | None
    fleet: ServerList
    """The servers at the start."""
    folder: str = field(default_factory=os.getcwd)
    """Working folder of the trainer, which a worker on the same machine takes over."""
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    """Where the trainer imports from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """A group for a worker to play."""

    job: RolloutRequest
    fleet: ServerList
    gives_outcome: bool | None
    """What the trainer knows; see `EnvPool.gives_outcome`."""
    counts: bool = True
    """Whether the time of its episodes is given back; see `Played.seconds`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What a worker gives back for an order."""

    group: Group
    unfit: tuple[int, ...] = ()
    """Tokens of each first prompt that did not fit."""
    seconds: float = 0.0
    """Time of the episodes in flight that count, since the last such group was given back, added
    up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """What a worker says of itself."""

    pid: int
    idle: float
    """Seconds since one of its episodes came further."""
    stalled: float
    """Seconds since its event loop turned."""
    waits: str
    """What its episodes wait for."""
    failed: Mapping[ServerAddress, str] = field(default_factory=dict)
    """Servers that failed, with the reasons."""
    lines: Lines = ()
    """New lines of its log."""


class Worker:
    """Plays groups in this process, for a trainer in another one."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Makes what all groups share."""
        sys.path += [place for place in setup.path if place not in sys.path]
        with contextlib.suppress(OSError):  # another machine may not have the folder
            os.chdir(setup.folder)
        self._lines = _Lines()
        logging.getLogger("gspo_env").addHandler(self._lines)
        most = setup.config.worker_episodes
        self._engine = ServerClient(setup.fleet, most)
        chat = ChatTokenizer(setup.tokenizer, history=setup.history)
        self._pool = setup.make_pool(_Unlogged())
        self._collector = Collector(self._engine, chat, self._pool, setup.config, setup.vocab_size)
        self._gate = Gate(most)
        self._counted = self._gate.part()
        # the trainer's log says who is waited for
        self._collector._heartbeat = Heartbeat(lambda: 0.0, str)
        self._playing = 0
        self._turned = time.monotonic()
        self._turning: asyncio.Task[None] | None = None

    async def play(self, order: GroupRequest) -> bytes:
        """Plays a group; returns a pickled `Played`."""
        self._engine.see(order.fleet)
        if order.gives_outcome is not None:
            self._pool.of(order.job.task.env_id).gives_outcome = order.gives_outcome
        self._turning = self._turning or asyncio.create_task(self._turn())
        self._playing += 1
        try:
            gate = self._counted if order.counts else self._gate
            group = await self._collector.play(order.job, gate)
        except Exception as error:
            raise _sendable(error) from None
        finally:
            self._playing -= 1
        unfit = tuple(self._collector._unfit)
        self._collector._unfit.clear()
        seconds = self._counted.episode_seconds() if order.counts else 0.0
        return to_bytes(Played(group=group, unfit=unfit, seconds=seconds))

    def beat(self, fleet: ServerList) -> WorkerStatus:
        """Takes over which servers serve, and says what the episodes wait for; from any thread."""
        self._engine.see(fleet)
        waits = self._collector._waits
        return WorkerStatus(
            pid=os.getpid(),
            idle=waits.idle(),
            stalled=time.monotonic() - self._turned if self._turning else 0.0,
            waits=waits.describe(),
            failed=self._engine.take_failed(),
            lines=self._lines.take(),
        )

    def close(self) -> Lines:
        """Closes the environments; returns the last lines of the log."""
        self._pool.close()
        logging.getLogger("gspo_env").removeHandler(self._lines)
        return self._lines.take()

    async def _turn(self) -> None:
        while True:
            self._turned = time.monotonic()
            await asyncio.sleep(1.0)


def _sendable(error: Exception) -> Exception:
    """Returns an error that the trainer can read: the same one, if that can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        logger.exception("a group was not played")
        return RolloutError(f"{type(error).__name__}: {error}")
    return error


def to_bytes(played: Played) -> bytes:
    """Pickles a group.

    Tools arrive as their descriptions. Keys of `info` that cannot be pickled arrive as their
    `repr`, as they do from an environment in a process of its own.
    """
    try:
        return _pickled(played)
    except Exception:  # what an object raises when it is pickled is its own affair
        episodes = tuple(map(_plain, played.group.episodes))
        return _pickled(replace(played, group=replace(played.group, episodes=episodes)))


def from_bytes(data: bytes) -> Played:
    """Inverse of `to_bytes`."""
    played: Played = pickle.loads(data)
    return played


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """A tool's function belongs to its environment, which stays where it is."""
        if isinstance(value, Tool):
            return described_tool, (value.name, value.description, value.parameters, value.strict)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    sink = io.BytesIO()
    _Pickler(sink, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return sink.getvalue()


def _plain(episode: Episode) -> Episode:
    reset = replace(episode.reset, extra=_shown(episode.reset.extra))
    turns = tuple(
        replace(turn, info=replace(turn.info, extra=_shown(turn.info.extra)))
        for turn in episode.turns
    )
    return replace(episode, reset=reset, turns=turns)


def _shown(extra: Mapping[str, Any]) -> dict[str, Any]:
    shown = {}
    for key, value in extra.items():
        try:
            _pickled(value)
            shown[key] = value
        except Exception:
            shown[key] = repr(value)
    return shown


class _Unlogged(FaultLog):
    """Says nothing: the trainer logs and counts the failures, which come with the episodes."""

    def note(self, task: Task, fault: Fault) -> None:
        """Does nothing."""


class _Lines(logging.Handler):
    """Keeps warnings and errors for the trainer's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line; drops it if nobody has taken the others for long."""
        if len(self._kept) < _MOST_LINES:
            self._kept.append((record.levelno, record.getMessage()))

    def take(self) -> Lines:
        """Returns the lines since the last call."""
        kept, self._kept = self._kept, []
        return tuple(kept)
