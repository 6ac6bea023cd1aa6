"""Branched groups, a plug-in: episodes are played again from the middle of others.

    gspo-env train --branching studies/credit/branches.py:Every --every 2 --continuations 2 \
        --advantage studies/credit/branches.py:BranchBaseline --rollout.group-size 4

The environment gets the seed and the actions again, so its tools are called again, and each
observation has to be the same, byte by byte. `BranchBaseline` compares a turn with siblings that
share its past. The episodes of a group form a forest. Its nodes are the turns: a turn that several
episodes share is one node, and its children are the turns that were sampled after it. Notation:
c(x) is the set of children of node x, r_x its reward, and p(x) the set of x and its siblings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Interval

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.credit import GroupEstimator, turn_rewards
from gspo_env.credit.statistics import divided
from gspo_env.engines.base import Completion, Engine, Sampling
from gspo_env.errors import ConfigError, EnvironmentContractError
from gspo_env.registry import name_of
from gspo_env.rollout import Collector, EnginePolicy, PolicyInput, PolicyOutput, RolloutPlugin
from gspo_env.rollout.collector import RolloutRequest, first_error
from gspo_env.seeding import derive_seed
from gspo_env.settings import settings
from gspo_env.types import (
    Episode,
    FloatArray,
    Group,
    ResetInfo,
    Score,
    StepInfo,
    StopReason,
    Turn,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchedEpisode(Episode):
    """An episode of a branched group, which may begin with turns of another one.

    The shared turns are copies. Their `StepInfo.token_mask` is False throughout, so each token is
    trained once, in the episode that sampled it.

    Example:
        Number 4 continues number 0 from its turn 2: `number=4, origin=0, shared=2`. Its turns 0 and
        1 are those of number 0, and it sampled turn 2 and all later ones.
    """

    number: int
    """Names the episode in its group."""
    origin: int | None = None
    """The episode with which it begins, which comes before it in the group; None if it shares no
    turn."""
    shared: int = 0
    """Number of turns that it shares with its origin."""


@settings
class Every(RolloutPlugin):
    """Plays the turns k, 2k, ... of each episode again, n times each."""

    every: Annotated[int, Ge(1)] = 1
    """Turns from one branch to the next, k; turn 0 is compared in the whole group anyway."""
    continuations: Annotated[int, Ge(1)] = 3
    """Times that each of these turns is played again, n."""

    def check(self, config: Any, chat: ChatTokenizer) -> None:
        """See `RolloutPlugin.check`."""
        name, compaction = name_of("advantage", config.advantage), config.compaction
        if not isinstance(config.advantage, BranchBaseline):
            raise ConfigError(
                f"episodes branch and advantage is {name!r}, which would weigh a branch as a whole "
                "episode; expected BranchBaseline of studies/credit/branches.py"
            )
        summed = getattr(config.loss, "aggregation", config.advantage.aggregation)
        if summed != config.advantage.aggregation:
            raise ConfigError(
                f"loss.aggregation is {summed!r} and advantage.aggregation "
                f"{config.advantage.aggregation!r}; expected the same"
            )
        if type(compaction) is not RolloutPlugin or config.rollout.ray_workers:
            raise ConfigError(
                "episodes branch; expected compaction 'none' and rollout.workers 'asyncio'"
            )

    def wrap(self, collector: Collector) -> Collector:
        """See `RolloutPlugin.wrap`."""
        return BranchingCollector(collector, self)

    def episodes(self, groups: Sequence[Group]) -> float:
        """Counts a branch as the share of its turns that it played."""
        every = [episode for group in groups for episode in group.episodes]
        return sum(1.0 - shared_turns(e) / max(1, len(e.turns)) for e in every)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns the sampled tokens; those that episodes share count once."""
        tokens = sum(sampled_tokens(episode) for group in groups for episode in group.episodes)
        return {"rollout/tokens": float(tokens)}


