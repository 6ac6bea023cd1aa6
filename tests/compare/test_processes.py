"""The worker processes of a comparison."""

from __future__ import annotations

import importlib
import time

import pytest

from gspo_env.compare import processes
from gspo_env.compare.processes import in_processes

WORK = """
import time
from gspo_env.tracking.console import Progress

def imitate(said):
    Progress().update("imitation", 20, 450)
    print("\\x1b[2J")
    print("half way")
    while not said.exists():
        time.sleep(0.01)

def lose_the_folder(path):
    import shutil, sys
    shutil.rmtree(sys.stdout._path.parent)  # as where a disk is full, no line can be kept
    print("still at it")
    path.touch()

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


def test_the_newest_line_of_a_long_job_is_said_while_it_runs(work, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_QUIET", 0.05)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line == "seed 0: half way":
            (tmp_path / "said").touch()

    jobs = {"seed 0": tmp_path / "said"}
    assert list(in_processes(work.imitate, jobs, 1, print, say)) == [tmp_path / "said"]
    assert said[-1] == "seed 0: half way"
    assert set(said) <= {"seed 0: imitation 20/450", r"seed 0: \x1b[2J", "seed 0: half way"}


def test_a_line_that_cannot_be_kept_ends_no_job(work, tmp_path):
    path = tmp_path / "done"
    assert list(in_processes(work.lose_the_folder, {"seed 0": path}, 1, print, print)) == [path]
    assert path.exists()


def test_an_error_of_one_job_stops_the_others_and_is_raised(work):
    begun = time.monotonic()
    with pytest.raises(ValueError, match="no such thing"):
        list(in_processes(work.fail_for_one, {"1": "bad", "2": "good"}, 2, print, print))
    assert time.monotonic() - begun < 100
