"""The worker processes of a comparison."""

import importlib
import os

import pytest

from gspo_env.compare.processes import in_processes

WORK = """
import os, time

def write(path):
    print("dropped")
    path.write_text(str(os.getpid()))

def die(path):
    os._exit(1)

def fail_for_one(name):
    if name == "bad":
        raise ValueError("no such thing")
    time.sleep(600)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A module that a worker can import."""
    (tmp_path / "work_of_a_comparison.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("work_of_a_comparison")


@pytest.mark.slow
def test_jobs_run_in_other_processes_and_those_whose_process_dies_are_lost(work, tmp_path, capfd):
    paths = [tmp_path / "a", tmp_path / "b"]
    lost = []
    assert set(in_processes(work.write, paths, 1, lost.append)) == set(paths)
    assert str(os.getpid()) not in {path.read_text() for path in paths}
    assert "dropped" not in capfd.readouterr().out
    assert list(in_processes(work.die, paths[:1], 1, lost.append)) == lost == paths[:1]


def test_an_error_of_one_job_stops_the_others_and_is_raised(work):
    with pytest.raises(ValueError, match="no such thing"):
        list(in_processes(work.fail_for_one, ["bad", "good"], 2, print))
