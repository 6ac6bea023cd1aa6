"""What a run prints at its start and at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gspo_env.config import Config
from gspo_env.report.terminal import closing, opening, sparkline, summary

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
        "eval/success \u2581\u2588\u2586 from 4.0% to 70.0%, best 90.0% after step 10",
        "View:      gspo-env view 'runs/my run'",
        "Evaluate:  gspo-env evaluate 'runs/my run'",
        "Resume:    gspo-env train --resume 'runs/my run' --steps 40",
    ]


def test_a_success_that_never_changes_gives_way_to_the_return():
    history = [(step, metrics | {"eval/success": 0.0}) for step, metrics in HISTORY]
    history = [(step, m) for step, m in history if "eval/return" in m]
    assert closing(history, Path("r"))[0].startswith("eval/return ")


def test_a_best_model_is_named_where_it_is_better_than_the_last_by_more_than_chance(tmp_path):
    line = (
        "The model after step 10 is better (90.0%; the last one has 70.0%): "
        f"gspo-env evaluate {tmp_path}/checkpoints/best"
    )
    assert line not in closing(HISTORY, tmp_path, tasks=256)  # no such checkpoint is kept
    (tmp_path / "checkpoints" / "best" / "model").mkdir(parents=True)
    assert closing(HISTORY, tmp_path, tasks=256)[1] == line
    assert line not in closing(HISTORY, tmp_path, tasks=8)
    assert line not in closing(HISTORY[:3], tmp_path, tasks=256)


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
