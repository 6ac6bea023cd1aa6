"""A run with classes of a script or a notebook can be used from the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli_errors import refused

from gspo_env.cli.main import main
from gspo_env.cli.serve import Serve, policy_config
from gspo_env.config import load_toml
from gspo_env.files import saved_step
from gspo_env.registry import name_of

SCRIPT = """
from own_loss_of_a_script import Scaled
from gspo_agents.gspo import GSPOAgent
from gspo_env.credit.estimators import ReturnsToGo
from gspo_env.settings import settings
from support.runs import drawn

@settings
class Own(ReturnsToGo):
    share: float = 1.0

if __name__ == "__main__":
    recipe = {"hidden_size": 16, "layers": 1, "heads": 2, "demonstrations": 20}
    tree = {"env": "gspo/Lookup-v0", "recipe": recipe | {"imitation_steps": 2}, "eval_tasks": 2}
    config = drawn(**tree, steps=1, tasks_per_step=2, checkpoints={"save_every": 1},
        output="out", rollout={"max_turn_tokens": 4}, advantage=Own(share=0.5), loss=Scaled(by=2.0))
    GSPOAgent(config=config).train()
"""
MODULE = """
from gspo_env.learner.losses import GSPO
from gspo_env.settings import settings

@settings
class Scaled(GSPO):
    by: float = 1.0
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of a script in another folder, and what the script printed."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "sub").mkdir()
    (folder / "sub" / "script.py").write_text(SCRIPT)
    (folder / "sub" / "own_loss_of_a_script.py").write_text(MODULE)
    command = [sys.executable, "sub/script.py"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "model shards" not in done.stderr  # a progress bar of transformers
    return folder, done.stdout


def test_a_training_says_at_once_what_a_resume_will_need(trained):
    line = next(line for line in trained[1].splitlines() if line.startswith("own classes"))
    assert line.split() == [
        *["own", "classes", "train", "--resume", "will", "need"],
        *("--advantage", "sub/script.py:Own", "--loss", "sub/own_loss_of_a_script.py:Scaled"),
    ]
    assert trained[1].index("own classes") < trained[1].index("imitation")


def test_the_last_lines_of_a_training_resume_it_with_its_own_classes(trained):
    (line,) = (line for line in trained[1].splitlines() if line.startswith("Resume: "))
    flags = "--advantage sub/script.py:Own --loss sub/own_loss_of_a_script.py:Scaled"
    assert line.split(maxsplit=1)[1] == f"gspo-env train --resume out {flags} --steps 2"


def test_a_script_that_trains_when_it_is_loaded_for_its_class_is_refused(
    trained, monkeypatch, capsys
):
    monkeypatch.chdir(trained[0])
    source = Path("sub/own_loss_of_a_script.py").read_text()
    train = "from gspo_agents.gspo import GSPOAgent\nGSPOAgent(env='gspo/Lookup-v0').train()\n"
    Path("trains.py").write_text(source + train)
    for place in ("trains.py", "trains"):
        said = refused(capsys, "train", "--loss", f"{place}:Scaled")
        assert f"{place} trains whenever it is loaded; expected its training under" in said


def test_the_first_success_of_a_model_that_imitated_is_said_to_be_after_imitation(trained):
    (line,) = (line for line in trained[1].splitlines() if line.startswith("Success on "))
    assert "% after imitation, " in line
    assert "% after training (greedy " in line
    assert " after imitation, best " in (trained[0] / "out" / "summary.md").read_text()


def test_what_plays_loads_no_class_of_training(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained[0])
    main(["evaluate", "out", "--tasks", "2"])
    assert "success  " in capsys.readouterr().out
    assert name_of("advantage", policy_config(Serve(model="out")).advantage) == "returns_to_go"


def test_a_resume_takes_the_files_of_the_classes_and_keeps_their_settings(
    trained, monkeypatch, capsys
):
    monkeypatch.chdir(trained[0])
    said = refused(
        capsys,
        "train",
        "--resume",
        "out",
        "--steps",
        "2",
        "--loss",
        "sub/own_loss_of_a_script.py:Scaled",
    )
    assert "__main__:Own" in said
    assert "--advantage FILE.py:Own" in said
    flags = ["--advantage", "sub/script.py:Own", "--loss", "sub/own_loss_of_a_script.py:Scaled"]
    main(["train", "--resume", "out", "--steps", "2", *flags])
    assert saved_step(Path("out/model")) == 2
    config = load_toml("out/config.toml")
    assert (config.advantage.share, config.loss.by) == (0.5, 2.0)
    assert name_of("advantage", config.advantage) == "sub/script.py:Own"
    main(["train", "--resume", "out", "--steps", "3"])
    assert saved_step(Path("out/model")) == 3
    said = refused(capsys, "train", "--resume", "out", "--advantage", "outcome")
    assert "only steps, stop_at_success, what is kept" in said


def test_a_module_in_the_working_folder_is_found(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained[0] / "sub")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(Path.cwd()))])
    monkeypatch.delitem(sys.modules, "own_loss_of_a_script", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["train", "--loss", "own_loss_of_a_script:Scaled", "--help", "loss"])
    assert not end.value.code
    assert "--loss.by" in capsys.readouterr().out
