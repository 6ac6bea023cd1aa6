"""Branched groups, a plug-in: what is played again repeats, and each token is trained once."""

from __future__ import annotations

import asyncio
import random
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from support import forks, runs
from support.credits import check, group
from support.credits import episode as credited
from support.rollouts import collector, episodes
from support.scripted_engine import Scripted

from gspo_agents.gspo import GSPOAgent
from gspo_env.batch.packing import pack
from gspo_env.batch.sample import to_samples
from gspo_env.check.actions import random_policy
from gspo_env.config import override
from gspo_env.credit import ReturnsToGo, estimate
from gspo_env.env.base import TextEnv
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentContractError
from gspo_env.registry import load_module
from gspo_env.rollout import Collector, EnvPool, RolloutConfig
from gspo_env.types import Episode, StopReason, Task

FILE = Path(__file__).parents[2] / "studies/credit/branches.py"
branches = load_module(str(FILE))
Every, BranchBaseline = branches.Every, branches.BranchBaseline


def branched(bare, number, origin=None, shared=0):
    values = {f.name: getattr(bare, f.name) for f in fields(Episode)}
    return branches.BranchedEpisode(**values, number=number, origin=origin, shared=shared)


def test_siblings_are_compared_and_each_counts_as_its_part_of_an_episode():
    trunks = branched(credited(0, 1), 0), branched(credited(0, 0), 1)
    forest = group(*trunks, branched(credited(0, 0), 2, 0, 1))
    # first turns are worth 1/2 and 0; the second turn of the second episode has no siblings
    rows = BranchBaseline(aggregation="token_sum").advantages(forest)
    check(rows, [0.5, 0.5], [-0.5, -0.5], [0, -0.5])
    # the loss divides by 4, 4 and 2 trained tokens; each token is one of 4 of a whole episode
    check(BranchBaseline().advantages(forest), [0.5, 0.5], [-0.5, -0.5], [0, -0.25])
    discounted = BranchBaseline(gamma=0, aggregation="token_sum").advantages(forest)
    check(discounted, [0, 0.5], [0, -0.5], [0, -0.5])
    failed = branched(credited(0, 9, stop=StopReason.ERROR), 3, 0, 1)
    rows = BranchBaseline().advantages(group(*forest.episodes, failed))
    check(rows, [0.5, 0.5], [-0.5, -0.5], [0, -0.25], [0, 0])


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_without_branches_the_baseline_is_that_of_returns_to_go(gamma):
    rng = np.random.default_rng(0)
    plain = group(*(credited(*rng.normal(size=3)) for _ in range(5)))
    ours, theirs = (
        estimator(gamma=gamma).advantages(plain) for estimator in (BranchBaseline, ReturnsToGo)
    )
    check(ours, *map(list, theirs))


def babbler(chat):
    """An engine that samples random and hostile actions."""

    def answer(prompt_ids, sampling):
        rng = random.Random(sampling.seed)
        text = random_policy(rng, chat.decode_all(prompt_ids[-200:]))
        text = text[:200].encode("utf-8", "replace").decode()
        return (*chat.encode(text)[: sampling.max_tokens - 1], chat.stop_ids[0])

    return Scripted(answer)


class Counter(TextEnv):
    """Adds the lengths of the actions; with a flaw, an answer differs when it is played again."""

    blocking = False
    flaw = ""
    resets: dict[int, int]

    def __init__(self):
        self.resets, self.total = {}, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total, self.seed = int(self.np_random.integers(100)), seed
        self.resets[seed] = self.resets.get(seed, 0) + 1
        return f"start {self.total}", {}

    def step(self, action):
        self.total += len(action)
        terminated, truncated = self.end_turn(self.turns_played == 4)
        again = self.resets[self.seed] > 1
        byte = " " if again and self.flaw == "byte" else ""
        reward = float(self.total % 3) + (again and self.flaw == "reward")
        ends = again and self.flaw == "end" and self.turns_played == 1
        info = {"state_key": f"{self.total % 2}"}
        return f"total {self.total}{byte}", reward, terminated or ends, truncated, info


