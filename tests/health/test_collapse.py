"""A collapse is found; runs that are good, noisy or short-spoken are not blamed."""

from pathlib import Path

import numpy as np
import pytest
from support import runs

from gspo_agents.gspo import GSPOAgent
from gspo_env.config import override
from gspo_env.health.startup import find_collapse
from gspo_env.runs.evaluations import EvalSnapshot, may_be_chance, stays_lower

COLLAPSED = [0.97, 1.0, 0.84, 1.0, 1.0, 1.0, 1.0, 0.97, 1.0, 0.0, 0.0, 0.0]
"""Success of a real run with 32 tasks that collapsed at its tenth evaluation."""
GOOD = [
    ([0.11, 0.63, 0.68, 0.88, 0.80, 0.93, 0.95, 0.95], 256),
    ([0.10, 0.50, 0.32, 0.68, 0.68, 0.69, 1.00, 1.00], 256),
    ([0.00, 0.19, 0.00, 0.06, 0.06, 0.06, 0.12], 16),
    ([0.27, 0.24, 0.20, 0.23, 0.23, 0.22, 0.22, 0.19, 0.19], 100),
]


def snapshot(step, success, *, episodes=256, mean=None, return_std=0.5):
    value = success if mean is None else mean
    return EvalSnapshot(
        step=step, episodes=episodes, success=success, mean_return=value, return_std=return_std
    )


def first_collapse(evaluations):
    """Returns the first finding while evaluations arrive, and its step."""
    for count in range(1, len(evaluations) + 1):
        if finding := find_collapse(evaluations[:count]):
            return finding.text, evaluations[count - 1].step
    return "", None


def test_a_run_that_collapsed_is_found_at_its_first_bad_evaluation():
    text, step = first_collapse([snapshot(10 * k, p, episodes=32) for k, p in enumerate(COLLAPSED)])
    assert step == 90
    assert "success fell to 0.0% after step 90, from 100.0% after step 10" in text


@pytest.mark.parametrize(("success", "episodes"), GOOD)
def test_runs_that_oscillate_are_no_collapse(success, episodes):
    run = [snapshot(k, p, episodes=episodes, return_std=1.0) for k, p in enumerate(success)]
    assert first_collapse(run) == ("", None)
    assert not stays_lower(run)


def test_a_third_that_is_lost_for_good_is_found_at_the_end():
    fell = [snapshot(10 * k, p) for k, p in enumerate([0.15, 0.68, 0.82, 0.93, 0.60, 0.61, 0.63])]
    assert stays_lower(fell) == "success fell to 63.0% after step 60, from 93.0% after step 30"
    assert not stays_lower(fell[:-1])
    assert not stays_lower([*fell, snapshot(70, 0.92)])
    # the return rises: nothing that was learned is lost
    assert not stays_lower([snapshot(10 * k, e.success, mean=k) for k, e in enumerate(fell)])


@pytest.mark.parametrize("episodes", [4, 32, 256])
def test_chance_alone_is_a_collapse_in_at_most_one_of_a_thousand_runs(episodes):
    rng, found = np.random.default_rng(episodes), 0
    for _ in range(1000):
        p = rng.uniform()
        run = []
        for k in range(20):
            wins = rng.random(episodes) < p
            mean, spread = float(wins.mean()), float(wins.std())
            run.append(snapshot(k, mean, episodes=episodes, return_std=spread))
        found += bool(first_collapse(run)[0])
    assert found <= 1


def test_a_return_that_fell_is_named():
    start, best = snapshot(0, 0.1), snapshot(1, 0.8)
    text, step = first_collapse([start, best, snapshot(2, 0.8, mean=-2.0)])
    assert (step, "return fell to -2 after step 2, from 0.8 after step 1" in text) == (2, True)


def test_a_best_of_many_evaluations_has_to_be_better_than_of_two():
    best, last = snapshot(1, 0.60), snapshot(2, 0.51)
    assert not may_be_chance(best, last, 2)
    assert may_be_chance(best, last, 20)


PAYS_UNTIL_A_FILE_APPEARS = '''
from pathlib import Path
from support.small_env import Shown


class Turns(Shown):
    """Pays for any action until a file appears, then for none."""

    def step(self, action):
        good = not Path("over").exists()
        return "", float(good), True, False, {"success": good}
'''


@pytest.mark.slow
def test_a_run_warns_of_a_collapse_in_the_terminal_and_the_folder_and_names_its_best_model(
    in_folder, capsys
):
    Path("turns.py").write_text(PAYS_UNTIL_A_FILE_APPEARS)
    config = runs.tiny(
        **{"env": "turns.py:Turns", "output": "run", "steps": 1, "tasks_per_step": 2},
        **{"eval_every": 1, "eval_tasks": 16},
        rollout={"group_size": 2, "max_turn_tokens": 8},
        recipe={"layers": 1, "demonstrations": 16, "imitation_steps": 300},
        credit={"score": "turns"},
    )
    GSPOAgent(config=config).train()
    Path("over").touch()
    GSPOAgent.resume("run", override(config, {"steps": 3})).train()
    output = capsys.readouterr().out
    assert output.count("WARNING success fell to 0.0% after step 2, from 100.0% after step 0") == 1
    assert Path("run/warnings.txt").read_text().count("collapse: success fell") == 1
    assert "Best 100.0% at step 1 is in checkpoints/best, the last is 0.0%: " in output
    assert "gspo-env evaluate run/checkpoints/best" in output
