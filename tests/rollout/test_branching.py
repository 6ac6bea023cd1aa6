"""Branched groups: what is played again repeats, and each sampled token is trained once."""

from __future__ import annotations

import asyncio
import copy
import random
from dataclasses import dataclass

import pytest
from support import forks
from support.rollouts import collector, episodes

from gspo_env.batch.packing import pack
from gspo_env.batch.sample import to_samples
from gspo_env.check.actions import random_policy
from gspo_env.check.environment import check_env
from gspo_env.credit.branches import BranchBaseline, shared_turns
from gspo_env.credit.estimate import estimate
from gspo_env.engines.base import Completion, Engine
from gspo_env.env.base import TextEnv
from gspo_env.env.registration import _BUILTIN, make_env
from gspo_env.env.tools import as_tool, tool
from gspo_env.errors import (
    ConfigError,
    EnvironmentCheckError,
    EnvironmentContractError,
    MissingExtraError,
)
from gspo_env.rollout.branching import (
    Branching,
    DisputedTurns,
    EveryTurn,
    UncertainTurns,
    sampled_tokens,
)
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.metrics import RolloutStats
from gspo_env.rollout.pool import EnvPool
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Task

KWARGS = {"gspo/Dataset-v0": {"data": [{"prompt": f"{n} + 1?"} for n in range(9)], "max_turns": 4}}


class Babbler(Engine):
    """Samples random and hostile actions."""

    def __init__(self, chat):
        self.chat = chat

    async def generate(self, prompt_ids, sampling, session=None):
        rng = random.Random(sampling.seed)
        text = random_policy(rng, self.chat.decode_all(prompt_ids[-200:]))
        text = text[:200].encode("utf-8", "replace").decode()
        ids = (*self.chat.encode(text)[: sampling.max_tokens - 1], self.chat.stop_ids[0])
        logprobs = tuple(-rng.random() for _ in ids)
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason="stop", weights_version=0)


class Counter(TextEnv):
    """Adds the lengths of the actions; with a flaw, an answer differs when it is played again."""

    blocking = False
    flaw = ""
    resets: dict[int, int]

    def __init__(self):
        self.resets, self.total, self.steps = {}, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total, self.seed = int(self.np_random.integers(100)), seed
        self.resets[seed] = self.resets.get(seed, 0) + 1
        return f"start {self.total}", {}

    def step(self, action):
        self.total, self.steps = self.total + len(action), self.steps + 1
        terminated, truncated = self.end_turn(self._turn == 4)
        again = self.resets[self.seed] > 1
        byte = " " if again and self.flaw == "byte" else ""
        reward = float(self.total % 3) + (again and self.flaw == "reward")
        ends = again and self.flaw == "end" and self._turn == 1
        return (
            f"total {self.total}{byte}",
            reward,
            terminated or ends,
            truncated,
            {"state_key": f"{self.total % 2}"},
        )


class Saving(Counter):
    def snapshot(self):
        return copy.deepcopy({k: v for k, v in vars(self).items() if k not in ("steps", "resets")})

    def restore(self, state):
        vars(self).update(copy.deepcopy(state))


class Shared(Saving):
    """Hands out its state itself, which later steps change."""

    def reset(self, **options):
        result = super().reset(**options)
        self.log = []
        return result

    def step(self, action):
        self.log.append(len(action))
        observation, *rest = super().step(action)
        return (f"{observation} {sum(self.log)}", *rest)

    def snapshot(self):
        return {k: v for k, v in vars(self).items() if k not in ("steps", "resets")}

    def restore(self, state):
        vars(self).update(state)


class Replayed(Shared):
    snapshot = restore = property()


@tool
def ask() -> str:
    """Asks."""
    return "yes"


class Asking(Counter):
    tools = (as_tool(ask),)


def branch(chat, make, rule, env_id="test", tasks=3, size=3, engine=Babbler, **limits):
    """The groups, and the environments that played them."""
    envs = []

    def make_one():
        envs.append(make())
        return envs[-1]

    config = RolloutConfig(
        **{"max_turns": 5, "max_turn_tokens": 300, "max_context": 1 << 20, **limits}
    )
    pool = EnvPool(make_one)
    running = rule.wrap(Collector(engine(chat), chat, pool, config))
    every = [Task(env_id=env_id, seed=n) for n in range(tasks)]
    groups = asyncio.run(running.collect(every, seed=0, group_size=size))
    pool.close()
    return groups, envs


