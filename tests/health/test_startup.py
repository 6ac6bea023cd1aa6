"""A run on which nothing can be learned stops before it trains; others say so once."""

import math
from pathlib import Path

import pytest
from support.cli_errors import refused
from support.small_env import Small

from gspo_env.cli.main import main
from gspo_env.config import Config
from gspo_env.errors import TrainingError
from gspo_env.health.findings import Finding
from gspo_env.health.startup import check_first_steps, check_success
from gspo_env.rollout.play import play_now
from gspo_env.types import Group, Task

ENVS = '''
from support.small_env import Small

class Plain(Small):
    """Write yes."""
    first = "Write yes."
    def reward(self, action):
        return float(action == "yes")
    def expert_action(self, noise=0.0):
        return "no" if self.np_random.random() < noise else "yes"

class Long(Plain):
    """Its first observation has 200,000 characters."""
    first = "word " * 40_000

class Wordy(Plain):
    """Its prompts do not fit a short context."""
    first = "word and " * 400

class Same(Plain):
    """Every action has the same reward."""
    def reward(self, action):
        return 0.0

class Mute(Plain):
    """It has no demonstrator."""
    def expert_action(self, noise=0.0):
        raise NotImplementedError

class Judge(Plain):
    """It gives the advantages of tokens."""
    def step(self, action):
        tokens = getattr(action, "token_ids", ())
        return "", 1.0, True, False, {"token_advantages": [1.0] * len(tokens)}

class Duel(Plain):
    """Its two players have rewards of their own."""
    rewards_by_agent = True

class Yes(Plain):
    """Its success is not a bool."""
    def step(self, action):
        return "", 0.0, True, False, {"success": "yes"}
'''
TINY = [
    *("train", "--output", "out", "--tracker", "none", "--steps", "3", "--tasks-per-step", "2"),
    *("--eval-tasks", "2", "--group-size", "2", "--hidden-size", "16", "--layers", "1"),
    *("--heads", "2", "--demonstrations", "16", "--imitation-steps", "4", "--minibatches", "1"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    (tmp_path / "envs.py").write_text(ENVS)


def stopped(capsys, name, *arguments):
    """Returns what a run says that stops with exit code 2 before it has a folder."""
    env = name if "/" in name else f"envs.py:{name}"
    said = refused(capsys, *TINY, "--env", env, *arguments)
    assert not Path("out").exists()
    return said


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("Plain", ("--group-size", "1"), "rollout.group_size is 1, and the estimator"),
        ("Wordy", (), "No episode of custom/Wordy-v0 can have a turn: the first prompts have 8"),
        (
            "Plain",
            ("--max-context", "33"),
            "No episode of custom/Plain-v0 can have a turn: the first",
        ),
        ("Long", (), "reset() observation is 200000 characters long; expected at most 16384"),
        ("Yes", (), "info['success'] is 'yes' of type str, expected a bool"),
        ("Duel", (), "'returns_to_go' credits all turns with those of the first: the policy would"),
        ("Duel", ("--advantage", "outcome"), "'outcome' credits all turns with those of the first"),
        ("Mute", ("--strict",), "has no expert_action, so the tiny model starts with random"),
        ("Plain", ("--strict", "True", "--minibatches", "9"), "learner.minibatches is 9, and a"),
    ],
)
def test_a_run_that_cannot_learn_stops_before_it_trains(capsys, name, arguments, words):
    assert words in stopped(capsys, name, *arguments)


def test_rewards_by_agent_need_an_estimator_that_credits_agents(capsys):
    envs = Path("envs.py").read_text()
    own = "class ByAgent(Outcome):\n    credits_agents = True\n"
    Path("envs.py").write_text(f"from gspo_env.credit import Outcome\n{envs}\n{own}")
    main([*TINY, "--env", "envs.py:Duel", "--advantage", "envs.py:ByAgent"])
    assert "credits" not in capsys.readouterr().out


def test_a_dataset_without_rewards_is_refused(capsys):
    Path("rows.jsonl").write_text('{"prompt": "one", "completion": "two"}\n' * 20)
    said = stopped(capsys, "gspo/Dataset-v0", "--env-kwargs", "data=rows.jsonl")
    assert "gspo/Dataset-v0 never gives a reward. Name reward functions" in said


def test_a_limit_of_time_that_no_turn_can_keep_stops_the_run_at_its_first_step(capsys):
    said = refused(capsys, *TINY, "--env", "envs.py:Plain", "--episode-timeout", "1e-6")
    assert "Episodes have no turn in the first step: they end by timeout" in said
    assert "Raise --rollout.episode-timeout, now 1e-06" in said


def test_groups_of_one_are_no_problem_where_the_environment_gives_the_advantages(capsys):
    taught = ["--imitation-steps", "60", "--imitation-learning-rate", "0.01"]
    main([*TINY, *taught, "--env", "envs.py:Judge", "--group-size", "1", "--strict"])
    assert "WARNING" not in capsys.readouterr().out


