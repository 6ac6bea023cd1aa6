"""Branched groups: episodes that are continued several times from the middle of others.

A group first plays its episodes as always. A rule then selects turns, and each of them is played
again `continuations` times, from the state in which it was played. An environment with `snapshot()`
and `restore(state)` is put into that state. In any other one the seed and the actions are played
again, and each observation has to be the same, byte by byte.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import index
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from gymnasium.wrappers import OrderEnforcing

from gspo_env.credit.branches import BranchedEpisode, shared_turns
from gspo_env.engines.base import Completion, Engine, Sampling
from gspo_env.env.base import TextEnvironment, attribute
from gspo_env.errors import ConfigError, EnvironmentContractError
from gspo_env.registry import name_of
from gspo_env.rollout.collector import Collector, RolloutRequest, first_error
from gspo_env.rollout.play import PolicyInput, PolicyOutput
from gspo_env.rollout.policy import EnginePolicy
from gspo_env.seeding import derive_seed
from gspo_env.settings import settings
from gspo_env.types import Episode, Group, ResetInfo, StepInfo, StopReason, Task, Turn

Point = tuple[int, int]
"""A turn to branch at: the index of an episode in its group, and of its turn."""
Sessions = dict[tuple[int, ...], dict[int, str]]
"""The engine's names of the caches of episodes, by the ids of the last sequence."""
_SNAPSHOT = "gspo_env.snapshot"
"""The key of `info` under which a `_SnapshotPool` keeps results and states."""