def check_lineage(group):
    """Every episode begins with the turns of its origin, which only the origin trains."""
    numbered = {episode.number: episode for episode in group.episodes}
    for episode in group.episodes:
        if episode.origin is None:
            continue
        origin = numbered[episode.origin]
        assert 0 < episode.shared < min(len(origin.turns), len(episode.turns))
        pairs = list(zip(episode.turns, origin.turns, strict=False))
        for turn, first in pairs[: episode.shared]:
            assert (turn.text, turn.observation) == (first.text, first.observation)
            assert not any(turn.info.token_mask)
        turn, first = pairs[episode.shared]
        assert (turn.observation, turn.prompt_ids) == (first.observation, first.prompt_ids)


@pytest.mark.parametrize("env_id", sorted(_BUILTIN))
def test_episodes_of_every_built_in_environment_branch(chat, env_id):
    try:
        make_env(env_id, **KWARGS.get(env_id, {})).close()
    except (MissingExtraError, ConfigError) as error:
        pytest.skip(f"{env_id} cannot be made bare: {error}")
    make = lambda: make_env(env_id, **KWARGS.get(env_id, {}))  # noqa: E731
    groups, _ = branch(chat, make, EveryTurn(continuations=2), env_id, tasks=4, size=2)
    for group in groups:
        check_lineage(group)


def test_engine_and_trainer_agree_on_branched_episodes_and_the_common_past_is_computed_once(player):
    running = EveryTurn().wrap(collector(player, lambda: make_env(player.env_id), max_turns=4))
    every = [Task(env_id="test", seed=n) for n in range(6)]
    groups = asyncio.run(running.collect(every, seed=0, group_size=2))
    played = episodes(groups)
    assert sum(map(bool, map(shared_turns, played))) > 20
    assert forks.differences(player.model, played).max() <= 1e-4
    assert running.engine.fed_tokens <= 1.1 * forks.fed_at_least(played)
    for group in groups:
        samples = to_samples(group.episodes, estimate([group], BranchBaseline()).advantages[0])
        trained = sum(int(sample.mask.sum()) for sample in samples)
        assert trained == sum(map(sampled_tokens, group.episodes))
        assert trained == RolloutStats(groups=[group], seconds=1.0).tokens
        distinct = sum(
            len(turn.prompt_ids) + len(turn.action_ids)
            for e in group.episodes
            for turn in e.turns[shared_turns(e) :]
        )
        assert len(pack(samples).input_ids_T) <= 1.05 * distinct


@pytest.mark.parametrize(
    ("slots", "size", "n"),
    [
        (8, 4, 3),
        (8, 2, 6),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((16, 4, 3), (8, 4, 6))),
    ],
)
def test_an_engine_with_few_slots_computes_a_common_past_once(player, slots, size, n):
    make = lambda: make_env(player.env_id)  # noqa: E731
    limits = {"concurrency": slots, "group_size": size, "max_turns": 5}
    running = EveryTurn(continuations=n).wrap(collector(player, make, **limits))
    every = [Task(env_id="test", seed=n) for n in range(8)]
    played = episodes(asyncio.run(running.collect(every, seed=0)))
    assert running.engine.fed_tokens <= 1.1 * forks.fed_at_least(played)


@pytest.mark.parametrize("flaw", ["byte", "reward", "end"])
def test_an_environment_that_does_not_replay_is_refused_by_name(chat, flaw):
    class Flawed(Counter):
        pass

    Flawed.flaw = flaw
    with pytest.raises(
        EnvironmentContractError, match=r"flawed: seed 0 .* does not replay: at turn"
    ):
        branch(chat, Flawed, EveryTurn(every=2), "flawed", tasks=1, size=1)


@pytest.mark.parametrize(("replay", "save"), [(Counter, Saving), (Replayed, Shared)])
def test_a_saved_state_gives_the_same_branches_as_a_replay_with_fewer_steps(chat, replay, save):
    replayed, envs = branch(chat, replay, EveryTurn())
    restored, saving = branch(chat, save, EveryTurn())
    for one, two in zip(episodes(replayed), episodes(restored), strict=True):
        assert [(t.observation, t.text, t.reward) for t in one.turns] == [
            (t.observation, t.text, t.reward) for t in two.turns
        ]
        assert not any(info.extra for info in [two.reset, *(turn.info for turn in two.turns)])
    own = sum(len(e.turns) - shared_turns(e) for e in episodes(restored))
    assert sum(env.steps for env in saving) == own < sum(env.steps for env in envs)


