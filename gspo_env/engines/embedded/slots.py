"""Which sequence of the key-value cache each request of the `transformers` engine belongs to.

Requests with the same context run as one sequence, whose forward pass is computed once; each
request samples from its logits with its own random numbers. Requests that sampled different ids
continue in separate sequences, with copies of the keys and values so far:

    [prompt] a b        three requests, one sequence
    [prompt] a b c      two of them sampled c
    [prompt] a b d      one sampled d, in a new sequence

A session (an episode) keeps its sequence from turn to turn, alone or with others. A new prompt
begins with a copy of what another sequence has in common with it, such as the system prompt of
other tasks.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from gspo_env.engines.base import Completion, Sampling
from gspo_env.engines.embedded.kv_cache import KVCache

_BLOCK = 16
"""Prompts that begin alike are found by multiples of this many tokens, and a prompt waits for as
many that are being computed for another one."""


@dataclass(slots=True, eq=False)
class Request:
    """One action that is sampled."""

    prompt: list[int]
    sampling: Sampling
    session: str | None
    future: asyncio.Future[Completion]
    draw: Callable[[], float]
    """Uniform numbers in [0, 1) from the request's own generator."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """See `version_runs`."""


@dataclass(slots=True, eq=False)
class Slot:
    """A place of the cache, and the sequence in it."""

    index: int
    tokens: list[int] = field(default_factory=list)
    """The ids whose keys and values are in the cache."""
    pending: list[int] = field(default_factory=list)
    """The ids that follow."""
    requests: list[Request] = field(default_factory=list)
    """Those that run; all have the same context, `tokens` and `pending`."""
    sessions: set[str] = field(default_factory=set)
    """Those whose tokens `tokens` begins with, at least to where they ended."""
    family: tuple[int, int] | None = None
    """Slots with an equal one begin with the same tokens; its last item is how many."""
    beginnings: list[int] = field(default_factory=list)
    """Those of the prompt that it was taken for; see `_beginnings_of`."""