@settings
class Branching:
    """Base class of rules that select the turns to branch at; a subclass implements `points`."""

    continuations: Annotated[int, Ge(1)] = 3
    """Times that each selected turn is played again, n."""
    budget: Annotated[int, Ge(0)] = 0
    """Sampled tokens of a group after which no further turn is branched at; 0 is any number. All
    continuations of a turn are played, so a group exceeds it by those of one turn at most."""

    def points(self, episodes: Sequence[Episode]) -> Sequence[Point]:
        """Returns the turns to branch at, in the order of importance.

        It is called again after these turns were branched at, or only the first of them if there is
        a `budget`, until it returns no further ones. Advantages have no bias only if a turn is
        selected by what happened before it.

        Args:
            episodes: The episodes of the group so far, those of earlier branches last.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `points`")

    def wrap(self, collector: Collector) -> Collector:
        """Returns a collector of branched groups.

        Raises:
            ConfigError: The episodes are not played in this process.
        """
        if collector.config.ray_workers:
            raise ConfigError(
                f"branching is {type(self).__name__!r} and the rollout has workers; expected "
                "rollout.workers 'asyncio'"
            )
        return BranchingCollector(collector, self)

    def check(self, config: Any) -> None:
        """Checks the other settings of a run before it begins.

        Raises:
            ConfigError: The estimator does not declare `compares_branches`, or episodes are
                compacted.
        """
        name, compaction = name_of("branching", self), name_of("compaction", config.compaction)
        if not getattr(config.advantage, "compares_branches", False):
            raise ConfigError(
                f"branching is {name!r} and advantage {name_of('advantage', config.advantage)!r}, "
                "which would weigh a branch as a whole episode; expected advantage "
                "'branch_baseline', or an estimator of yours that declares `compares_branches = "
                "True`"
            )
        if compaction != "none":
            raise ConfigError(
                f"branching is {name!r} and compaction {compaction!r}; expected one of them to be "
                "'none'"
            )


@settings
class EveryTurn(Branching):
    """Branches at the turns k, 2k, ... of the episodes that share no turn."""

    every: Annotated[int, Ge(1)] = 1
    """Turns from one branch to the next, k; turn 0 is compared in the whole group anyway."""

    def points(self, episodes: Sequence[Episode]) -> Sequence[Point]:
        """See `Branching.points`."""
        longest = max(len(episode.turns) for episode in episodes)
        return [
            (i, k) for k in range(self.every, longest, self.every) for i in _trunks(episodes, k)
        ]


@settings
class UncertainTurns(Branching):
    """Branches at the turns whose tokens had the lowest mean log-probability.

    Only the turns of episodes that share no turn are compared. The mean over an action estimates
    the entropy of a token. A turn is selected against later ones, which is a small bias.
    """

    turns: Annotated[int, Ge(1)] = 1
    """Turns of each episode."""

    def points(self, episodes: Sequence[Episode]) -> Sequence[Point]:
        """See `Branching.points`."""
        scores = []
        for i in _trunks(episodes, 1):
            means = [np.mean(turn.logprobs or 0.0) for turn in episodes[i].turns]
            lowest = sorted(range(1, len(means)), key=means.__getitem__)[: self.turns]
            scores += [(float(means[k]), i, k) for k in lowest]
        return [(i, k) for _, i, k in sorted(scores)]


@settings
class DisputedTurns(Branching):
    """Branches where episodes that met the same state disagree most about what follows.

    States are equal if their `state_key` is; without one, if turn and observation are. The
    disagreement is the standard deviation of the outcomes. Outcomes select the turn, so the
    advantages have a bias; use it to find out where an episode is decided.
    """

    turns: Annotated[int, Ge(1)] = 2
    """Turns of a group."""

    def points(self, episodes: Sequence[Episode]) -> Sequence[Point]:
        """See `Branching.points`."""
        branched = {(e.origin, e.shared) for e in episodes if isinstance(e, BranchedEpisode)}
        room = self.turns - len(branched - {(None, 0)})
        visits: dict[object, list[Point]] = defaultdict(list)
        for i, episode in enumerate(episodes):
            for k in range(max(1, shared_turns(episode)), len(episode.turns)):
                turn = episode.turns[k]
                visits[turn.state_key or (k, turn.observation)].append((i, k))
        spread = {
            points[0]: float(np.std([episodes[i].outcome for i, _ in points]))
            for points in visits.values()
        }
        disputed = [point for point, deviation in spread.items() if deviation > 0]
        most = min(disputed, key=lambda point: (-spread[point], point), default=None)
        return [most] if most is not None and room > 0 else []


class BranchingCollector(Collector):
    """Collects branched groups; evaluations have none.

    Args:
        plain: Collects the episodes.
        branching: Selects the turns.
    """

    def __init__(self, plain: Collector, branching: Branching) -> None:
        super().__init__(**{f.name: getattr(plain, f.name) for f in fields(Collector) if f.init})
        self._plain, self.branching = plain, branching
        slots, size, n = plain.config.concurrency, plain.config.group_size, branching.continuations
        groups = max(1, min(slots // (2 * size), (slots - n) // size))
        self._groups = asyncio.Semaphore(groups)
        """Limits the groups in flight: the engine keeps their episodes until all have branched."""
        self._room = max(1, slots - groups * size)
        """The episodes that the engine has room for beside them."""
        self._points = asyncio.Semaphore(max(1, self._room // n))
        """Limits the turns that are branched at to what there is room for."""

    @property
    def plain(self) -> Collector:
        """See `Collector.plain`."""
        return self._plain

    async def collect_evaluation(
        self, tasks: Sequence[Task], *, seed: int
    ) -> tuple[list[Group], list[Group]]:
        """See `Collector.collect_evaluation`."""
        return await self.plain.collect_evaluation(tasks, seed=seed)

    async def play(self, request: RolloutRequest, gate: asyncio.Semaphore) -> Group:
        """See `Collector.play`.

        Raises:
            EnvironmentContractError: The environment does not replay, or does not declare that its
                tools can be called again.
        """
        sessions: Sessions = {}
        try:
            async with self._groups:
                return await self._play(request, gate, sessions)
        finally:
            for name in [name for names in sessions.values() for name in names.values()]:
                self.engine.release(name)

    async def _play(
        self, request: RolloutRequest, gate: asyncio.Semaphore, sessions: Sessions
    ) -> Group:
        first = self._part(_SnapshotPool(self.pool), partial(KeepingPolicy, sources=sessions))
        group = await first.play(request, gate)
        episodes: list[Episode] = [
            _numbered(episode, number, None, 0) for number, episode in enumerate(group.episodes)
        ]
        seconds, done = group.seconds, set[Point]()
        while points := self._next(episodes, done):
            done.update(points)
            async with first_error(), asyncio.TaskGroup() as running:
                playing = [
                    running.create_task(self._branch(request, episodes[point[0]], point, sessions))
                    for point in points
                ]
            for point, task in zip(points, playing, strict=True):
                branches = task.result()
                seconds += branches.seconds
                for episode in branches.episodes:
                    if len(episode.turns) > point[1] or episode.failed:
                        episodes.append(_numbered(episode, len(episodes), point[0], point[1]))
        return replace(group, episodes=tuple(map(_without_snapshots, episodes)), seconds=seconds)

    def _next(self, episodes: Sequence[Episode], done: set[Point]) -> list[Point]:
        """Returns the next turns to branch at."""
        budget, points = self.branching.budget, []
        if not any(e.turns for e in episodes) or 0 < budget <= sum(map(sampled_tokens, episodes)):
            return []
        selected = self.branching.points(episodes)
        try:
            pairs = [(index(i), index(k)) for i, k in selected]
        except (TypeError, ValueError):
            raise ConfigError(
                f"{type(self.branching).__name__}: points() returned {str(selected)[:200]}; "
                "expected pairs of integers, of an episode and its turn"
            ) from None
        for i, k in pairs:
            if not (0 <= i < len(episodes) and shared_turns(episodes[i]) <= k):
                raise ConfigError(f"{type(self.branching).__name__}: no turn to branch at: {i, k}")
            if (i, k) not in done and 0 < k < len(episodes[i].turns) and not episodes[i].failed:
                points.append((i, k))
        return points[:1] if budget else points

    async def _branch(
        self, request: RolloutRequest, past: Episode, point: Point, sessions: Sessions
    ) -> Group:
        """Plays all continuations of a turn."""
        shared = point[1]
        sources = sessions.get(tuple(past.sequences[-1].token_ids.tolist()), {})
        collector = self._part(
            _SnapshotPool(self.pool, past, shared),
            partial(ContinuationPolicy, past=past, shared=shared, sources=sources),
        )
        again = replace(
            request,
            task=past.task,
            seed=derive_seed(request.seed, "branch", *point),
            group_size=self.branching.continuations,
            held_out={},
        )
        async with self._points:
            branches = await collector.play(again, asyncio.Semaphore(self._room))
        shared_part = tuple(map(_as_copy, past.turns[:shared]))
        episodes = []
        for episode in branches.episodes:
            if len(episode.turns) <= shared and episode.ending.ended:
                raise _refused(past, len(episode.turns), "it has ended, expected another turn")
            turns = shared_part[: len(episode.turns)] + episode.turns[shared:]
            episodes.append(replace(episode, turns=turns, reset=past.reset))
        return replace(branches, episodes=tuple(episodes))

    def _part(self, pool: _SnapshotPool, policy: Any) -> Collector:
        event = asyncio.Event()  # a new collector sets its own
        part = replace(self.plain, pool=pool, policy=policy, weights_ready=event)  # type: ignore[arg-type]
        part.weights_ready = self.weights_ready
        return part


class KeepingPolicy(EnginePolicy):
    """Keeps what the engine caches of its episode, for those that branch from it.

    Args:
        sources: Gets the names of its caches.
    """

    def __init__(self, *args: Any, sources: Sessions) -> None:
        super().__init__(*args)
        self.sources = sources

    def release(self) -> None:
        """See `EnginePolicy.release`."""
        ids = tuple(self.transcript.ids) if self.transcript else ()
        if ids in self.sources:  # of an equal episode
            super().release()
        else:
            self.sources[ids] = self.sessions


class ContinuationPolicy(EnginePolicy):
    """Repeats the first turns of an episode and samples the others.

    Args:
        past: The episode.
        shared: Number of turns that are repeated.
        sources: The engine's caches of the episode, as far as they are kept.
    """

    def __init__(self, *args: Any, past: Episode, shared: int, sources: Mapping[int, str]) -> None:
        super().__init__(*args)
        self.past, self.shared, self.sampler, self.sources = past, shared, self.engine, sources

    async def __call__(self, inputs: PolicyInput) -> PolicyOutput:
        """See `gspo_env.rollout.play.Policy`.

        Raises:
            EnvironmentContractError: What the environment returns differs from the past, or its
                tools must not be called again.
        """
        turn = inputs.turn
        if turn == 0:
            check_branching(inputs.env, self.past)
        is_past = turn < self.shared
        self.engine = _Recorded(self.past.turns[turn]) if is_past else self.sampler
        if turn == self.shared:
            for number in self.sessions.keys() & self.sources.keys():
                self.sampler.fork(self.sessions[number], self.sources[number])
        output = await super().__call__(inputs)
        if turn <= self.shared and output.stop is not StopReason.MAX_CONTEXT:
            self._verify(inputs, output)
        return output

    def _verify(self, inputs: PolicyInput, output: PolicyOutput) -> None:
        turn = inputs.turn
        expected = self.past.turns[turn]
        before = self.past.turns[turn - 1] if turn else None
        pairs = {
            "observation": (inputs.observation, expected.observation),
            "reward": (inputs.reward, before.reward if before else 0.0),
            "info": (_plain(inputs.request), _plain(before.info if before else self.past.reset)),
            "prompt": (output.prompt_ids, expected.prompt_ids),
        }
        for name, (value, original) in pairs.items():
            if value != original:
                raise _refused(self.past, turn, f"its {name} is {value!r}, expected {original!r}")


@dataclass(slots=True)
class _Recorded(Engine):
    """Returns the action of a turn that was sampled before."""

    turn: Turn

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None = None
    ) -> Completion:
        turn = self.turn
        return Completion(
            token_ids=turn.action_ids,
            logprobs=turn.logprobs,
            finish_reason="stop" if sampling.ended(turn.action_ids) else "length",
            weights_version=turn.weights_version,
            weights_versions=turn.weights_versions,
        )


@dataclass(slots=True)
class _SnapshotPool:
    """A pool whose environments save their states, or resume from them, if they can.

    Each `info` gets the result that it belongs to and the state after it. In a continuation, the
    results of the past are returned without a step, and `reset` ends in the state to continue from.
    """

    pool: Any
    past: Episode | None = None
    shared: int = 0
    _steps: dict[int, int] = field(default_factory=dict)
    """Steps of each environment since its reset."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def of(self, env_id: str) -> _SnapshotPool:
        return _SnapshotPool(self.pool.of(env_id), self.past, self.shared)

    async def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        name, env = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if name not in ("reset", "step") or not has_snapshots(env):
            return await self.pool.call(function, *args, **kwargs)
        step = self._steps[id(env)] = 0 if name == "reset" else self._steps[id(env)] + 1
        if self.past is None or step > self.shared:
            result = await self.pool.call(function, *args, **kwargs)
            state = await self.pool.call(_snapshot, env)
            result[-1][_SNAPSHOT] = ((*result[:-1], dict(result[-1])), state)
            return result
        if name == "reset":
            await self.pool.call(function, *args, **kwargs)
            await self.pool.call(_restore, env, _saved(self.past, self.shared)[1])
        result = _saved(self.past, step)[0]
        return (*result[:-1], {**result[-1], _SNAPSHOT: _saved(self.past, step)})