class BranchingCollector(Collector):
    """Plays a group, and its episodes again from the turns of a rule."""

    def __init__(self, plain: Collector, rule: Every) -> None:
        super().__init__(**{f.name: getattr(plain, f.name) for f in fields(Collector) if f.init})
        self.plain, self.rule = plain, rule

    async def play_group(self, request: RolloutRequest, in_flight: asyncio.Semaphore) -> Group:
        """See `Collector.play_group`.

        Raises:
            EnvironmentContractError: The environment does not replay, or compares whole groups.
        """
        group = await self.plain.play_group(request, in_flight)
        if self.pool.of(request.task.env_id).group_reward is not None:
            raise EnvironmentContractError(
                f"{request.task.env_id}: its group_reward compares whole groups, so its episodes "
                "cannot branch."
            )
        trunks = [e for e in group.episodes if not e.failed]
        longest = max((len(episode.turns) for episode in trunks), default=0)
        points = [
            (i, k)
            for k in range(self.rule.every, longest, self.rule.every)
            for i, episode in enumerate(group.episodes)
            if not episode.failed and k < len(episode.turns)
        ]
        async with first_error(), asyncio.TaskGroup() as running:
            playing = [
                running.create_task(self._branch(request, group.episodes[i], (i, k), in_flight))
                for i, k in points
            ]
        episodes = [_numbered(episode, n, None, 0) for n, episode in enumerate(group.episodes)]
        for (i, k), task in zip(points, playing, strict=True):
            for episode in task.result():
                if len(episode.turns) > k or episode.failed:
                    episodes.append(_numbered(episode, len(episodes), i, k))
        return replace(group, episodes=tuple(episodes))

    async def _branch(
        self,
        request: RolloutRequest,
        past: Episode,
        point: tuple[int, int],
        in_flight: asyncio.Semaphore,
    ) -> list[Episode]:
        """Plays all continuations of a turn."""
        shared = point[1]
        policy: Any = partial(ContinuationPolicy, past=past, shared=shared)
        again = replace(
            request,
            task=past.task,
            seed=derive_seed(request.seed, "branch", *point),
            group_size=self.rule.continuations,
            held_out={},
        )
        branches = await replace(self.plain, policy=policy, counter=None).play_group(
            again, in_flight
        )
        copies = tuple(map(_as_copy, past.turns[:shared]))
        episodes = []
        for episode in branches.episodes:
            if len(episode.turns) <= shared and episode.ending.ended:
                raise _refused(past, len(episode.turns), "it has ended, expected another turn")
            turns = copies[: len(episode.turns)] + episode.turns[shared:]
            episodes.append(replace(episode, turns=turns, reset=past.reset))
        return episodes


