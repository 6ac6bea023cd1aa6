"""A collapse is said once; runs that are good, noisy or short-spoken get no warning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import Config, override
from gspo_env.health.collapse import CollapseWatch, EvalSnapshot, may_be_chance, stays_lower

NAN = float("nan")
STRANGER = [0.97, 1.0, 0.84, 1.0, 1.0, 1.0, 1.0, 0.97, 1.0, 0.0, 0.0, 0.0]
"""Success of a run with 32 tasks that collapsed at its tenth evaluation."""
GOOD = [
    ([0.11, 0.63, 0.68, 0.88, 0.80, 0.93, 0.95, 0.95], 256),
    ([0.10, 0.50, 0.32, 0.68, 0.68, 0.69, 1.00, 1.00], 256),
    ([0.00, 0.19, 0.00, 0.06, 0.06, 0.06, 0.12], 16),
    ([0.27, 0.24, 0.20, 0.23, 0.23, 0.22, 0.22, 0.19, 0.19], 100),
]


def level(step, success, *, n=256, mean=None, spread=0.5, **more):
    value = success if mean is None else mean
    return EvalSnapshot(
        step=step, episodes=n, success=success, mean_return=value, spread=spread, **more
    )


def said(levels):
    """The texts, and the step at which the first came."""
    found, at = [], None
    watch = CollapseWatch(lambda problem: found.append(problem.text))
    for each in levels:
        watch.see(each)
        at = each.step if found and at is None else at
    return found, at


def test_a_run_of_a_stranger_that_collapsed_is_said_at_its_first_bad_evaluation_and_once():
    texts, at = said(level(10 * k, p, n=32) for k, p in enumerate(STRANGER))
    assert at == 90
    assert len(texts) == 1
    assert "success fell to 0.0% after step 90, from 100.0% after step 10" in texts[0]


@pytest.mark.parametrize(("success", "n"), GOOD)
def test_runs_that_go_up_and_down_are_no_collapse(success, n):
    assert said(level(k, p, n=n, spread=1.0) for k, p in enumerate(success)) == ([], None)


def test_a_third_that_is_lost_and_does_not_come_back_is_found_at_the_end():
    fell = [level(10 * k, p) for k, p in enumerate([0.15, 0.68, 0.82, 0.93, 0.60, 0.61, 0.63])]
    assert stays_lower(fell) == "success fell to 63.0% after step 60, from 93.0% after step 30"
    assert not stays_lower(fell[:-1])
    assert not stays_lower([*fell, level(70, 0.92)])
    # what the reward asks for rises: that is no loss of what was learned
    assert not stays_lower([level(10 * k, f.success, mean=k) for k, f in enumerate(fell)])
    for success, n in GOOD:
        assert not stays_lower([level(k, p, n=n) for k, p in enumerate(success)])


@pytest.mark.parametrize("n", [4, 8, 32, 256])
def test_chance_alone_is_no_collapse_in_a_thousand_runs_of_twenty_evaluations(n):
    rng = np.random.default_rng(n)
    alarms = 0
    for _ in range(1000):
        p = rng.uniform()
        runs = []
        for k in range(20):
            wins = rng.random(n) < p
            short = float(rng.choice([1.0, 40.0]))  # a policy whose length means nothing
            mean, spread = float(wins.mean()), float(wins.std())
            runs.append(level(k, mean, n=n, spread=spread, tokens=40.0, turns=short / 40, cut=0.0))
    alarms += bool(said(runs)[0])
    assert alarms == 0


def test_a_policy_that_needs_fewer_tokens_and_wins_more_has_not_collapsed():
    tokens = [400.0, 200.0, 60.0, 20.0, 8.0]
    levels = [level(k, 0.2 * k, tokens=t, turns=t / 10) for k, t in enumerate(tokens)]
    assert said(levels) == ([], None)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"mean": -2.0}, "return fell to -2 after step 2, from 0.8 after step 1"),
        ({"success": 0.5, "tokens": 3.0}, "tokens of an episode fell to 3.0"),
        ({"success": 0.5, "turns": 1.0}, "turns of an episode fell to 1.0"),
        ({"success": 0.5, "cut": 0.6}, "cut at rollout.max_turn_tokens rose to 60%"),
    ],
)
def test_what_fell_is_named(now, words):
    usual = {"tokens": 40.0, "turns": 5.0, "cut": 0.1}
    start, best = level(0, 0.1, **usual), level(1, 0.8, **usual)
    texts, at = said([start, best, level(2, **{"success": 0.8, **usual, **now})])
    assert at == 2
    assert words in texts[0]


def test_a_best_of_many_evaluations_has_to_be_better_than_of_two():
    best, last = level(1, 0.60), level(2, 0.51)
    assert not may_be_chance(best, last, 2)
    assert may_be_chance(best, last, 20)


COLLAPSES = '''
from pathlib import Path
from gspo_env import TextEnv


class Turns(TextEnv):
    """Pays for any action until a file appears, then for none: what a policy does is the same."""

    blocking = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"say {seed % 7}", {"task_key": str(seed)}

    def step(self, action):
        good = not Path("over").exists()
        return "", float(good), True, False, {"success": good}

    def expert_action(self, noise=0.0):
        return "yes"
'''


@pytest.mark.slow
def test_a_run_says_a_collapse_in_the_terminal_and_the_folder_and_names_its_best_model(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("turns.py").write_text(COLLAPSES)
    small = {
        "hidden_size": 32,
        "heads": 2,
        "layers": 1,
        "demonstrations": 16,
        "imitation_steps": 300,
    }
    config = Config.from_recipe(
        env="turns.py:Turns",
        output="run",
        steps=1,
        tasks_per_step=2,
        eval_every=1,
        eval_tasks=16,
        rollout={"group_size": 2, "max_turn_tokens": 8},
        tracker={"name": "none"},
        recipe=small,
    )
    config = override(config, {"credit": {"score": "turns"}})
    GSPOAgent(config=config).train()
    Path("over").touch()
    GSPOAgent.resume("run", override(config, {"steps": 3})).train()
    output = capsys.readouterr().out
    assert output.count("WARNING success fell to 0.0% after step 2, from 100.0% after step 0") == 1
    assert Path("run/warnings.txt").read_text().count("collapse: success fell") == 1
    assert "The model after step 1 is better (100.0%; the last one has 0.0%)" in output
    assert "gspo-env evaluate run/checkpoints/best" in output
