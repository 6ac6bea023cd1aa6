"""A run of a model that is not tiny says what it needs, and one that cannot fit is refused."""

import asyncio
import dataclasses
import re
import shlex
from typing import ClassVar

import psutil
import pytest
import torch
from support.small_env import Small

from gspo_agents.gspo import GSPOAgent
from gspo_agents.preflight import (
    Sizes,
    check,
    estimate,
    free_memory,
    group_memory,
    memory,
    remedies,
)
from gspo_env.cli.main import parse
from gspo_env.config import Config, override
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.errors import TrainingError
from gspo_env.learner.learner import Learner
from gspo_env.model.thread_speed import best, measure

SIZES = Sizes(
    **{"parameters": 1_000_000, "trained": 1_000_000, "width": 10_000, "weight": 4},
    cached_token=1_000,
)
ROWS = override(Config(), {"learner": {"microbatch_tokens": 16384}, "rollout": {"concurrency": 64}})
WORK = {"tokens": 6000, "longest": 500}
SHORT = {
    "tracker": "none",
    "rollout": {"max_turn_tokens": 8, "max_context": 512, "concurrency": 8},
    "learner": {"microbatch_tokens": 512},  # a tiny model would be measured with a long row
}


@pytest.mark.parametrize(
    ("changes", "part", "size"),
    [
        ({}, "weights", 4e6),
        ({}, "gradients", 4e6),
        ({}, "optimiser", 8e6),
        ({}, "cache", 64 * 500 * 1000),
        # gradients come in the place of the activations of the only row of a minibatch
        ({}, "largest pass", 6000 * 46_000 - 4e6),
        ({"model_dtype": "bfloat16"}, "weights", 2e6),
        ({"model_dtype": "bfloat16"}, "optimiser", 12e6),  # with the float32 masters
        ({"model_dtype": "bfloat16"}, "cache", 64 * 500 * 500),
        ({"learner": {"lora_rank": 8}}, "optimiser", 8 * 80_000),
        ({"learner": {"microbatch_tokens": 1000}}, "largest pass", 1000 * 46_000),
        ({"learner": {"microbatch_tokens": 10}}, "largest pass", 500 * 46_000),
        ({"learner": {"checkpointing": True}}, "largest pass", 6000 * 4_600 - 4e6),
        ({"learner": {"lora_rank": 8}}, "largest pass", 6000 * 46_000 - 4 * 80_000),
        ({"supply": {"max_staleness": 1}}, "copies", 8e6),
    ],
)
def test_each_part_of_the_memory_follows_from_the_settings(changes, part, size):
    assert memory(SIZES, override(ROWS, changes), **WORK)[part] == pytest.approx(size)


def test_a_cpu_has_more_copies_in_bfloat16_and_holds_a_checkpoint_in_memory():
    on_cpu = dataclasses.replace(SIZES, on_cpu=True)
    parts = memory(on_cpu, override(ROWS, {"model_dtype": "bfloat16"}), **WORK)
    assert parts["copies"] == 2e6  # in the order of the engine's kernels
    assert parts["cache"] == 64 * 500 * 750  # keys in float32
    few = override(ROWS, {"tasks_per_step": 2, "rollout": {"group_size": 4}, "eval_tasks": 3})
    for tree, slots in (({}, 8), ({"eval_tasks": 5}, 10), ({"supply": {"max_staleness": 1}}, 16)):
        assert memory(on_cpu, override(few, tree), **WORK)["cache"] == slots * 500 * 1000
    parts = memory(on_cpu, ROWS, 1, 1)
    assert parts["gradients"] + parts["largest pass"] == 12e6  # of a checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_has_no_copy_of_weights_that_an_adapter_is_added_to(dtype):
    sizes = dataclasses.replace(SIZES, on_cpu=True, packed=True)
    config = override(ROWS, {"model_dtype": dtype})
    assert "copies" in memory(sizes, config, **WORK)
    assert "copies" not in memory(sizes, override(config, {"learner": {"lora_rank": 8}}), **WORK)
    assert "copies" not in memory(dataclasses.replace(sizes, trained=10_000), config, **WORK)


@pytest.mark.parametrize("free", [5e6, 3e7, 1e8, 2e8, 4e8])
def test_the_flags_that_a_refusal_names_make_the_run_fit(free):
    text = remedies(SIZES, ROWS, **WORK, free=free)
    flags = re.findall(r"--[a-z-]+(?: [\w.]+)?", text.partition("(")[0].partition(",")[0])
    config = parse(
        ["train", *shlex.split(" ".join(flags)), "--microbatch-tokens", "16384"]
    ).resolved
    kept = {"checkpointing": config.learner.checkpointing, "lora_rank": config.learner.lora_rank}
    tokens = 1024 if "--microbatch-tokens 1024" in flags else 16384
    rollout = {"concurrency": 16 if "--concurrency 16" in flags else 64}
    learner = {**kept, "microbatch_tokens": tokens}
    tree = {"learner": learner, "rollout": rollout, "model_dtype": config.model_dtype}
    fits = sum(memory(SIZES, override(ROWS, tree), **WORK).values()) - 4e6 <= free
    assert fits == text.startswith("It fits")