class Sequences:
    """The slots of a cache.

    Args:
        cache: The cache.
        count: How many slots it has; as many requests can run.
    """

    def __init__(self, cache: KVCache, count: int) -> None:
        self._cache = cache
        self._count = count
        self.clear()

    def clear(self) -> None:
        """Drops everything; no request may run."""
        self._slots = [Slot(index) for index in range(self._count)]
        self._free = list(range(self._count))  # a heap: low slots first keep the cache dense
        self._sessions: dict[str, Slot] = {}  # least recently used first
        self._beginnings: dict[int, dict[int, Slot]] = {}
        """The slots of the prompts with each beginning; see `_beginnings_of`."""
        self._copies: dict[int, tuple[int, int]] = {}
        """Slots that begin with those of another one: its index and how many, not yet copied."""
        self._running: dict[int, Slot] = {}
        self._families = 0
        self.requests = 0
        """How many run."""

    def forget(self) -> None:
        """Drops all keys and values; running requests compute theirs again."""
        self._copies.clear()
        for slot in self._slots:
            self._empty(slot)
        for slot in self.running():
            slot.pending = slot.requests[0].prompt + slot.requests[0].token_ids

    def running(self) -> list[Slot]:
        """Returns the slots that have requests."""
        return list(self._running.values())

    def admit(self, waiting: list[Request]) -> list[Request]:
        """Starts requests; returns those that wait for a slot or for keys and values to copy."""
        starting: dict[tuple[int, ...], Slot | None] = {}
        return [r for r in waiting if not self._start(r, starting)]

    def _start(self, request: Request, starting: dict[tuple[int, ...], Slot | None]) -> bool:
        if self.requests == self._count:
            return False  # so that all can go on when they sample different ids
        key = tuple(request.prompt)
        if key not in starting:
            slot = starting[key] = self._place(request)
            if slot is not None:
                slot.pending = request.prompt[len(slot.tokens) :]
                self._running[slot.index] = slot
        slot = starting[key]
        if slot is None:
            return False
        slot.requests.append(request)
        self.requests += 1
        if request.session is not None:
            self._move(request.session, slot)
        return True

    def _place(self, request: Request) -> Slot | None:
        """Returns a slot with as much of the prompt as is computed, except for its last token.

        It is None while some of the prompt is being computed for another request.
        """
        prompt, session = request.prompt, request.session
        held = self._sessions.get(session) if session is not None else None
        if held is not None:
            length = min(_common(held.tokens, prompt), len(prompt) - 1)
            alone = held.sessions == {session} or length == len(held.tokens)
            if alone and not held.requests:
                _cut(held, length)
                return held
            return self._fork(held, length)
        keys = _beginnings_of(prompt)
        source, length = self._alike(prompt, keys)
        ready = 0 if source is None else min(length, len(source.tokens))
        if length - ready >= _BLOCK:
            return None
        if source is None or ready < _BLOCK:
            slot = self._take()
            self._empty(slot)
        else:
            slot = self._fork(source, ready)
        self._forget_beginnings(slot)
        slot.beginnings = keys
        for key in keys:
            self._beginnings.setdefault(key, {})[slot.index] = slot
        return slot

    def _alike(self, prompt: list[int], keys: list[int]) -> tuple[Slot | None, int]:
        """Returns a slot that begins like a prompt, or will, and for how many tokens."""
        for key in reversed(keys):
            for slot in self._beginnings.get(key, {}).values():
                length = _common(slot.tokens + slot.pending, prompt)
                if length >= _BLOCK:  # it was not cut, and the key is that of no other beginning
                    return slot, min(length, len(prompt) - 1)
        return None, 0

    def part(self, slot: Slot, parts: dict[int, list[Request]]) -> None:
        """Continues the requests of a slot with the ids that they sampled."""
        first = True
        for token, requests in parts.items():
            target = slot
            if not first:
                target = self._fork(slot, len(slot.tokens))
                self._running[target.index] = target
                for request in requests:
                    if request.session is not None and self._sessions.get(request.session) is slot:
                        self._move(request.session, target)
            target.pending, target.requests, first = [token], requests, False

    def leave(self, slot: Slot, ended: list[Request]) -> None:
        """Removes requests that ended."""
        gone = set(ended)
        self.requests -= len(gone)
        slot.requests = [r for r in slot.requests if r not in gone]
        if not slot.requests:
            slot.pending = []
            del self._running[slot.index]
            self._free_if_idle(slot)

    def release(self, session: str) -> None:
        """Frees a session's slot. Its prompt can still be copied until the slot is reused."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            slot.sessions.discard(session)
            self._free_if_idle(slot)

    def finish_copies(self) -> None:
        """Copies the keys and values of the slots that were forked."""
        if self._copies:
            sources, lengths = zip(*self._copies.values(), strict=True)
            self._cache.copy(list(sources), list(self._copies), list(lengths))
            self._copies.clear()

    def _move(self, session: str, slot: Slot) -> None:
        before = self._sessions.pop(session, None)
        self._sessions[session] = slot
        if before is slot:
            return
        slot.sessions.add(session)
        if before is not None:
            before.sessions.discard(session)
            self._free_if_idle(before)

    def _free_if_idle(self, slot: Slot) -> None:
        if not slot.sessions and not slot.requests:
            heapq.heappush(self._free, slot.index)

    def _take(self) -> Slot:
        """Returns a slot without requests; there is one, because fewer run than there are slots."""
        if self._free:
            return self._slots[heapq.heappop(self._free)]
        idle = next(slot for slot in self._sessions.values() if not slot.requests)
        for session in idle.sessions:
            del self._sessions[session]
        idle.sessions.clear()
        return idle

    def _fork(self, source: Slot, length: int) -> Slot:
        """Returns another slot with the first tokens of a slot."""
        slot = self._take()
        if slot is source:
            _cut(slot, length)
            return slot
        self._empty(slot)
        if source.index in self._copies:
            self.finish_copies()
        slot.tokens = source.tokens[:length]
        if length:
            self._copies[slot.index] = source.index, length
            if source.family is None or length >= 2 * source.family[1]:
                self._families += 1
                source.family = self._families, length
            if source.family[1] <= length:
                slot.family = source.family
        return slot

    def _empty(self, slot: Slot) -> None:
        slot.tokens, slot.family = [], None
        self._copies.pop(slot.index, None)
        self._forget_beginnings(slot)

    def _forget_beginnings(self, slot: Slot) -> None:
        for key in slot.beginnings:
            slots = self._beginnings[key]
            del slots[slot.index]
            if not slots:
                del self._beginnings[key]
        slot.beginnings = []


def _cut(slot: Slot, length: int) -> None:
    """Lets a slot hold its first tokens only."""
    slot.tokens = slot.tokens[:length]
    if slot.family is not None and slot.family[1] > length:
        slot.family = None


def _beginnings_of(prompt: list[int]) -> list[int]:
    """Returns the hashes of the first 16, 32, ... tokens."""
    keys, key = [], 0
    for end in range(_BLOCK, len(prompt) + 1, _BLOCK):
        key = hash((key, *prompt[end - _BLOCK : end]))
        keys.append(key)
    return keys


def _common(held: list[int], prompt: list[int]) -> int:
    """Returns the number of leading ids that two sequences share."""
    if prompt[: len(held)] == held:
        return len(held)
    low, high = 0, min(len(held), len(prompt))
    while low < high:  # a comparison of slices is much faster than one of items
        middle = (low + high + 1) // 2
        if held[low:middle] == prompt[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
