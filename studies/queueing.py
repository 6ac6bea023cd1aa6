"""The simulation of `simulate.py`: episodes, servers, tools, a controller and a trainer by events.

An episode alternates between actions and tools. A server decodes one token of each of its running
requests in a step, whose time depends on their number; a new prompt delays the step by the time of
its tokens. Tools run in parallel. A group is complete with its last episode, and an update takes
`batch` groups. A group is admitted only while `admitted < batch * (version + staleness + 1)`, as in
`gspo_env.training.rollout_buffer`.

There is one event for each start and end of a turn, not one for each token: between two events of a
server, all its requests progress at the rate that the size of its batch allows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_CLOSE = 1e-6
"""Tokens within which a request is done, beyond what rounding can lose."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and what follows it."""

    prompt: int
    """New tokens before the action."""
    tokens: int
    """Tokens of the action."""
    tool: float
    """Seconds of the environment's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What plays and trains. Times are in seconds."""

    step: Mapping[int, float]
    """Time of a decoding step by the number of running requests; between them it is linear, and
    beyond the last two it goes on so."""
    prefill: float = 0.0
    """Time of a token of a prompt."""
    host: float = 0.0
    """Time of the controller for a turn: template, parsing, HTTP."""
    embedded: bool = False
    """Whether the controller and the only server share one thread."""
    servers: int = 1
    slots: int = 256
    """Requests that a server runs at a time; others wait."""
    concurrency: int = 256
    """Episodes in flight."""
    batch: int = 0
    """Groups of an update; 0 has no trainer."""
    group: int = 1
    """Episodes of a group."""
    staleness: int = 0
    update: float = 0.0
    """Time of an update."""
    sync: float = 0.0
    """Time in which all servers stand still for new weights."""

    def step_times(self) -> list[float]:
        """Returns the time of a step for every number of requests from 0 to `slots`."""
        known = sorted(self.step.items())
        sizes, times = [n for n, _ in known], [t for _, t in known]
        values = np.interp(np.arange(self.slots + 1), sizes, times)
        if len(known) > 1 and self.slots > sizes[-1]:
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            beyond = np.arange(sizes[-1], self.slots + 1)
            values[sizes[-1] :] = times[-1] + slope * (beyond - sizes[-1])
        return [float(value) for value in values]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a simulation found."""

    seconds: float
    episodes: int
    tokens: int
    updates: int
    servers_idle: float
    """Share of the time of all servers in which they have no request."""
    trainer_idle: float
    """Share of the time in which the trainer waits; 1 without one."""
    in_flight: float
    """Mean number of episodes in flight."""
    staleness: tuple[int, ...]
    """Age of each group that was trained on, in updates."""

    @property
    def rate(self) -> float:
        """Episodes per second."""
        return self.episodes / self.seconds


@dataclass(frozen=True, slots=True, order=True)
class _Request:
    number: int
    episode: int
    turn: Turn = field(compare=False)


@dataclass(slots=True)
class _Server:
    """Runs requests; progress is counted in tokens that each of them has got since the start."""

    times: Sequence[float]
    slots: int
    running: list[tuple[float, _Request]] = field(default_factory=list)
    """Progress at which each request ends: a heap."""
    waiting: deque[tuple[_Request, float]] = field(default_factory=deque)
    """Requests, and the seconds by which each delays the others when it starts."""
    progress: float = 0.0
    delay: float = 0.0
    """Seconds of prompts, of the controller or of new weights before the next token."""
    at: float = 0.0
    """Time up to which progress is counted."""
    busy: float = 0.0
    epoch: int = 0
    """Counts the ends that were planned; only the last one holds."""

    def move(self, now: float) -> None:
        """Counts the progress up to a time."""
        passed, self.at = now - self.at, now
        still = min(self.delay, passed)
        self.delay -= still
        if self.running:
            self.busy += passed
            self.progress += (passed - still) / self.times[len(self.running)]

    def add(self, request: _Request, delay: float) -> None:
        """Starts a request, or lets it wait."""
        if len(self.running) >= self.slots:
            self.waiting.append((request, delay))
            return
        heapq.heappush(self.running, (self.progress + request.turn.tokens, request))
        self.delay += delay

    def take(self) -> list[_Request]:
        """Returns the requests that are done, and starts those that wait for their places."""
        done = []
        while self.running and self.running[0][0] <= self.progress + _CLOSE:
            done.append(heapq.heappop(self.running)[1])
        while self.waiting and len(self.running) < self.slots:
            self.add(*self.waiting.popleft())
        return done

    def next_end(self) -> float:
        """Returns the time at which the next request ends if nothing else happens."""
        if not self.running:
            return math.inf
        left = max(0.0, self.running[0][0] - self.progress)
        return self.at + self.delay + left * self.times[len(self.running)]


class _Run:
    """One simulation."""

    def __init__(self, system: System, draw: Callable[[], Sequence[Turn]]) -> None:
        self.system, self.draw = system, draw
        times = system.step_times()
        self.servers = [_Server(times, system.slots) for _ in range(system.servers)]
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = itertools.count()
        self.turns: dict[int, Iterator[Turn]] = {}
        self.group_of: dict[int, int] = {}
        self.open: dict[int, int] = {}
        """Episodes that each group waits for."""
        self.queue: deque[int] = deque()
        """Groups of the episodes that wait for a place in flight."""
        self.born: dict[int, int] = {}
        """The version at which each group was admitted that was not trained on."""
        self.ready: set[int] = set()
        self.in_flight = self.version = self.admitted = self.ended = self.tokens = 0
        self.training = False
        self.host_free = self.trained = self.area = 0.0
        self.ages: list[int] = []

    def run(self, episodes: int) -> Result:
        """Plays until this many episodes have ended, or as many updates as they are enough for."""
        system, now = self.system, 0.0
        updates = episodes // (system.batch * system.group) if system.batch else 0
        if not system.batch:
            for _ in range(math.ceil(episodes / system.group)):
                self._admit()
        self._start(now)
        while self.events and not (system.batch and self.version >= updates):
            then, _, act = heapq.heappop(self.events)
            self.area += self.in_flight * (then - now)
            now = then
            act(now)
        for server in self.servers:
            server.move(now)
        busy = sum(server.busy for server in self.servers)
        return Result(
            seconds=now,
            episodes=updates * system.batch * system.group if system.batch else self.ended,
            tokens=self.tokens,
            updates=self.version,
            servers_idle=1 - busy / (now * len(self.servers)),
            trainer_idle=1 - self.trained / now,
            in_flight=self.area / now,
            staleness=tuple(self.ages),
        )

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.count), act))

    def _admit(self) -> None:
        group = self.admitted
        self.admitted += 1
        self.born[group], self.open[group] = self.version, self.system.group
        self.queue.extend([group] * self.system.group)

    def _start(self, now: float) -> None:
        """Admits groups, and starts episodes while there is a place in flight."""
        system = self.system
        while self.admitted < system.batch * (self.version + system.staleness + 1):
            self._admit()
        while self.queue and self.in_flight < system.concurrency:
            episode = next(self.count)
            self.group_of[episode] = self.queue.popleft()
            self.turns[episode] = iter(self.draw())
            self.in_flight += 1
            self._turn(now, episode)

    def _turn(self, now: float, episode: int) -> None:
        """Begins the next turn of an episode, or ends it."""
        turn = next(self.turns[episode], None)
        if turn is None:
            self._end(now, episode)
        elif self.system.embedded:
            self._ask(now, episode, turn)
        else:
            self.host_free = max(self.host_free, now) + self.system.host
            self._at(self.host_free, lambda then: self._ask(then, episode, turn))

    def _ask(self, now: float, episode: int, turn: Turn) -> None:
        server = min(self.servers, key=lambda s: len(s.running) + len(s.waiting))
        delay = self.system.prefill * turn.prompt + self.system.host * self.system.embedded
        server.move(now)
        server.add(_Request(next(self.count), episode, turn), delay)
        self._plan(server)

    def _plan(self, server: _Server) -> None:
        server.epoch += 1
        epoch, end = server.epoch, server.next_end()
        if end < math.inf:
            self._at(end, lambda now: self._serve(now, server, epoch))

    def _serve(self, now: float, server: _Server, epoch: int) -> None:
        """Ends the requests of a server that are done."""
        if epoch != server.epoch:
            return
        server.move(now)
        for request in server.take():
            self.tokens += request.turn.tokens
            self._at(now + request.turn.tool, lambda then, e=request.episode: self._turn(then, e))
        self._plan(server)

    def _end(self, now: float, episode: int) -> None:
        group = self.group_of.pop(episode)
        del self.turns[episode]
        self.in_flight -= 1
        self.ended += 1
        self.open[group] -= 1
        if not self.open[group]:
            del self.open[group]
            self.ready.add(group)
            self._train(now)
        self._start(now)

    def _train(self, now: float) -> None:
        """Starts an update if one can start; see `StalenessGate.choose`."""
        batch = self.system.batch
        if not batch or self.training or len(self.ready) < batch:
            return
        chosen = sorted(self.ready)[:batch]
        taken = set(chosen)
        others = (group for group in self.born if group not in taken)
        for n, group in enumerate(others):  # in the order of admission
            if self.version + 1 + n // batch - self.born[group] > self.system.staleness:
                return
        self.training = True
        for group in chosen:
            self.ready.remove(group)
        ages = [self.version - self.born.pop(group) for group in chosen]
        self._at(now + self.system.update, lambda then: self._trained(then, ages))

    def _trained(self, now: float, ages: list[int]) -> None:
        self.ages += ages
        self.training, self.version = False, self.version + 1
        self.trained += self.system.update
        for server in self.servers:
            server.move(now)
            server.delay += self.system.sync
            self._plan(server)
        self._train(now)
        self._start(now)


def simulate(system: System, draw: Callable[[], Sequence[Turn]], episodes: int) -> Result:
    """Simulates until episodes have ended, or as many updates as they are enough for.

    Args:
        system: What plays and trains.
        draw: Returns the turns of the next episode.
        episodes: Number of episodes.
    """
    return _Run(system, draw).run(episodes)
