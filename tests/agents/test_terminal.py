"""What a run prints at its start and at its end."""

import shlex
from pathlib import Path

import pytest
import torch

from gspo_agents.terminal import closing, opening, results, sparkline, summary
from gspo_env.config import Config
from gspo_env.training.split import Split
from gspo_env.types import Task

HISTORY = [
    (0, {"eval/success": 0.04, "eval/return": 0.1}),
    (1, {"rollout/return": 0.2}),
    (10, {"eval/success": 0.9, "eval/return": 0.8}),
    (20, {"eval/success": 0.7, "eval/return": 0.6}),
]


def test_the_summary_names_first_last_and_best_success_and_the_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/a/bin/gspo-env", "train", "--env", "my env.py:E"])
    assert summary([], 0) == "    gspo-env train --env 'my env.py:E'\n"
    history = [(step, {"eval/success": value}) for step, value in ((0, 0.25), (1, 0.75), (2, 0.5))]
    first, *_, command = summary([*history, (3, {"train/loss": 1.0})], 0).splitlines()
    words = "**50.0%** after step 2, 25.0% before training, best 75.0% after step 1"
    assert first == f"Success on held-out tasks: {words}."
    assert command.startswith("    gspo-env train")


def test_the_start_names_environment_model_device_length_folder_and_tracker():
    config = Config.from_recipe(env_kwargs={"entries": 12, "api_key": "sk-" + "a" * 40})
    model = torch.nn.Linear(999, 1000)
    text = opening(config, "gspo/Lookup-v0", model, Path("runs/one"), "mlflow ui")
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["environment"].startswith('gspo/Lookup-v0 {"entries": 12')
    assert "sk-aaaa" not in text
    assert lines["model"] == "tiny, Linear, 1 million parameters, float32"
    assert lines["device"].startswith("cpu with ")
    assert lines["training"] == "30 steps of 32 tasks with 8 episodes each"
    assert lines["folder"] == "runs/one"
    assert lines["tracker"] == "mlflow (mlflow ui)"


def test_the_end_has_the_curve_and_the_commands_to_look_evaluate_and_go_on():
    assert closing(HISTORY, Path("runs/my run")) == [
        "Model, config and learning curve: runs/my run",
        "eval/success \u2581\u2588\u2586 from 4.0% to 70.0%, best 90.0% after step 10",
        "View:      gspo-env view 'runs/my run'",
        "Evaluate:  gspo-env evaluate 'runs/my run'",
        "Resume:    gspo-env train --resume 'runs/my run' --steps 40",
    ]


def test_a_success_that_never_changes_gives_way_to_the_return():
    history = [(step, metrics | {"eval/success": 0.0}) for step, metrics in HISTORY]
    history = [(step, m) for step, m in history if "eval/return" in m]
    assert closing(history, Path("r"))[1].startswith("eval/return ")


def test_a_best_model_is_named_where_the_last_is_worse(tmp_path):
    text = "Best 90.0% at step 10 is in checkpoints/best, the last is 70.0%"
    command = f"gspo-env evaluate {shlex.quote(str(tmp_path / 'checkpoints' / 'best'))}"
    assert not any(text in line for line in closing(HISTORY, tmp_path, tasks=256))  # not kept
    (tmp_path / "checkpoints" / "best" / "model").mkdir(parents=True)
    assert closing(HISTORY, tmp_path, tasks=256)[2] == f"{text}: {command}"
    assert closing(HISTORY, tmp_path, tasks=8)[2] == f"{text}, which may be chance: {command}"
    assert not any("Best" in line for line in closing(HISTORY[:3], tmp_path, tasks=256))


@pytest.mark.parametrize(("count", "few"), [(8, True), (64, False)])
def test_the_result_has_an_interval_and_says_where_episodes_are_too_few(count, few):
    tasks = tuple(Task(env_id="x", seed=seed) for seed in range(count))
    split = Split(tasks=tasks, keys=tuple(map(str, range(count))), overlap_known=False)
    history = [(0, {"eval/success": 0.0, "eval/success_greedy": 0.0})]
    history += [(4, {"eval/success": 0.5, "eval/success_greedy": 0.25})]
    (line,) = results(history, split, 0)
    assert line.startswith(
        f"Success on {split}: 0.0% before training, 50.0% after training (greedy 0.0%"
    )
    assert line.endswith(": too few to judge.") == few
    shipped = [(0, {**history[0][1], "eval/success_as_shipped": 0.125}), history[1]]
    (line,) = results(shipped, split, 0, "after imitation")
    figures = "12.5% as shipped, 0.0% after imitation, 50.0% after training"
    assert line.startswith(f"Success on {split}: {figures} (greedy 0.0%")
    text = summary(shipped, 0, "after imitation")
    assert "**50.0%** after step 4, 12.5% as shipped, 0.0% after imitation, best 50.0%" in text
    (alone,) = results(history[:1], split, 0, "after imitation")
    assert alone.startswith(
        f"Success on {split}: 0.0% after imitation (greedy 0.0%); 95 % interval 0%"
    )


@pytest.mark.parametrize(
    ("values", "encoding", "drawn"),
    [
        ([0.0, 0.5, 1.0], "ascii", "_+#"),
        ([0.3, 0.3], "utf-8", "\u2581\u2581"),
        ([1.0], "latin-1", "_"),
    ],
)
def test_a_curve_in_characters(values, encoding, drawn):
    assert sparkline(values, encoding) == drawn


def test_a_long_curve_is_thinned_out_between_its_ends():
    drawn = sparkline([float(n) for n in range(1000)])
    assert len(drawn) == 60
    assert drawn == "".join(sorted(drawn))


def test_training_that_made_the_model_worse_says_so():
    history = [(0, {"eval/success": 0.5}), (1, {"eval/success": 0.25}), (2, {"eval/success": 0.0})]
    line = closing(history, Path("r"), tasks=256)[2]
    assert line.startswith("Training made it worse: 50.0% before, 0.0% after. Lower --learner.")
    assert "after, which may be chance." in closing(history, Path("r"), tasks=2)[2]
    better = [*history, (3, {"eval/success": 0.5})]
    assert not any("worse" in line for line in closing(better, Path("r"), tasks=256))
