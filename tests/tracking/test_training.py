"""Trackers in a training: by name on the command line, failing, or pointing nowhere."""

import json
from pathlib import Path

import pytest

from gspo_env.cli.main import main

pytestmark = pytest.mark.usefixtures("in_folder")

OWN = f"{Path(__file__).parents[2] / 'examples' / 'own_tracker.py'}:JsonLines"
TINY = [
    *("train", "--output", "out", "--steps", "1", "--tasks-per-step", "2", "--eval-tasks", "4"),
    *("--group-size", "2", "--hidden-size", "16", "--demonstrations", "16"),
    *("--imitation-steps", "4"),
]
BROKEN = """
from dataclasses import dataclass

from gspo_env.tracking import Tracker

@dataclass(frozen=True, kw_only=True)
class Broken:
    def start(self, run):
        return Full()

class Full(Tracker):
    def log(self, metrics, step):
        raise OSError("the disk is full")
"""


def test_two_trackers_by_name_of_which_one_always_fails(tmp_path, capsys):
    (tmp_path / "broken.py").write_text(BROKEN)
    main([*TINY, "--tracker", f"{OWN},broken.py:Broken"])
    output = capsys.readouterr().out
    assert "broken.py:Broken did NOT record everything" in output
    assert "JsonLines did NOT" not in output
    assert f"Tracked: cat {Path('out', 'lines.jsonl')}" in output
    lines = [json.loads(line) for line in Path("out/lines.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/success" in line] == [0, 1]
    assert lines[-1] == {"status": "FINISHED"}
    assert json.loads(Path("out/params.json").read_text())["steps"] == 1
    assert list(Path("out/model").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("http://no-such-host.invalid:5000", "cannot open: [Errno -"),
        ("http://me:secret-word-9@127.0.0.1:9/runs", "Connection refused"),
        ("nonsense://store", "unsupported URI"),
        ("http://[bad", "Invalid IPv6 URL"),
        ("http://127.0.0.1:99999", "Port out of range 0-65535"),
        ("sqlite:////proc/folder/runs.db", "/proc/folder"),
        ("./mlruns", "maintenance mode"),
    ],
)
def test_an_address_that_cannot_work_is_one_sentence_before_anything_is_trained(
    monkeypatch, capsys, uri, words
):
    for arguments in [("--tracking-uri", uri)], []:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "" if arguments else uri)
        with pytest.raises(SystemExit) as stopped:
            main([*TINY, *(text for pair in arguments for text in pair)])
        assert stopped.value.code == 2
        output = capsys.readouterr()
        assert "environment" not in output.out
        (line,) = output.err.splitlines()
        assert words in line
        name = "tracker.tracking_uri" if arguments else "MLFLOW_TRACKING_URI"
        assert f"{name} is " in line
        assert "secret-word-9" not in line
        assert "--tracker none" in line
    assert not Path("out").exists()