@pytest.mark.parametrize("replays", [None, False, True])
def test_tools_are_called_again_only_if_the_environment_declares_that_they_may(chat, replays):
    class Declared(Asking):
        pass

    Declared.replays = replays
    if replays:
        assert any(map(shared_turns, episodes(branch(chat, Declared, EveryTurn())[0])))
        return
    with pytest.raises(EnvironmentContractError, match=r"test: .*replays = "):
        branch(chat, Declared, EveryTurn())


class Judged(Counter):
    async def group_reward(self, group):
        return group


def test_an_environment_that_compares_whole_groups_is_refused(chat):
    with pytest.raises(EnvironmentContractError, match="test: its group_reward compares"):
        branch(chat, Judged, EveryTurn())


class Forgetful(Saving):
    def snapshot(self):
        return {"_turn": self._turn}


@pytest.mark.parametrize(
    ("make", "how"), [(Counter, "replay"), (Saving, "snapshot"), (Asking, "no"), (Judged, "no")]
)
def test_the_check_of_an_environment_says_how_its_episodes_branch(make, how):
    assert check_env(make()).branches == how


def test_the_check_finds_a_state_that_is_not_restored():
    with pytest.raises(EnvironmentCheckError, match=r"after restore\(\): turn"):
        check_env(Forgetful())


@dataclass(frozen=True, kw_only=True, slots=True)
class Nested(Branching):
    """Branches once at turn 1, and once at turn 2 of the first branch."""

    def points(self, episodes):
        return [(0, 1)] if len(episodes) == 3 else [(0, 1), (3, 2)]


@pytest.mark.parametrize(
    "rule",
    [EveryTurn(every=2), UncertainTurns(turns=2), DisputedTurns(), Nested(continuations=2)],
    ids=repr,
)
def test_rules_select_turns_and_equal_seeds_give_equal_groups(chat, rule):
    (first, _), (again, _) = (branch(chat, Counter, rule) for _ in range(2))
    for group, other in zip(first, again, strict=True):
        check_lineage(group)
        assert [[t.text for t in e.turns] for e in group.episodes] == [
            [t.text for t in e.turns] for e in other.episodes
        ]
        branches = [e for e in group.episodes if e.origin is not None]
        assert len(branches) in range(rule.continuations, 99, rule.continuations)
        if isinstance(rule, EveryTurn):
            assert {e.shared for e in branches} == {2, 4}
        if isinstance(rule, Nested):
            assert {(e.origin, e.shared) for e in branches} == {(0, 1), (3, 2)}


class Answer(Branching):
    """Returns whatever it is given."""

    def __init__(self, points):
        super().__init__()
        object.__setattr__(self, "answer", points)

    def points(self, episodes):
        return self.answer


@pytest.mark.parametrize(
    "points", [None, 3, [1, 2], [(0, 1.0)], [(0,)], [(0, 1, 2)], [("0", "1")], [(0, None)]]
)
def test_a_rule_that_returns_no_turns_is_refused_with_what_it_returned(chat, points):
    with pytest.raises(
        ConfigError, match=r"Answer: points\(\) returned .*; expected pairs of integ"
    ):
        branch(chat, Counter, Answer(points), tasks=1)


def test_the_budget_ends_branching_within_one_turn_and_evaluations_have_no_branches(chat):
    (group,), _ = branch(chat, Counter, EveryTurn(), tasks=1)
    plain = sum(sampled_tokens(e) for e in group.episodes if e.origin is None)
    (bounded,), _ = branch(chat, Counter, EveryTurn(budget=plain + 1), tasks=1)
    assert len(bounded.episodes) == 3 + EveryTurn().continuations < len(group.episodes)
    running = EveryTurn().wrap(
        Collector(Babbler(chat), chat, EnvPool(Counter), RolloutConfig(max_turns=5))
    )
    groups = asyncio.run(running.collect_evaluation([Task(env_id="test", seed=0)], seed=0))
    assert [len(group.episodes) for part in groups for group in part] == [1, 1]
    how = {"seed": 0, "group_size": 2}  # that of `GSPOAgent.evaluate`
    (group,) = asyncio.run(running.plain.collect([Task(env_id="test", seed=0)], **how))
    assert len(group.episodes) == 2
    with pytest.raises(ConfigError, match=r"expected rollout.workers 'asyncio'"):
        EveryTurn().wrap(
            Collector(Babbler(chat), chat, EnvPool(Counter), RolloutConfig(workers="ray:2"))
        )
