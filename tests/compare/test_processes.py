"""The worker processes of a comparison."""

import importlib
import os
from multiprocessing import active_children

import pytest

from gspo_env.compare.processes import in_processes

WORK = """
import os, time

def write(path):
    print("dropped")
    path.write_text(str(os.getpid()))

def die(path):
    os._exit(1)

def write_or_wait(path):
    if path.name == "long":
        time.sleep(600)
    write(path)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A module that a worker can import."""
    (tmp_path / "work_of_a_comparison.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("work_of_a_comparison")


@pytest.mark.slow
def test_each_job_has_its_own_process_and_its_own_death(work, tmp_path, capfd):
    paths = [tmp_path / "a", tmp_path / "b"]
    assert dict(in_processes(work.write, paths, 1)) == dict.fromkeys(paths, 0)
    assert len({str(os.getpid()), *(path.read_text() for path in paths)}) == 3
    assert "dropped" not in capfd.readouterr().out
    assert dict(in_processes(work.die, paths, 2)) == dict.fromkeys(paths, 1)


def test_processes_that_run_are_stopped_when_nobody_waits_for_them(work, tmp_path):
    jobs = in_processes(work.write_or_wait, [tmp_path / "a", tmp_path / "long"], 2)
    assert next(jobs) == (tmp_path / "a", 0)
    (process,) = active_children()
    jobs.close()
    process.join(10)
    assert not process.is_alive()
