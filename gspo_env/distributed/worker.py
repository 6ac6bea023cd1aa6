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
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gspo_env.chat.tokenizer import ChatTokenizer, HistoryMode
from gspo_env.engines.vllm.requests import ServerAddress, ServerClient, ServerList
from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import Collector, RolloutRequest
from gspo_env.rollout.failures import FaultLog
from gspo_env.rollout.pool import EnvPools
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.tools.tool import Tool
from gspo_env.types import Episode, Fault, Group, Task

logger = logging.getLogger(__name__)

Lines = tuple[tuple[int, str], ...]
"""Lines of a log, each with its level."""

_MAX_LINES = 100
"""Lines of the log that a worker keeps until the trainer takes them."""


def most_episodes(config: RolloutConfig) -> int:
    """Returns the maximum number of episodes in flight of one worker."""
    return config.concurrency // max(1, config.ray_workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSetup:
    """What a worker is made from."""

    make_pool: Callable[[FaultLog], EnvPools]
    """Makes the pool of environments with a log of failures; it can be pickled."""
    tokenizer: Any
    history: HistoryMode
    """See `ChatTokenizer`."""
    end_ids: tuple[int, ...]
    """See `ChatTokenizer`."""
    config: RolloutConfig
    vocab_size: int | None
    servers: ServerList
    """The servers at the start."""
    folder: str = field(default_factory=os.getcwd)
    """Working folder of the trainer, which a worker on the same machine also uses."""
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    """Where the trainer imports from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """The state of a worker."""

    pid: int
    idle: float
    """Seconds since one of its episodes last made progress."""
    stalled: float
    """Seconds since its event loop last ran."""
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
        self._lines = _LogLines()
        logging.getLogger("gspo_env").addHandler(self._lines)
        slots = most_episodes(setup.config)
        self._engine = ServerClient(setup.servers, slots)
        self._pool = setup.make_pool(_SilentFaultLog())
        self.collector = Collector(
            self._engine,
            ChatTokenizer(setup.tokenizer, history=setup.history, end_ids=setup.end_ids),
            self._pool,
            setup.config,
            setup.vocab_size,
            stall_seconds=threading.TIMEOUT_MAX,  # the trainer's log says what is waited for
        )
        self._gate = asyncio.Semaphore(slots)
        self._loop_ran = time.monotonic()
        self._ticking: asyncio.Task[None] | None = None

    async def play(self, request: RolloutRequest, servers: ServerList) -> bytes:
        """Plays a group on the servers of the moment; returns it as `to_bytes` does."""
        self._engine.replace_servers(servers)
        self._ticking = self._ticking or asyncio.create_task(self._tick())
        try:
            return to_bytes(await self.collector.play_group(request, self._gate))
        except Exception as error:
            raise _sendable(error) from None

    async def status(self, servers: ServerList) -> WorkerStatus:
        """Takes over which servers serve, and returns the state; on any event loop."""
        self._engine.replace_servers(servers)
        return WorkerStatus(
            pid=os.getpid(),
            idle=self.collector.idle(),
            stalled=time.monotonic() - self._loop_ran if self._ticking else 0.0,
            waits=self.collector.describe(),
            failed=self._engine.take_failed(),
            lines=self._lines.take(),
        )

    async def close(self) -> Lines:
        """Closes the environments; returns the last lines of the log."""
        self._pool.close()
        logging.getLogger("gspo_env").removeHandler(self._lines)
        return self._lines.take()

    async def _tick(self) -> None:
        while True:
            self._loop_ran = time.monotonic()
            await asyncio.sleep(1.0)


def _sendable(error: Exception) -> Exception:
    """Returns an error that the trainer can read: the same one, if that can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        logger.exception("a group was not played")
        return RolloutError(f"{type(error).__name__}: {error}")
    return error


def to_bytes(group: Group) -> bytes:
    """Pickles a group for `pickle.loads`.

    Tools arrive as their descriptions. Keys of `info` that cannot be pickled arrive as their
    `repr`, as they do from an environment in its own process.
    """
    try:
        return _pickled(group)
    except Exception:  # what an object raises when it is pickled is its own affair
        return _pickled(replace(group, episodes=tuple(map(_plain, group.episodes))))


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """A tool's function belongs to its environment, which stays where it is."""
        if isinstance(value, Tool):
            fields = ("name", "description", "parameters", "strict")
            return partial(Tool, **{name: getattr(value, name) for name in fields}), ()
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


class _SilentFaultLog(FaultLog):
    """Logs nothing: the trainer logs and counts the failures, which come with the episodes."""

    def note(self, task: Task, fault: Fault) -> None:
        """Does nothing."""


class _LogLines(logging.Handler):
    """Keeps warnings and errors for the trainer's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line; drops it if nobody has taken the others for long."""
        if len(self._lines) < _MAX_LINES:
            self._lines.append((record.levelno, record.getMessage()))

    def take(self) -> Lines:
        """Returns the lines since the last call."""
        lines, self._lines = self._lines, []
        return tuple(lines)