class Judged(Counter):
    async def group_reward(self, group):
        return group


def play(chat, make, rule, tasks=3, size=3):
    config = RolloutConfig(max_turns=5, max_turn_tokens=300, max_context=1 << 20)
    running = rule.wrap(Collector(babbler(chat), chat, EnvPool(make), config))
    every = [Task(env_id="test", seed=n) for n in range(tasks)]
    return asyncio.run(running.collect(every, seed=0, group_size=size))


def check_lineage(forest):
    """Every episode begins with the turns of its origin, which only the origin trains."""
    numbered = {episode.number: episode for episode in forest.episodes}
    for episode in forest.episodes:
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


def test_turns_are_played_again_and_equal_seeds_give_equal_groups(chat):
    rule = Every(every=2, continuations=2)
    for first, again in zip(*(play(chat, Counter, rule) for _ in range(2)), strict=True):
        check_lineage(first)
        texts = [[[t.text for t in e.turns] for e in g.episodes] for g in (first, again)]
        assert texts[0] == texts[1]
        continued = [e for e in first.episodes if e.origin is not None]
        assert len(continued) == 3 * 2 * 2
        assert {e.shared for e in continued} == {2, 4}


def test_engine_and_trainer_agree_and_the_common_past_is_trained_once(player):
    running = Every().wrap(collector(player, lambda: make_env(player.env_id), max_turns=4))
    groups = asyncio.run(
        running.collect([Task(env_id="test", seed=n) for n in range(4)], seed=0, group_size=2)
    )
    played = episodes(groups)
    assert sum(episode.shared > 0 for episode in played) > 10
    assert forks.differences(player.model, played).max() <= 1e-4
    for forest in groups:
        samples = to_samples(forest.episodes, estimate([forest], BranchBaseline()).advantages[0])
        trained = sum(int(sample.mask.sum()) for sample in samples)
        assert trained == sum(map(branches.sampled_tokens, forest.episodes))
        assert Every().metrics([forest]) == {"rollout/tokens": trained}
        distinct = sum(
            len(turn.prompt_ids) + len(turn.action_ids)
            for episode in forest.episodes
            for turn in episode.turns[episode.shared :]
        )
        assert len(pack(samples).input_ids_T) <= 1.05 * distinct


@pytest.mark.parametrize("flaw", ["byte", "reward", "end"])
def test_an_environment_that_does_not_replay_is_refused_by_name(chat, flaw):
    flawed = type("Flawed", (Counter,), {"flaw": flaw})
    with pytest.raises(EnvironmentContractError, match=r"test: seed 0 .* does not replay: at turn"):
        play(chat, flawed, Every(every=2), tasks=1, size=1)
    with pytest.raises(EnvironmentContractError, match="test: its group_reward compares"):
        play(chat, Judged, Every())


def test_a_run_branches_in_training_only_and_counts_the_share_that_was_played():
    every = {"name": f"{FILE}:Every", "every": 2, "continuations": 2}  # of 4 turns
    rows = {"advantage": f"{FILE}:BranchBaseline", "rollout": {"group_size": 2}}
    recipe = {"hidden_size": 16, "layers": 1, "heads": 2, "imitation_learning_rate": 0.02}
    config = runs.tiny(env="gspo/KeyDoor-v0", recipe=recipe)
    with pytest.raises(ConfigError, match="which would weigh a branch as a whole"):
        GSPOAgent(config=override(config, {"branching": every})).train()
    summed = {"branching": every, **rows, "loss": "dr_grpo"}
    with pytest.raises(ConfigError, match=r"loss\.aggregation is 'token_sum'"):
        GSPOAgent(config=override(config, summed)).train()
    history = GSPOAgent(config=override(config, {"branching": every, **rows})).train()
    before = [m["rollout/episodes_before"] for _, m in history if "rollout/episodes_before" in m]
    assert before == [0, config.tasks_per_step * (2 + 2 * 2 * 0.5)]
