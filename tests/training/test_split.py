"""Held-out tasks: training plays no task of the evaluation, and a summary says what is known."""

import asyncio
import functools
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cli_errors import refused
from support.runs import drawn
from support.scripted_engine import Scripted
from support.small_env import Small

from gspo_agents.gspo import GSPOAgent
from gspo_agents.scripted import ScriptedAgent
from gspo_env.cli.main import main
from gspo_env.env.base import attribute
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentContractError, RolloutError
from gspo_env.rollout import Collector, EnvPool, RolloutConfig, RolloutStats
from gspo_env.seeding import HELD_OUT, derive_seed
from gspo_env.training import hold_out, read_resets
from gspo_env.types import ResetInfo, Task

ROWS = [{"prompt": f"What is {n % 90} + 1?", "completion": str(n % 90 + 1)} for n in range(100)]
SPACES = {
    "gspo/Wordle-v0": {},
    "gspo/GuessNumber-v0": {},
    "gspo/PythonTool-v0": {},
    "gspo/Calculator-v0": {"operations": (1, 2)},
    "gspo/VariableLength-v0": {},
    "gspo/Dataset-v0": {"data": ROWS, "held_out": ROWS[85:]},
}
"""Environments in which a plain split by seed trains on tasks of the evaluation."""


def collector(chat, make, **limits):
    limits = {"max_turns": 1, "max_turn_tokens": 4, **limits}
    silent = Scripted(lambda *_: chat.stop_ids[:1])
    return Collector(silent, chat, EnvPool(make), RolloutConfig(**limits))


def split_of(pool, env_id, count):
    async def first():
        async with pool.lease() as env:
            return env

    env = asyncio.run(first())

    def read(tasks):
        return asyncio.run(read_resets(pool, RolloutConfig(), tasks))

    return hold_out(env_id, count, read, attribute(env, "num_tasks", None))


def training_tasks(env_id, count):
    return [Task(env_id=env_id, seed=derive_seed("task", 0, n) % HELD_OUT) for n in range(count)]


def keys(groups):
    return {e.reset.task_key for group in groups for e in group.episodes}


@pytest.mark.parametrize("env_id", SPACES)
def test_training_meets_no_task_of_the_evaluation(chat, env_id):
    running = collector(chat, lambda: make_env(env_id, **SPACES[env_id]))
    split = split_of(running.pool, env_id, 64)
    tasks = training_tasks(env_id, 300)
    open_split = asyncio.run(running.collect(tasks, seed=0, group_size=1))
    held = split.held_out[env_id]
    assert keys(open_split) & held  # a plain split by seed does not hold out
    groups = asyncio.run(running.collect(tasks, seed=0, group_size=1, held_out=split.held_out))
    assert not keys(groups) & held
    evaluation = asyncio.run(running.collect(split.tasks, seed=0, group_size=1))
    assert keys(evaluation) == held == set(split.keys)
    moved = [a for a, b in zip(groups, tasks, strict=True) if a.task.seed != b.seed]
    stats = RolloutStats(groups, 1.0)
    assert stats.metrics()["rollout/redrawn_tasks"] >= len(moved) > 0
    assert "held-out tasks" in str(split)


def test_without_a_key_the_overlap_is_unknown():
    split = hold_out("x", 8, lambda tasks: [ResetInfo()] * len(tasks))
    assert not split.held_out
    assert str(split) == "8 tasks, split by seed, overlap unknown"
    assert [task.seed for task in split.tasks] == list(range(HELD_OUT, HELD_OUT + 8))
    declared = hold_out("x", 8, lambda tasks: [ResetInfo()] * len(tasks), num_tasks=5)
    assert str(declared) == "8 episodes of the training tasks, 5 different tasks"
    many = hold_out("x", 8, lambda tasks: [ResetInfo()] * len(tasks), num_tasks=500)
    assert str(many) == "8 tasks, split by seed, overlap unknown"


@settings(max_examples=60)
@given(
    number=st.integers(1, 400),
    count=st.integers(1, 80),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    declared=st.booleans(),
    broken=st.integers(0, 7),
)
@example(number=2, count=1, skew=3.0, declared=True, broken=0)
@example(number=23, count=47, skew=3.0, declared=False, broken=2)
def test_the_evaluation_plays_only_held_out_tasks_and_leaves_half_of_the_draws(
    number, count, skew, declared, broken
):
    @functools.cache
    def key(seed):  # with skew, the first tasks are drawn more often
        return str(int(number * random.Random(seed).random() ** (1 + skew)))

    def read(tasks):
        failed = (lambda seed: seed % 8 == broken) if broken else (lambda seed: False)
        return [None if failed(t.seed) else ResetInfo(task_key=key(t.seed)) for t in tasks]

    split = hold_out("x", count, read, number if declared else None)
    assert split == hold_out("x", count, read, number if declared else None)
    assert split.distinct <= number + count * bool(broken)
    if split.held_out:
        held = split.held_out["x"]
        assert set(split.keys) <= held
        draws = [key(derive_seed("other", n) % HELD_OUT) for n in range(2000)]
        # 64 probes estimate the share, so it may be somewhat above a half
        assert sum(k in held for k in draws) / 2000 < 0.75
    elif number > 1 and not broken:
        # one task has more than half of the draws, and no other was among the evaluation's
        assert len(set(split.keys)) < max(3, number)