class ContinuationPolicy(EnginePolicy):
    """Repeats the first turns of an episode and samples the others.

    Args:
        past: The episode.
        shared: Number of turns that are repeated.
    """

    def __init__(self, *args: Any, past: Episode, shared: int) -> None:
        super().__init__(*args)
        self.past, self.shared, self.sampler = past, shared, self.engine

    async def __call__(self, inputs: PolicyInput) -> PolicyOutput:
        """See `gspo_env.rollout.Policy`.

        Raises:
            EnvironmentContractError: What the environment returns differs from the past.
        """
        is_past = inputs.turn < self.shared
        self.engine = _Recorded(self.past.turns[inputs.turn]) if is_past else self.sampler
        output = await super().__call__(inputs)
        if inputs.turn <= self.shared and output.stop is not StopReason.MAX_CONTEXT:
            self._verify(inputs, output)
        return output

    def _verify(self, inputs: PolicyInput, output: PolicyOutput) -> None:
        turn = inputs.turn
        expected = self.past.turns[turn]
        before = self.past.turns[turn - 1] if turn else None
        pairs = {
            "observation": (inputs.observation, expected.observation),
            "reward": (inputs.reward, before.reward if before else 0.0),
            "info": (_plain(inputs.info), _plain(before.info if before else self.past.reset)),
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


def shared_turns(episode: Episode) -> int:
    """Returns the number of turns that another episode of the group sampled."""
    return episode.shared if isinstance(episode, BranchedEpisode) else 0


def sampled_tokens(episode: Episode) -> int:
    """Returns the number of tokens that were sampled for an episode, without those it shares."""
    return sum(len(turn.action_ids) for turn in episode.turns[shared_turns(episode) :])


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


@dataclass(slots=True, eq=False)
class _Node:
    """A turn of the forest, or its root, which is not a turn."""

    parent: _Node | None
    depth: int
    reward: float
    tokens: int
    """Trained tokens of the turn and of all before it."""
    children: list[_Node] = field(default_factory=list)
    value: float = 0.0
    """Return-to-go: r_x + gamma * mean of the values of c(x)."""
    weight: float = 1.0
    """Probability of reaching it from the root, with equal chances for all children of a node."""
    token_weight: float = 0.0
    """Sum of weight / trained tokens over the episodes that end below it."""
    levels: dict[int, FloatArray] = field(default_factory=dict)
    """(3,) for each depth below it: number of nodes, sum of weights, weighted sum of values."""


@settings
class BranchBaseline(GroupEstimator):
    """Each branch's return against the mean of its siblings', which share its past.

    Q_x = r_x + gamma * mean of Q over c(x), and A_x = Q_x - mean of Q over p(x) without x. A turn
    without siblings is compared with the turns of its number under its closest ancestor that has
    others, weighted as below; if there are none, with all turns of other first turns. In a group
    without branches these are `returns_to_go`, where at least 3 episodes have the turn.

    A turn with n siblings is one of n + 1 samples, so A_x is multiplied by the weight of x: 1 for
    the whole group, divided equally among the children of each node. This has no bias where the
    turns to branch at depend on their past alone and all episodes have equal length.

    Source:
        Leave-one-out values of continuations: VinePPO, arXiv 2410.01679.

    Example:
        Two first turns; the first continues twice, with the rewards 1 and 0, and the second once,
        with 0. Q is 1/2 and 0 for the first turns, so A is 1/2 and -1/2. The two continuations get
        1 and -1, times their weight: each is half of one of two episodes.
    """

    gamma: Annotated[float, Interval(ge=0, le=1)] = 1.0
    """Discount per turn."""
    aggregation: Literal["sequence_mean", "token_mean", "token_sum"] = "sequence_mean"
    """The `aggregation` of the loss. `sequence_mean` divides by the tokens that an episode sampled
    itself, which the advantages undo: they count a branch as part of the whole episode."""

    def compare(self, episodes: Sequence[Episode], score: Score) -> Sequence[FloatArray]:
        """See `GroupEstimator.compare`."""
        root = _Node(None, -1, 0.0, 0)
        nodes, paths = _grow(root, episodes, score)
        _evaluate(root, nodes, self.gamma)
        trunks, rows, values = len(root.children), [], []
        for episode, path in zip(episodes, paths, strict=True):
            shared = shared_turns(episode)
            past = path[shared - 1].tokens if shared else 0
            row_K = np.zeros(len(path))
            for k in range(shared, len(path)):
                node = path[k]
                advantage = _advantage(node)
                values.append(advantage)
                if self.aggregation == "sequence_mean":
                    row_K[k] = advantage * node.token_weight * (path[-1].tokens - past) * trunks
                else:
                    row_K[k] = advantage * node.weight * trunks
            rows.append(row_K)
        deviations = np.array(values)
        return divided(rows, deviations - deviations.mean(), self.scale, self.ddof, 0.0)


def mask_turn(turn: Turn) -> tuple[bool, ...]:
    """Returns which sampled tokens of a turn are trained on."""
    mask = turn.info.token_mask
    return (True,) * max(1, len(turn.action_ids)) if mask is None else mask


def _grow(
    root: _Node, episodes: Sequence[Episode], score: Score
) -> tuple[list[_Node], list[list[_Node]]]:
    """Returns the nodes, parents first, and the path of each episode."""
    nodes: list[_Node] = []
    paths: list[list[_Node]] = []
    numbered: dict[int, list[_Node]] = {}
    for episode in episodes:
        path: list[_Node] = []
        if isinstance(episode, BranchedEpisode):
            if episode.origin is not None:
                path = numbered[episode.origin][: episode.shared]
            numbered[episode.number] = path
        rewards_K = turn_rewards(episode, score)
        for k in range(len(path), len(rewards_K)):
            parent = path[-1] if path else root
            tokens = parent.tokens + sum(mask_turn(episode.turns[k]))
            node = _Node(parent, k, float(rewards_K[k]), tokens)
            parent.children.append(node)
            path.append(node)
            nodes.append(node)
        paths.append(path)
    return nodes, paths


def _evaluate(root: _Node, nodes: Sequence[_Node], gamma: float) -> None:
    """Computes weights from the root down, and then values from the leaves up."""
    for node in nodes:
        assert node.parent is not None
        node.weight = node.parent.weight / len(node.parent.children)
    for node in [*reversed(nodes), root]:
        below = [child.value for child in node.children]
        node.value = node.reward + (gamma * sum(below) / len(below) if below else 0.0)
        if below:
            node.token_weight = sum(child.token_weight for child in node.children)
        else:
            node.token_weight = node.weight / max(1, node.tokens)
        node.levels[node.depth] = np.array([1.0, node.weight, node.weight * node.value])
        for child in node.children:
            for depth, sums in child.levels.items():
                node.levels[depth] = node.levels.get(depth, 0.0) + sums


def _advantage(node: _Node) -> float:
    """Returns Q_x minus its baseline; 0 if nothing can be compared with it."""
    child, ancestor = node, node.parent
    while ancestor is not None:
        others = ancestor.levels[node.depth] - child.levels[node.depth]
        if others[0] > 0.5:
            return float(node.value - others[2] / others[1])
        child, ancestor, top = ancestor, ancestor.parent, child
    everything = np.sum([sums for depth, sums in child.levels.items() if depth >= 0], axis=0)
    others = everything - np.sum([*top.levels.values()], axis=0)
    return float(node.value - others[2] / others[1]) if others[0] > 0.5 else 0.0