def test_what_may_change_is_said_once_in_the_terminal_the_folder_and_the_tracker(capsys):
    own = f"{Path(__file__).parents[2] / 'examples' / 'own_tracker.py'}:JsonLines"
    arguments = ["--env", "envs.py:Same", "--steps", "5", "--minibatches", "7", "--tracker", own]
    main([*TINY, *arguments])
    said = capsys.readouterr().out
    flat = "all episodes have equal rewards in the first 3 steps, so nothing is learned from them"
    assert said.count(flat) == 1
    assert said.count("learner.minibatches is 7, and a step has 4 episodes") == 1
    written = Path("out/warnings.txt").read_text()
    assert [line.partition(":")[0] for line in written.splitlines()] == [
        "minibatches",
        "no_variance",
    ]


SOUND = {
    **{"rollout/turns": 1.0, "rollout/success": 0.5, "rollout/return": 0.5},
    **{"rollout/zero_variance_groups": 0.2, "train/advantage_rms": 0.5, "train/grad_norm": 0.1},
}
"""The metrics of a step that learns."""


def first_steps(changes, **settings):
    """Returns the warnings of the first steps; a metric that is changed to NaN is not logged."""
    findings: list[Finding] = []
    history: list[tuple[int, dict[str, float]]] = []
    for step, change in enumerate(changes, start=1):
        metrics = {name: v for name, v in (SOUND | change).items() if not math.isnan(v)}
        history.append((step, metrics))
        check_first_steps(Config(**{"steps": 9, **settings}), history, findings.append)
    return findings


FLAT = {"rollout/zero_variance_groups": 1.0, "train/advantage_rms": 0.0, "train/grad_norm": 0.0}


def test_a_spike_of_control_tokens_is_warned_of_in_the_step_that_shows_it():
    chances = (0.004, 0.01, 0.3, math.nan)
    low, higher, spike, unknown = ({"train/control_token_probability": c} for c in chances)
    assert first_steps([low] * 9) == first_steps([low] * 6 + [higher] * 6, steps=30) == []
    (finding,) = first_steps([*[low] * 6, spike], steps=30)
    assert (finding.name, finding.hopeless) == ("control_tokens", False)
    assert first_steps([*[low] * 6, *[spike] * 5], steps=30) == [finding]
    assert len(first_steps([low, low, *[spike] * 4], steps=30)) == 1  # before anything is judged
    assert first_steps([*[spike] * 12], steps=30) == []  # as likely from the start
    assert (
        first_steps([unknown] * 6, steps=30) == first_steps([low, *[unknown] * 5], steps=30) == []
    )


@pytest.mark.parametrize(
    ("model", "success", "shown"), [("m", 0.0, True), ("m", 0.1, False), ("", 0.0, False)]
)
def test_a_named_model_that_never_succeeds_is_advised_to_imitate(model, success, shown):
    (finding,) = first_steps([FLAT | {"rollout/success": success}] * 3, model=model)
    assert ("--recipe imitate" in finding.advice) == shown


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (FLAT, "no_variance"),
        ({**FLAT, "train/grad_norm": 0.3}, "no_variance"),  # a penalty teaches nothing
        ({**FLAT, "rollout/stop/max_turn_tokens": 1.0}, "truncated"),
        ({"train/grad_norm": 0.0}, "gradient"),
        ({"train/grad_norm": math.nan}, "gradient"),  # nothing was trained on
        ({"rollout/stop/max_turns": 1.0}, ""),  # tasks may last exactly that long
        ({}, ""),
    ],
)
def test_the_first_three_steps_name_what_they_have_in_common(change, name):
    assert first_steps([change] * 2) == []
    findings = first_steps([change] * 5)
    assert [finding.name for finding in findings] == ([name] if name else [])
    assert not any(finding.hopeless for finding in findings)


def test_one_good_step_among_the_first_three_is_enough():
    assert first_steps([FLAT, {}, FLAT]) == []


def test_a_run_of_one_step_is_judged_by_it_and_a_strict_run_stops():
    assert [finding.name for finding in first_steps([FLAT], steps=1)] == ["no_variance"]
    with pytest.raises(TrainingError, match="only a warning without --strict"):
        first_steps([FLAT], steps=1, strict=True)


class Tips(Small):
    """Gives every action a small reward and some a large one; no step says `success`."""

    def reward(self, action):
        return 0.1 + float(len(action) % 2)


class SetsSuccess(Tips):
    """Sets `success`."""

    def step(self, action):
        return "", float(len(action) % 2), True, False, {"success": True}


def test_a_success_that_any_reward_makes_is_said_before_training():
    env = Tips()
    tasks = [Task(env_id="x", seed=seed) for seed in range(8)]
    words = iter(["a", "bb"] * 4)
    played = [play_now(env, task, lambda now: next(words)) for task in tasks]
    groups = [Group(task=task, episodes=(e,)) for task, e in zip(tasks, played, strict=True)]
    finding = check_success(groups)
    assert "100% of the episodes count as a success before training" in finding.text
    assert "outcomes go from 0.1 to 1.1. Return info['success']" in str(finding)
    assert check_success(groups[::2]) is None  # all outcomes are equal
    said = [play_now(SetsSuccess(), task, lambda now: "a") for task in tasks]
    assert check_success([Group(task=tasks[0], episodes=tuple(said))]) is None
