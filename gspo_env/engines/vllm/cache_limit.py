"""Concurrency that follows vLLM's cache: how many requests run follows from vLLM's own metrics.

A request starts if the keys and values of all requests in flight will fit until they end, judged by
the lengths of the last actions. Its blocks are counted as vLLM does: equal prefixes once. Episodes
that are under way go first; a new one starts only if it leaves some room.

Source: the Past-Future scheduler (arXiv 2507.10150), which predicts the peak of a batch in the same
way inside the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import Any

from gspo_env.errors import EngineError

logger = logging.getLogger(__name__)

_SOFT, _HARD = 0.9, 0.97
"""Fractions of the cache up to which new episodes, and those under way, may fill it."""
_LENGTHS = 256
"""Actions whose lengths are remembered."""
_READ_SECONDS = 1.0
"""Seconds between two readings of the metrics."""
_CHECK_SECONDS = 0.1
"""Seconds after which a request that waits is judged again although none has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheMetrics:
    """What vLLM says of its cache and its requests."""

    blocks: int
    block_size: int
    """Tokens of a block."""
    usage: float
    """Fraction of the blocks that requests use."""
    running: float
    waiting: float
    preemptions: float
    """Since the server's start."""


def read_cache_metrics(text: str) -> CacheMetrics | None:
    """Reads vLLM's metrics in Prometheus's format; None if one is missing.

    Several engines behind one address (`--data-parallel-size`) are added up.

    Example:
        >>> text = '''vllm:cache_config_info{block_size="16",num_gpu_blocks="11"} 1.0
        ... vllm:kv_cache_usage_perc{engine="0"} 0.5
        ... vllm:num_requests_running{engine="0"} 2.0
        ... vllm:num_requests_waiting{engine="0"} 0.0
        ... vllm:num_preemptions_total{engine="0"} 1.0'''
        >>> read_cache_metrics(text)
        CacheMetrics(blocks=10, block_size=16, usage=0.5, running=2.0, waiting=0.0, preemptions=1.0)
    """
    values: dict[str, list[tuple[str, float]]] = {}
    for name, labels, value in re.findall(r"^vllm:(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        values.setdefault(name, []).append((labels, float(value)))
    try:
        usage, running, waiting, preemptions = (
            [value for _, value in values[name]]
            for name in (
                *("kv_cache_usage_perc", "num_requests_running"),
                *("num_requests_waiting", "num_preemptions_total"),
            )
        )
        configs = [dict(re.findall(r'(\w+)="([^"]*)"', c)) for c, _ in values["cache_config_info"]]
        return CacheMetrics(
            blocks=sum(int(config["num_gpu_blocks"]) - 1 for config in configs),  # one stays empty
            block_size=int(configs[0]["block_size"]),
            usage=sum(usage) / len(usage),
            running=sum(running),
            waiting=sum(waiting),
            preemptions=sum(preemptions),
        )
    except (KeyError, ValueError):
        return None


@dataclass(slots=True, eq=False)
class Room:
    """The place of a request, and then of its episode, in the cache of one copy of the model."""

    prompt_ids: Sequence[int]
    max_tokens: int
    session: str
    copy: Any = None
    """The engine or server that samples it."""
    tokens: int = 0
    """Number of sampled tokens; 0 until it has ended."""
    blocks: list[int] = field(default_factory=list)
    """Hashes of its prefixes, which it may share."""
    since: float = 0.0
    """When its sampling began or ended."""


class _Lengths:
    """The lengths and the speed of the last actions."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_LENGTHS)
        self._sorted: list[int] = []
        self._sums: list[int] = []
        self.seconds = self.rate = 0.0
        """Mean duration of an action; tokens a second."""

    def add(self, tokens: int, seconds: float) -> None:
        new = 1.0 / min(len(self._last) + 1, 32)
        self.seconds += new * (seconds - self.seconds)
        self.rate += new * (tokens / max(seconds, 1e-6) - self.rate)
        self._last.append(tokens)
        self._sorted = sorted(self._last)
        self._sums = list(accumulate(reversed(self._sorted)))

    def remaining(self, sampled: float, most: int) -> float:
        """Returns how many tokens follow, by the mean of the actions that were longer."""
        longer = len(self._sorted) - bisect_right(self._sorted, sampled)
        expected = self._sums[longer - 1] / longer if longer else most
        return max(min(expected, most) - sampled, 0.0)


class _Cache:
    """The cache of one copy of the model, and what is in it as far as this process knows."""

    def __init__(self) -> None:
        self.metrics: CacheMetrics | None = None
        self.read_at, self.is_known = -math.inf, False
        """When the metrics were asked for; whether the first answer, or none, has come."""
        self.preemptions = 0.0
        """Without those of updates of the weights."""
        self.running: set[Room] = set()
        self.idle: dict[str, Room] = {}
        self.budget = 1.0
        """Fraction of the cache that may be used; less after a preemption."""
        self.others = 0.0
        """Fraction that requests of other programs use."""
        self.updated = True
        """Whether preemptions may be those of an update of the weights."""
        self._blocks: Counter[int] = Counter()

    def put(self, room: Room) -> None:
        self._blocks.update(room.blocks)

    def remove(self, room: Room) -> None:
        self._blocks.subtract(room.blocks)
        for block in room.blocks:
            if not self._blocks[block]:
                del self._blocks[block]

    def read(self, metrics: CacheMetrics, mine: int) -> None:
        """Takes new metrics; `mine` is the number of requests of this process."""
        before = metrics if self.metrics is None or self.updated else self.metrics
        new = max(0.0, metrics.preemptions - before.preemptions)  # a new server counts from 0
        self.preemptions += new
        self.budget = max(0.5, self.budget * 0.9) if new else min(1.0, self.budget + 0.01)
        self.updated, self.metrics = False, metrics
        foreign = metrics.running - mine
        self.others = metrics.usage * foreign / metrics.running if foreign > 0 else 0.0

    def fits(self, room: Room, is_new: bool, lengths: _Lengths) -> bool:
        """Returns whether a request fits beside those that run; a first one always does."""
        metrics = self.metrics
        if metrics is None or not self.running:
            return self.is_known
        if is_new and metrics.waiting and metrics.usage > _SOFT:
            return False
        size, now = metrics.block_size, time.monotonic()
        fresh = len(room.prompt_ids) - size * sum(block in self._blocks for block in room.blocks)
        shared = len(self._blocks) / max(1, self._blocks.total())
        sequences = [(float(fresh + size), lengths.remaining(0, room.max_tokens))]
        for other in self.running:
            sampled = min(lengths.rate * (now - other.since), other.max_tokens)
            held = size * len(other.blocks) * shared + len(other.prompt_ids) % size
            remaining = lengths.remaining(sampled, other.max_tokens)
            sequences.append((held + sampled + size, remaining))
        held, peak = 0.0, 0.0
        for n, (used, remaining) in enumerate(sorted(sequences, key=lambda each: -each[1]), 1):
            held += used
            peak = max(peak, held + n * remaining)  # when it ends, those before it still run
        if is_new:  # an environment that is slower than an action has to wait for its cache
            warm = [r for r in self.idle.values() if now - r.since < lengths.seconds]
            peak += sum(size * len(r.blocks) * shared for r in warm)
        share = (_SOFT if is_new else _HARD) * self.budget - self.others
        return peak <= share * size * metrics.blocks


class CacheLimit:
    """Admits requests to copies of a model, as far as their caches have room.

    Args:
        read: Returns the metrics of a copy in Prometheus's format.
        share: Part of each cache that belongs to this process.
    """

    def __init__(self, read: Callable[[Any], Awaitable[str]], share: float = 1.0) -> None:
        self._read, self._share = read, share
        self._caches: dict[Any, _Cache] = {}
        self._lengths = _Lengths()
        self._waiting: list[tuple[Room, Callable[[], Sequence[Any]], asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._checking: asyncio.Future[None] | None = None
        self._numbers = count()
        self._warned = False

    @asynccontextmanager
    async def room(
        self,
        copies: Callable[[], Sequence[Any]],
        prompt_ids: Sequence[int],
        max_tokens: int,
        session: str | None,
    ) -> AsyncIterator[Room]:
        """Waits until a request fits; set `Room.tokens` to the number of tokens it has sampled.

        Args:
            copies: Returns the copies that serve; it may raise an error.
            prompt_ids: The prompt.
            max_tokens: Maximum tokens that are sampled.
            session: The episode; None is one of its own.
        """
        room = Room(prompt_ids, max_tokens, session or f"#{next(self._numbers)}")
        await self._refresh(copies)
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((room, copies, admitted))
        try:
            self._admit()
            await admitted
            yield room
        finally:
            self._waiting = [each for each in self._waiting if each[0] is not room]
            if room.copy is not None:
                self._leave(room, keep=session is not None)
            self._admit()

    def release(self, session: str) -> None:
        """Forgets an episode that has ended."""
        for cache in self._caches.values():
            if idle := cache.idle.pop(session, None):
                cache.remove(idle)
        self._admit()

    def updated(self) -> None:
        """Takes note that the weights changed, for which vLLM preempts all requests."""
        for cache in self._caches.values():
            cache.updated = True

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the start."""
        return {"rollout/preemptions": sum(c.preemptions for c in self._caches.values())}

    def _admit(self) -> None:
        """Admits what fits, in order, episodes under way first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sessions = {session for cache in self._caches.values() for session in cache.idle}
        for entry in sorted(self._waiting, key=lambda each: each[0].session not in sessions):
            room, copies, admitted = entry
            if admitted.done():
                continue
            try:
                copy = self._choose(room, copies(), room.session not in sessions)
            except Exception as error:
                admitted.set_exception(error)
                continue
            if copy is None:
                break
            self._enter(room, copy)
            admitted.set_result(None)
        self._waiting = [entry for entry in self._waiting if not entry[2].done()]
        if self._waiting:
            loop = self._waiting[0][2].get_loop()
            self._timer = loop.call_later(_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        if self._waiting:
            self._checking = asyncio.ensure_future(self._refresh(self._waiting[0][1]))
            self._checking.add_done_callback(lambda _: self._admit())

    def _choose(self, room: Room, copies: Sequence[Any], is_new: bool) -> Any:
        """Returns the copy with the fewest requests of those that have room, or None."""
        caches = [(copy, self._caches.setdefault(copy, _Cache())) for copy in copies]
        for copy, cache in sorted(caches, key=lambda each: len(each[1].running)):
            if cache.metrics is not None:
                room.blocks = _blocks(room.prompt_ids, cache.metrics.block_size)
            if cache.fits(room, is_new, self._lengths):
                return copy
        return None

    def _enter(self, room: Room, copy: Any) -> None:
        for cache in self._caches.values():
            if idle := cache.idle.pop(room.session, None):
                cache.remove(idle)
        cache = self._caches[copy]
        room.copy, room.since = copy, time.monotonic()
        cache.running.add(room)
        cache.put(room)

    def _leave(self, room: Room, keep: bool) -> None:
        cache, now = self._caches[room.copy], time.monotonic()
        cache.running.discard(room)
        if room.tokens:
            self._lengths.add(room.tokens, now - room.since)
        room.since = now
        if keep and room.tokens:
            cache.idle[room.session] = room
        else:
            cache.remove(room)

    async def _refresh(self, copies: Callable[[], Sequence[Any]]) -> None:
        """Reads the metrics of the copies that were not read for some time."""
        with suppress(EngineError):  # none is left: each request is told so
            await asyncio.gather(*(self._read_one(copy) for copy in copies()))

    async def _read_one(self, copy: Any) -> None:
        cache, now = self._caches.setdefault(copy, _Cache()), time.monotonic()
        if now - cache.read_at < _READ_SECONDS:
            return
        cache.read_at, mine = now, len(cache.running)
        try:
            metrics = read_cache_metrics(await self._read(copy))
        except Exception as error:  # it may be lost; the metrics are not worth a request
            logger.debug("the metrics of vLLM could not be read: %s", error)
            metrics = None
        cache.is_known = True
        if metrics is not None:
            # with a share, the requests of the others are not foreign
            mine = int(metrics.running) if self._share < 1 else max(mine, len(cache.running))
            blocks = max(1, int(metrics.blocks * self._share))
            cache.read(replace(metrics, blocks=blocks), mine)
        elif cache.metrics is None and not self._warned:
            self._warned = True
            logger.warning(
                "follow_cache is not possible for %s, because it gives no metrics of its cache: "
                "rollout.concurrency alone limits its requests",
                getattr(copy, "name", "vLLM"),
            )


def _blocks(ids: Sequence[int], size: int) -> list[int]:
    """Returns a hash of each prefix of whole blocks."""
    prefix, hashes = 0, []
    for start in range(0, len(ids) - size + 1, size):
        prefix = hash((prefix, *ids[start : start + size]))
        hashes.append(prefix)
    return hashes