@pytest.fixture(scope="module")
def agent():
    return GSPOAgent(
        config=Config.from_recipe(
            **{"steps": 3, "tasks_per_step": 2, "eval_tasks": 4},
            **{"recipe": {"demonstrations": 20}, **SHORT},
        )
    )


@pytest.mark.parametrize("rank", [0, 4])
def test_a_preflight_leaves_model_and_generators_as_they_were(agent, capsys, rank):
    agent.config = override(agent.config, {"learner": {"lora_rank": rank}})
    before = {name: w.clone() for name, w in agent.model.state_dict().items()}
    trains = [w.requires_grad for w in agent.model.parameters()]
    state = torch.get_rng_state()
    assert check(agent, ()) == []
    shown = capsys.readouterr().out
    assert shown.startswith("preflight: measures a few tokens and gradients, for at most 60 s")
    for row in ("memory", "evaluation", "step", "run"):
        assert re.search(rf"^{row} ", shown, re.MULTILINE)
    after = agent.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [w.requires_grad for w in agent.model.parameters()] == trains
    assert torch.equal(torch.get_rng_state(), state)


class Keyed(Small):
    """Has eight tasks and notes the one that each environment was reset to last."""

    num_tasks = 8
    last: ClassVar[dict[int, str]] = {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        key = self.last[id(self)] = str(seed % 8)
        return f"task {key}", {"task_key": key}


def test_a_preflight_plays_no_task_that_is_held_out(agent, capsys):
    config = override(Config(), {"tasks_per_step": 2, "eval_tasks": 8, **SHORT})
    mixture = GSPOAgent(agent.model, [Keyed, "gspo/Lookup-v0"], config, agent.tokenizer)
    (held_out,) = [keys for name, keys in mixture.split().held_out.items() if "Keyed" in name]
    Keyed.last.clear()
    check(mixture, ())
    assert Keyed.last
    assert not held_out.intersection(Keyed.last.values())


class Wordy(Small):
    """Has one long prompt."""

    first = "word " * 300


def test_an_engine_too_slow_for_a_single_turn_has_actions_as_long_as_they_may_be(
    agent, monkeypatch
):
    config = override(Config(), {"tasks_per_step": 2, "eval_tasks": 4, **SHORT})
    wordy = GSPOAgent(agent.model, Wordy, config, agent.tokenizer)
    sample = TransformersEngine.generate

    async def wait(self, ids, sampling, session=None):
        await asyncio.sleep(3600 if session else 0)
        return await sample(self, ids, sampling, session)

    monkeypatch.setattr(TransformersEngine, "generate", wait)
    monkeypatch.setattr("gspo_agents.preflight._SECONDS", 1.0)
    lengths = estimate(wordy, ()).lengths
    assert lengths.sampled == lengths.steps == config.rollout.max_turn_tokens


def test_a_measurement_has_a_limit_of_time_and_what_is_known_is_said(agent, capsys, monkeypatch):
    config = override(Config(), {"tasks_per_step": 2, "eval_tasks": 4, **SHORT})
    wordy = GSPOAgent(agent.model, Wordy, config, agent.tokenizer)
    expected = estimate(wordy, ())
    monkeypatch.setattr("gspo_agents.preflight._LIMIT", 0.0)
    measured = []
    monkeypatch.setattr("gspo_agents.preflight._measure_gradient", measured.append)
    assert check(wordy, ()) == []
    shown = capsys.readouterr().out
    assert f"memory       {expected.rows['memory'].partition(', of ')[0]}" in shown
    assert re.search(r"^run +not known; measuring it takes more than 0 s$", shown, re.MULTILINE)
    assert not measured
    monkeypatch.setattr("gspo_agents.preflight.free_memory", lambda model: 1e6)
    with pytest.raises(TrainingError, match="does not fit into memory"):
        check(wordy, ())


@pytest.mark.parametrize(
    "changes", [{"engine": {"name": "vllm"}}, {"rollout": {"workers": "ray:1"}}]
)
def test_a_run_whose_engine_is_elsewhere_says_what_is_known_of_its_memory(agent, capsys, changes):
    config = override(agent.config, changes)
    other = GSPOAgent(agent.model, Wordy, agent.config, agent.tokenizer)
    other.config = config
    assert check(other, ()) == []
    shown = capsys.readouterr().out
    assert re.search(
        r"^memory +weights .* optimiser .* more, of .* free; .* not in it$", shown, re.M
    )


def test_a_run_that_learns_nothing_is_estimated_too(agent):
    config = override(Config(), {"steps": 0, "eval_tasks": 4, **SHORT})
    expected = estimate(GSPOAgent(agent.model, Wordy, config, agent.tokenizer), ())
    assert "0 s imitate" in expected.rows["run"]


def test_no_pass_that_is_measured_is_larger_than_those_of_the_run(agent, monkeypatch):
    measured = []
    prepare = Learner.prepare

    def noted(learner, samples):
        measured.extend(len(sample.token_ids) for sample in samples)
        return prepare(learner, samples)

    monkeypatch.setattr(Learner, "prepare", noted)
    learner = {"microbatch_tokens": 16384, "minibatches": 2}
    few = {"tasks_per_step": 2, "rollout": {"group_size": 2}, "learner": learner}
    config = override(agent.config, few)
    lengths = estimate(GSPOAgent(agent.model, Wordy, config, agent.tokenizer), ()).lengths
    assert measured == [max(64, int(lengths.computed(1, 2)))]


def test_what_cannot_fit_is_refused_before_training(agent, monkeypatch):
    monkeypatch.setattr("gspo_agents.preflight.free_memory", lambda model: 1000.0)
    with pytest.raises(TrainingError, match=r"does not fit into memory: weights .* are free"):
        check(agent, ())


def test_episodes_that_would_not_fit_if_they_filled_their_context_are_a_finding(
    agent, capsys, monkeypatch
):
    config = override(Config(), {"tasks_per_step": 2, "eval_tasks": 4, **SHORT})
    long = {"max_turn_tokens": 8, "max_context": 4096, "concurrency": 8}
    wordy = GSPOAgent(agent.model, Wordy, override(config, {"rollout": long}), agent.tokenizer)
    assert not [f for f in check(wordy, ()) if f.name == "memory"]
    shown = capsys.readouterr().out
    said = re.search(r"([\d.]+) GB more, of .*; about ([\d.]+) GB if episodes fill", shown)
    usual, most = (float(size) * 1e9 for size in said.groups())
    assert most > usual
    monkeypatch.setattr("gspo_agents.preflight.free_memory", lambda model: (usual + most) / 2)
    (finding,) = [f for f in check(wordy, ()) if f.name == "memory"]
    assert "context of 4,096 tokens" in finding.text
    assert re.match(r"Lower --max-context. (It fits with|With) --", finding.advice)


@pytest.mark.parametrize(
    ("name", "groups", "left"),
    [
        ("", {"": (900, 500, 100)}, 500),  # a container
        ("job", {"job": (900, 500, 100)}, 500),
        ("job/step", {"job": (900, 500, 0), "job/step": ("max", 9, 0)}, 400),
        ("job/step", {"job": (900, 500, 0), "job/step": (800, 500, 0)}, 300),
        ("elsewhere", {"": (900, 500, 0)}, 400),  # as the host names it
        ("job", {"": ("max", 9, 0), "other": (1, 1, 0)}, float("inf")),
    ],
)
def test_the_limits_of_every_group_around_a_process_count(tmp_path, name, groups, left):
    for group, (limit, used, cached) in groups.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for file, value in (("max", limit), ("current", used)):
            (tmp_path / group / f"memory.{file}").write_text(f"{value}\n")
        (tmp_path / group / "memory.stat").write_text(f"rss 1\ninactive_file {cached}\n")
    assert group_memory(tmp_path, f"0::/{name}\n") == left


@pytest.mark.parametrize(
    ("name", "groups", "left"),
    [
        ("", {"": (900, 500, 100)}, 500),
        ("job/step", {"job": (900, 500, 0), "job/step": (800, 500, 0)}, 300),
        ("job/step", {"job": (700, 500, 0), "job/step": (2**63 - 4096, 500, 100)}, 200),
        ("elsewhere", {"": (900, 500, 0)}, 400),
    ],
)
def test_so_do_those_of_control_groups_of_version_1(tmp_path, name, groups, left):
    for group, (limit, used, cached) in groups.items():
        folder = tmp_path / "memory" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {cached}\n")
    other = f"9:name=systemd:/\n4:memory:/{name}\n3:cpuset:/other\n0::/\n"
    assert group_memory(tmp_path, other) == left


def test_the_free_memory_is_within_that_of_the_machine(agent):
    assert 0 < free_memory(agent.model) <= psutil.virtual_memory().total


def test_a_long_run_is_a_finding(agent, monkeypatch, capsys):
    agent.config = override(agent.config, {"steps": 10_000_000, "learner": {"lora_rank": 0}})
    (finding,) = check(agent, ())
    assert "hours" in finding.text


def test_the_fewest_threads_are_taken_unless_more_are_faster():
    before = torch.get_num_threads()
    assert best({1: 10.0, 2: 6.0, 4: 5.9}) == 2
    assert best({1: 1.0, 2: 20.0}) == 1
    assert min(measure(torch.nn.Linear(8, 8))) == 1
    assert torch.get_num_threads() == before