def has_snapshots(env: Any) -> bool:
    """Returns whether an environment can be put into a saved state.

    A wrapper other than Gymnasium's check of the order of calls may have a state of its own.
    """
    while isinstance(env, OrderEnforcing):
        env = env.env
    takes_cuts = getattr(env, "takes_cut_actions", False)
    return hasattr(env, "snapshot") and hasattr(env, "restore") and not takes_cuts


def check_branching(env: TextEnvironment, episode: Episode) -> None:
    """Checks that an environment lets its episodes branch.

    Raises:
        EnvironmentContractError: The environment declares `replays = False`; or it does not declare
            it, and has tools or runs a program; or its rewards compare the episodes of a group.
    """
    if attribute(env, "group_reward", None):
        raise EnvironmentContractError(
            f"{episode.task.env_id}: its group_reward compares whole groups, so its episodes "
            "cannot branch."
        )
    declared = attribute(env, "replays", None)
    has_tools = bool(episode.prompt.tools) or any(turn.info.tools for turn in episode.turns)
    if declared is False:
        raise EnvironmentContractError(
            f"{episode.task.env_id}: it declares `replays = False`, so its episodes cannot branch."
        )
    if declared is None and (has_tools or attribute(env, "takes_cut_actions", False)):
        raise EnvironmentContractError(
            f"{episode.task.env_id}: branching calls its tools again; expected `replays = True` in "
            "the environment, if they change nothing outside of the episode."
        )