class Ten(Small):
    """Ten tasks."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {"task_key": int(self.np_random.integers(10))}


@pytest.mark.parametrize("blocking", [True, False])
def test_a_group_plays_one_task_whatever_the_concurrency(chat, blocking):
    tasks = training_tasks("x", 24)
    seeds = []
    for limit in (1, 7, 96):
        running = collector(chat, Ten, concurrency=limit)
        running.pool.blocking = blocking
        held_out = {"x": {"1", "2", "3"}}
        groups = asyncio.run(running.collect(tasks, seed=0, group_size=4, held_out=held_out))
        for group in groups:
            assert all(episode.task == group.task for episode in group.episodes)
            assert group.episodes[0].reset.task_key not in {"1", "2", "3"}
        seeds.append([(g.task.seed, g.redrawn) for g in groups])
    assert seeds[0] == seeds[1] == seeds[2]
    assert any(redrawn for _, redrawn in seeds[0])


def test_options_stay_and_an_error_names_what_has_no_task_left(chat):
    running = collector(chat, lambda: make_env("gspo/Wordle-v0"))
    task = Task(env_id="gspo/Wordle-v0", seed=3, options={"word": "crane"})
    held = {"gspo/Wordle-v0": {"crane"}}
    with pytest.raises(RolloutError, match=r"gspo/Wordle-v0.*'word': 'crane'.*held out"):
        asyncio.run(running.collect([task], seed=0, group_size=2, held_out=held))
    hops = Task(env_id="gspo/Lookup-v0", seed=3, options={"hops": 3})
    lookup = collector(chat, lambda: make_env("gspo/Lookup-v0"))
    (plain,) = asyncio.run(lookup.collect([hops], seed=0, group_size=1))
    held = {"gspo/Lookup-v0": {plain.episodes[0].reset.task_key}}
    (group,) = asyncio.run(lookup.collect([hops], seed=0, group_size=2, held_out=held))
    assert group.redrawn == 1
    assert group.task.options == {"hops": 3}
    assert group.task.seed != 3
    assert "Follow 3 links" in group.episodes[0].turns[0].observation


def test_a_key_that_does_not_follow_from_the_seed_is_an_error(chat):
    class Fickle(Ten):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "go", {"task_key": random.choice("ab")}

    running = collector(chat, Fickle)
    tasks, held = training_tasks("x", 8), {"x": {"a"}}
    with pytest.raises(EnvironmentContractError, match="one task_key for each seed"):
        asyncio.run(running.collect(tasks, seed=0, group_size=8, held_out=held))


def test_all_eval_tasks_are_those_of_each_environment_that_has_a_list(tmp_path, in_folder, capsys):
    for name, count in (("a.jsonl", 30), ("b.jsonl", 50)):
        Path(name).write_text("".join(f'{{"prompt": "{name} {n}?"}}\n' for n in range(count)))
    Path("paid.py").write_text("def reward(attempt):\n    return float(len(attempt.text))\n")
    env = ("a=gspo/Dataset-v0:0.9", "b=gspo/Dataset-v0:0.1")
    given = {"held_out": 0.2, "rewards": "paid.py:reward"}
    kwargs = {name: {"data": f"{name}.jsonl"} | given for name in "ab"}
    config = drawn(env=env, env_kwargs=kwargs, eval_tasks="all")
    agent = GSPOAgent(config=config)
    assert agent.config.eval_tasks == 16
    assert [(len(s.tasks), s.distinct) for s in agent.split().parts] == [(6, 6), (10, 10)]
    assert str(agent.split(4)) != str(agent.split("all")) == str(agent.split())
    with pytest.raises(ConfigError, match=r"gspo/Wordle-v0 has no num_eval_tasks"):
        GSPOAgent(config=drawn(env="gspo/Wordle-v0", eval_tasks="all"))
    assert "is 'al'; " in refused(capsys, "train", "--eval-tasks", "al")
    with pytest.raises(ConfigError, match="gspo/Lookup-v0 has no num_eval_tasks"):
        ScriptedAgent("gspo/Lookup-v0").split("all")


def test_a_failing_reset_costs_one_task_of_the_evaluation(caplog):
    class Broken(Ten):
        def reset(self, *, seed=None, options=None):
            observation, info = super().reset(seed=seed)
            if seed == HELD_OUT + 1:
                raise OSError("no such file")
            return observation, info | {"task_key": seed}

    split = split_of(EnvPool(Broken), "x", 4)
    assert split.distinct == 4
    assert "no such file" in caplog.text
    with pytest.raises(EnvironmentContractError, match="num_tasks is 0"):
        hold_out("x", 4, lambda tasks: [], num_tasks=0)


def test_a_run_trains_on_no_evaluated_task_and_its_folder_evaluates_the_same(
    tmp_path, in_folder, capsys
):
    shutil.copy(Path(__file__).parents[1] / "support" / "drawn_envs.py", tmp_path)
    agent = GSPOAgent(config=drawn(output="out"))
    played = next(iter(agent.environments.envs.values())).unwrapped.stepped
    tasks = {e.reset.task_key for e in agent._start.episodes}
    assert len(tasks) > 15  # the demonstrations meet the tasks of the evaluation too
    played.clear()
    history = agent.train()
    held = {task for evaluation, task in played if evaluation}
    assert held == set(map(int, agent.split().held_out[agent.env_id]))
    assert not held & {task for evaluation, task in played if not evaluation}
    said = " ".join(capsys.readouterr().out.split())
    assert f"Success on 12 episodes of {len(held)} held-out tasks" in said
    assert "Held out for evaluation:" in said
    redrawn = sum(m.get("rollout/redrawn_tasks", 0) for _, m in history)
    assert redrawn > 0
    skipped = agent._left_out
    assert f"{skipped} demonstrations skipped, {redrawn:.0f} training tasks redrawn." in said
    played.clear()
    main(["evaluate", "--model", "out", "--tasks", "40"])
    assert {task for evaluation, task in played if evaluation} == held
    assert f"12 episodes of {len(held)} held-out tasks" in capsys.readouterr().out
