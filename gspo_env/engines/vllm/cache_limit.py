"""Concurrency that follows vLLM's cache: how many requests run follows from vLLM's own metrics.

A request starts if the keys and values of all requests in flight will fit when each has ended: the
mean of the last actions that were longer, and three standard deviations of their sum. So hardly any
is preempted. Its blocks are counted as vLLM does: equal prefixes once.

Episodes that are under way go first. A new one starts only if all of them will fit until they end,
by the lengths of the last episodes; else their later turns would evict each other's prefixes, which
costs more time than the places of a few requests.

Source: the Past-Future scheduler (arXiv 2507.10150), which predicts the peak of a batch in the same
way inside the server; here the peak is that of whole episodes.
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

_FULL = 0.9
"""Fraction of the cache from which no episode starts while vLLM has requests wait."""
_DEVIATIONS = 3.0
"""Standard deviations of what requests will sample, above the mean, that are kept free for them."""
_LENGTHS = 256
"""Actions, and episodes, whose lengths are remembered."""
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

    def length(self, size: int, shared: float, sampled: float) -> tuple[float, float]:
        """Returns its share of the cache, in tokens, and the number of its tokens."""
        prompt = len(self.prompt_ids)
        used = size * len(self.blocks) * shared + prompt % size + sampled
        return used + size / 2, prompt + sampled  # its last block is half full on average


class _Lengths:
    """The last lengths, in tokens."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_LENGTHS)
        self._sorted: list[int] = []
        self._sums: list[tuple[int, int]] = []
        """Of the n longest: their sum and that of their squares."""

    def add(self, tokens: int) -> None:
        self._last.append(tokens)
        self._sorted = sorted(self._last)
        longest = self._sorted[::-1]
        squares = accumulate(n * n for n in longest)
        self._sums = list(zip(accumulate(longest), squares, strict=True))

    def remaining(self, tokens: float, most: float) -> tuple[float, float]:
        """Returns mean and variance of what follows, by the lengths that were longer.

        Args:
            tokens: The length so far.
            most: The result if none was longer.
        """
        longer = len(self._sorted) - bisect_right(self._sorted, tokens)
        if not longer:
            return max(most, 0.0), 0.0
        total, squares = self._sums[longer - 1]
        mean = total / longer
        return mean - tokens, max(squares / longer - mean * mean, 0.0)


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

    def fits(self, room: Room, is_new: bool, limit: CacheLimit) -> bool:
        """Returns whether a request fits beside those that run; a first one always does."""
        metrics = self.metrics
        if metrics is None or not self.running:
            return self.is_known
        if is_new and metrics.waiting and metrics.usage > _FULL:
            return False
        size, now = metrics.block_size, time.monotonic()
        space = (self.budget - self.others) * size * metrics.blocks
        shared = len(self._blocks) / max(1, self._blocks.total())
        unshared = len(room.prompt_ids) - size * sum(block in self._blocks for block in room.blocks)
        lengths = [(unshared + size / 2, float(len(room.prompt_ids)))]
        sampled = {room: 0.0}
        for other in self.running:
            sampled[other] = min(limit.rate * (now - other.since), other.max_tokens)
            lengths.append(other.length(size, shared, sampled[other]))
        mean = variance = 0.0
        for each, tokens in sampled.items():
            most = each.max_tokens - tokens
            more, spread = limit.actions.remaining(tokens, most)
            mean, variance = mean + min(more, most), variance + spread
        if sum(used for used, _ in lengths) + mean + _DEVIATIONS * math.sqrt(variance) > space:
            return False
        if not is_new:
            return True
        # an environment that is slower than an action has to wait for its cache
        warm = (other for other in self.idle.values() if now - other.since < limit.seconds)
        lengths += [other.length(size, shared, other.tokens) for other in warm]
        return limit.peak(lengths, room.max_tokens) <= space


class CacheLimit:
    """Admits requests to copies of a model, as far as their caches have room.

    Args:
        read: Returns the metrics of a copy in Prometheus's format.
        share: Part of each cache that belongs to this process.
    """

    def __init__(self, read: Callable[[Any], Awaitable[str]], share: float = 1.0) -> None:
        self._read, self._share = read, share
        self._caches: dict[Any, _Cache] = {}
        self.actions, self.episodes = _Lengths(), _Lengths()
        self.seconds = self.rate = 0.0
        """Mean duration of an action; tokens a second."""
        self._ended = 0
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
                self.episodes.add(len(idle.prompt_ids) + idle.tokens)
        self._admit()

    def updated(self) -> None:
        """Takes note that the weights changed, for which vLLM preempts all requests."""
        for cache in self._caches.values():
            cache.updated = True

    def metrics(self) -> dict[str, float]:
        """Returns the metrics since the start."""
        return {"rollout/preemptions": sum(c.preemptions for c in self._caches.values())}

    def peak(self, lengths: Sequence[tuple[float, float]], max_tokens: int) -> float:
        """Returns the most tokens that episodes will have in the cache at once.

        Args:
            lengths: `Room.length` of each.
            max_tokens: How much one grows at least that is longer than all that have ended.
        """
        longest = max(total for _, total in lengths)
        rest = [
            (self.episodes.remaining(total, max(max_tokens, longest - total))[0], used)
            for used, total in lengths
        ]
        held = peak = 0.0
        for n, (remaining, used) in enumerate(sorted(rest, reverse=True), 1):
            held += used
            peak = max(peak, held + n * remaining)  # when it ends, those before it still run
        return peak

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
            if cache.fits(room, is_new, self):
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
            self._ended += 1
            new, seconds = 1.0 / min(self._ended, 32), now - room.since
            self.seconds += new * (seconds - self.seconds)
            self.rate += new * (room.tokens / max(seconds, 1e-6) - self.rate)
            self.actions.add(room.tokens)
        room.since = now
        if keep and room.tokens:
            cache.idle[room.session] = room
            return
        cache.remove(room)
        if room.tokens:  # an episode of its own
            self.episodes.add(len(room.prompt_ids) + room.tokens)

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
