"""Trackers in a training: by name on the command line, failing, or pointing nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo_env.cli.main import main

OWN = f"{Path(__file__).parents[2] / 'examples' / 'own_tracker.py'}:JsonLines"
TINY = [
    *("train", "--output", "out", "--steps", "1", "--tasks-per-step", "2", "--eval-tasks", "4"),
    *("--group-size", "2", "--hidden-size", "16", "--demonstrations", "16"),
    *("--imitation-steps", "4"),
]
BROKEN = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Broken:
    def start(self, run):
        return self

    def __getattr__(self, name):
        raise OSError("the disk is full")
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_two_trackers_by_name_of_which_one_always_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    main([*TINY, "--tracker", f"{OWN},broken.py:Broken"])
    said = capsys.readouterr().out
    assert "broken.py:Broken did NOT record everything" in said
    assert f"Tracked: cat {Path('out', 'lines.jsonl')}" in said
    lines = [json.loads(line) for line in Path("out/lines.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/success" in line] == [0, 1]
    assert lines[-1] == {"step": "FINISHED"}
    assert list(Path("out/model").glob("*.safetensors"))


def test_a_store_that_does_not_answer_costs_neither_the_run_nor_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gspo_env.tracking.mlflow._PATIENCE", 0.5)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    main(TINY)
    said = capsys.readouterr().out
    assert "mlflow did NOT record everything" in said
    assert "Model, config and learning curve: out" in said
    assert list(Path("out/model").glob("*.safetensors"))
