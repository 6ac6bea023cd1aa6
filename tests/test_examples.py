"""The examples run; agents, self-play and classes of one's own have tests of their rooms."""

import json
import runpy
from pathlib import Path

import pytest

from gspo_env.cli.main import main
from gspo_env.config import load_toml, read_toml

ROOT = Path(__file__).parents[1]
SHORT = [
    *("--steps", "1", "--tasks-per-step", "2", "--group-size", "2", "--eval-every", "0"),
    *("--eval-tasks", "4", "--tracker", "none"),
]
TINY = ["--hidden-size", "16", "--demonstrations", "16", "--imitation-steps", "2"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    """Each test runs in a new working folder that has the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_the_settings_of_an_example_are_valid(path):
    if "compare" not in read_toml(path):
        load_toml(path)


@pytest.mark.slow
def test_an_example_of_settings_trains():
    main(["train", "--config", "examples/chat.toml", *SHORT, *TINY])


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_order(monkeypatch, capsys):
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    cells = json.loads((ROOT / "examples/first_agent.ipynb").read_text())["cells"]
    names = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            exec(code.replace("STEPS = 10", "STEPS = 1"), names)
    assert "kept episodes" in capsys.readouterr().out
    assert len(names["history"]) > 1


@pytest.mark.slow
def test_lora_trains_on_the_model_in_a_folder():
    main(["train", "--output", "first", *SHORT, *TINY])
    flags = ["--model", "first/model", "--output", "second"]
    main(["train", "--config", "examples/lora.toml", *flags, *SHORT])
    assert Path("second/adapter/adapter_config.json").exists()


@pytest.mark.slow
def test_a_policy_is_trained_on_a_reward_model_of_ones_own(capsys):
    means = runpy.run_path("examples/reward_model.py")["main"](steps=1)
    assert len(means) == 2
    loss = float(capsys.readouterr().out.split("reward model: loss ")[1].split()[0])
    assert loss < 0.1  # it tells kind answers from rude ones


@pytest.mark.slow
def test_the_results_of_a_comparison_can_be_read(capsys):
    flags = ["--pilot", "--workers", "1", "--output", "both"]
    main(["compare", "--arm", "advantage=outcome,returns_to_go", *flags, *SHORT, *TINY])
    capsys.readouterr()
    runpy.run_path("examples/read_comparison.py")["main"]("both", "rollout/return")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert "over 2 seeds" in said[0]
    assert "against outcome" in said[1]


def test_a_failed_run_leaves_the_means_of_the_others(tmp_path, capsys):
    for arm, seeds in {"a": (0.1, 0.3), "b": (0.5, None)}.items():
        for seed, value in enumerate(seeds):
            folder = tmp_path / "runs" / "game" / arm / f"seed{seed}"
            folder.mkdir(parents=True)
            lines = [{"step": n, "metrics": {"rollout/success": value or 0.9}} for n in (1, 2)]
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
            if value is not None:
                (folder / "model").mkdir()
    runpy.run_path("examples/read_comparison.py")["main"](str(tmp_path))
    shown = capsys.readouterr().out
    assert "game, a: mean 0.200 over 2 seeds" in shown
    assert "game, b: mean 0.500 over 1 seeds" in shown