def sampled_tokens(episode: Episode) -> int:
    """Returns the number of tokens that were sampled for an episode, without those it shares."""
    return sum(len(turn.action_ids) for turn in episode.turns[shared_turns(episode) :])


def _trunks(episodes: Sequence[Episode], turn: int) -> list[int]:
    """Returns the episodes that share no turn and have this one."""
    return [i for i, e in enumerate(episodes) if not shared_turns(e) and turn < len(e.turns)]


def _numbered(episode: Episode, number: int, origin: int | None, shared: int) -> BranchedEpisode:
    values = {f.name: getattr(episode, f.name) for f in fields(Episode)}
    return BranchedEpisode(**values, number=number, origin=origin, shared=shared)


def _as_copy(turn: Turn) -> Turn:
    mask = (False,) * len(turn.action_ids)
    return replace(turn, info=replace(turn.info, token_mask=mask))


def _plain(info: ResetInfo | StepInfo) -> ResetInfo | StepInfo:
    """Returns what has to repeat: without unread keys, functions of tools, and our own mask."""
    if isinstance(info, StepInfo):
        return replace(info, extra={}, tools=None, token_mask=None)
    return replace(info, extra={}, tools=None)


def _refused(past: Episode, turn: int, what: str) -> EnvironmentContractError:
    task = past.task
    return EnvironmentContractError(
        f"{task.env_id}: seed {task.seed} with the same actions does not replay: at turn {turn} "
        f"{what}. Branching needs an environment that replays; see gspo-env envs --check."
    )


def _saved(past: Episode, step: int) -> Any:
    info = past.turns[step - 1].info if step else past.reset
    return info.extra[_SNAPSHOT]


def _snapshot(env: Any) -> Any:
    return deepcopy(env.get_wrapper_attr("snapshot")())  # later steps may change what is in it


def _restore(env: Any, state: Any) -> None:
    env.get_wrapper_attr("restore")(deepcopy(state))


def _without_snapshots(episode: Episode) -> Episode:
    turns = [replace(turn, info=_forget(turn.info)) for turn in episode.turns]
    return replace(episode, turns=tuple(turns), reset=_forget(episode.reset))


def _forget(info: Any) -> Any:
    if _SNAPSHOT not in info.extra:
        return info
    return replace(info, extra={k: v for k, v in info.extra.items() if k != _SNAPSHOT})
