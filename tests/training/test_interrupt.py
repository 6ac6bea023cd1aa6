"""Real processes that are stopped, killed, or cannot write: what is saved, and how they resume."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.cli_errors import refused

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.config import load_toml, override
from gspo_env.model.weights import find_weights
from gspo_env.runs import Run

RUN = """
env = "talk.py:Talk"
env_kwargs = { turns = 1 }
output = "run"
steps = 500
tasks_per_step = 2
eval_every = 3
eval_tasks = 2
rollout = { group_size = 2, max_turn_tokens = 8 }
checkpoints = { save_every = 1, keep = 3 }
tracker = { name = "notes.py:Notes" }

[recipe]
name = "tiny"
hidden_size = 16
heads = 2
layers = 1
demonstrations = 16
imitation_steps = 4
"""

NOTES = '''
from dataclasses import dataclass
from pathlib import Path

from gspo_env.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Notes(Tracker):
    """Writes how the run was begun and how it ended."""

    id = "the first"
    how_to_look = ""

    def start(self, run):
        Path("begun").write_text(run.id)
        return self

    def finish(self, status, reason):
        Path("status").write_text(status)
'''


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    shutil.copy(Path(__file__).parents[1] / "support" / "talk.py", tmp_path)
    Path("run.toml").write_text(RUN)
    Path("notes.py").write_text(NOTES)


def start(*arguments, command="train", prepare=None):
    """Starts a command of gspo-env; see `start_python`."""
    return start_python("-m", "gspo_env", command, *arguments, prepare=prepare)


def start_python(*arguments, prepare=None):
    """Starts a process with Python's own signal handlers and in a session of its own."""

    def before():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup pytest` ignores it
        if prepare is not None:
            prepare()

    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
        start_new_session=True,
    )


def until(path, process):
    """Waits until there is a file of this pattern; a busy machine may miss one that is removed."""
    while not any(Path().glob(path)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def until_imitation(*arguments):
    """Starts a training; returns its process and its first step of the imitation that is shown."""
    process = start(*arguments)
    line = next(line for line in process.stdout if line.startswith("imitation "))
    return process, int(line.split()[1].partition("/")[0])


def steps():
    return sorted(int(p.name[-6:]) for p in Path("run/checkpoints").glob("step-*"))


def resume_run(more):
    """Goes on in this process with some more steps; returns the history."""
    done = steps()[-1]
    config = override(load_toml("run/config.toml"), {"steps": done + more})
    return GSPOAgent.resume("run", config).train()


def points():
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    return [(p["step"], name) for p in map(json.loads, lines) for name in p["metrics"]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint_and_exit_code_0(number):
    process = start("--config", "run.toml")
    until("run/checkpoints/step-*[2-9]", process)
    process.send_signal(number)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    done = steps()[-1]
    assert 2 <= done < 500
    assert f"Stopped after step {done} of 500. Resume with: gspo-env train --resume run" in output
    assert "stops after this step" in errors
    assert Path("status").read_text() == "KILLED"
    assert find_weights("run").step == done
    for name in ("model/config.json", "learning_curve.png", "view.html", "summary.md"):
        assert Path("run", name).stat().st_size
    assert not Run.open("run").finished
    history = resume_run(2)
    assert find_weights("run").step == done + 2
    assert Run.open("run").finished
    assert [s for s, m in history if "rollout/return" in m] == list(range(1, done + 3))
    assert Path("status").read_text() == "FINISHED"
    assert Path("begun").read_text() == "the first"
    assert len(points()) == len(set(points()))
    assert {s for s, name in points() if name == "rollout/return"} == set(range(1, done + 3))


@pytest.mark.slow
def test_each_command_uses_the_weights_of_the_stop_and_none_uses_older_ones_silently(capsys):
    assert start("--config", "run.toml", "--steps", "4").wait() == 0
    process = start("--resume", "run", "--steps", "400")
    until("run/checkpoints/step-*[6-9]", process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    first = steps()[-1]
    assert f"Model of step {first}, config and learning curve: run" in output
    assert find_weights("run").step == first
    main(["evaluate", "run", "--tasks", "2"])
    assert f"loading run, weights of step {first}, the newest" in capsys.readouterr().out
    process = start("--resume", "run")
    until(f"run/checkpoints/step-{first + 3:06d}", process)
    process.kill()
    process.communicate()
    shutil.move("run", "moved")
    last = max(int(path.name[-6:]) for path in Path("moved/checkpoints").glob("step-*"))
    env = ("--env", "talk.py:Talk")
    for arguments in (
        ("evaluate", "moved", *env),
        ("serve", "moved"),
        ("play", "talk.py:Talk", "--model", "moved"),
        ("train", "--model", "moved", *env),
    ):
        error = refused(capsys, *arguments)
        assert f"the run 'moved' is at step {last} of 400, of which it has no model" in error
        assert f"gspo-env train --resume moved --steps {last}" in error
    main(["evaluate", "moved", "--tasks", "2", "--step", str(first), *env])
    assert f"loading moved, weights of step {first}\n" in capsys.readouterr().out
    main(["train", "--resume", "moved", "--steps", str(last), *env, "--tracker", "notes.py:Notes"])
    main(["evaluate", "moved", "--tasks", "2", *env])
    assert f"loading moved, weights of step {last}, the newest" in capsys.readouterr().out
    assert Run.open("moved").finished


def test_a_killed_run_resumes_without_gaps_or_doubled_points():
    process = start("--config", "run.toml")
    until("run/checkpoints/step-*[3-9]", process)
    process.kill()
    process.communicate()
    Path("run/checkpoints/.step-000001.9999999.part").mkdir()
    Path("run/.model.9999999.part").mkdir()
    Path("run/.summary.md.9999999.part").write_text("cut")
    Path(f"run/.summary.md.{os.getppid()}.part").write_text("of a process that lives")
    Path("run/checkpoints/.best.9999999.part").symlink_to("step-000001")
    history = resume_run(2)
    last = history[-1][0]
    assert [s for s, m in history if "rollout/return" in m] == list(range(1, last + 1))
    assert len(points()) == len(set(points()))
    assert {s for s, name in points() if name == "rollout/return"} >= set(range(1, last + 1))
    assert [p.name for p in Path("run").rglob(".*")] == [f".summary.md.{os.getppid()}.part"]


@pytest.mark.slow
def test_a_run_without_a_checkpoint_says_how_to_begin_again_and_so_does_resume(capsys):
    steps = ("--imitation-steps", "90000", "--steps", "1")
    process, _ = until_imitation("--config", "run.toml", "--keep", "0", *steps)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    again = "begin again with: gspo-env train --config run/config.toml --output run-again"
    assert again in errors
    assert "Traceback" not in errors
    assert again in refused(capsys, "train", "--resume", "run")
    main([*again.split()[4:], "--imitation-steps", "4"])
    assert Path("run-again/model").is_dir()


@pytest.mark.slow
def test_a_run_stopped_in_its_imitation_resumes_there():
    process, step = until_imitation("--config", "run.toml", "--imitation-steps", "90000")
    assert step == 20
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "stops after this step and saves it" in errors
    assert "Resume with: gspo-env train --resume run" in errors
    assert "Traceback" not in errors
    assert Path("status").read_text() == "KILLED"
    process, again = until_imitation("--resume", "run")
    process.kill()
    process.communicate()
    assert again >= 20
    assert Path("begun").read_text() == "the first"


@pytest.mark.slow
def test_ctrl_c_stops_at_once_after_another_signal():
    process = start("--config", "run.toml")
    until("run/checkpoints/step-*[2-9]", process)
    Path("wait").touch()
    until("waiting", process)
    process.send_signal(signal.SIGHUP)
    while b"stops after this step" not in os.read(process.stderr.fileno(), 4096):
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)  # the step would wait for a minute
    assert process.returncode == 130
    assert "Resume with: gspo-env train --resume run" in errors
    assert Path("status").read_text() == "KILLED"


CELL = """
import asyncio
from gspo_agents.gspo import GSPOAgent
from gspo_env.config import load_toml

async def cell():
    GSPOAgent(config=load_toml("run.toml")).train()

asyncio.new_event_loop().run_until_complete(cell())  # `asyncio.run` has a handler of its own
"""


@pytest.mark.slow
def test_ctrl_c_stops_a_run_in_a_notebook_after_its_step_and_the_second_one_at_once():
    process = start_python("-c", CELL)
    until("run/checkpoints/step-*[2-9]", process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert f"Stopped after step {steps()[-1]} of 500. Resume with" in output
    shutil.rmtree("run")
    process = start_python("-c", CELL)
    until("run/checkpoints/step-*[2-9]", process)
    Path("wait").touch()
    until("waiting", process)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    output, errors = process.communicate(timeout=30)  # the step would wait for a minute
    assert "KeyboardInterrupt" in errors
    assert "Resume with: gspo-env train --resume run" in errors
    assert Path("status").read_text() == "KILLED"


@pytest.mark.slow
def test_a_disk_that_takes_no_more_costs_checkpoints_but_neither_training_nor_the_older_ones():
    process = start("--config", "run.toml", "--steps", "3")
    assert process.wait() == 0
    kept = [(p.name, (p / "manifest.json").read_bytes()) for p in Path("run").glob("*/step-*")]

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    process = start("--resume", "run", "--steps", "5", prepare=limit)
    output, errors = process.communicate()
    assert "train 5/5" in output
    assert "cannot write the checkpoint step-000004" in errors
    assert "cannot write the checkpoint step-000005" in errors
    assert process.returncode == 2
    assert "the trained model cannot be written to 'run'" in errors
    assert kept == [
        (p.name, (p / "manifest.json").read_bytes()) for p in Path("run").glob("*/s*-*")
    ]
    history = GSPOAgent.resume("run", override(load_toml("run/config.toml"), {"steps": 5})).train()
    assert history[-1][0] == 5
    assert Path("run/model/config.json").exists()


def test_an_environment_that_does_not_close_does_not_cost_the_model(caplog):
    Path("unclosable").touch()
    GSPOAgent(config=override(load_toml("run.toml"), {"steps": 1})).train()
    assert Path("run/model/config.json").exists()
    assert "close() raised RuntimeError: does not close" in caplog.text
    assert Path("status").read_text() == "FINISHED"


@pytest.mark.slow
def test_a_comparison_stopped_by_ctrl_c_leaves_no_worker_and_no_result():
    Path("wait").touch()
    arms = ("--arm", "advantage=outcome,returns_to_go", "--pilot", "--seeds", "1", "--workers", "2")
    process = start("--config", "run.toml", "--tracker", "none", *arms, command="compare")
    until("waiting", process)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the workers as well
    output, errors = process.communicate(timeout=30)  # the step would wait for a minute
    assert process.returncode == 130, errors
    assert "Stopped. The same command resumes with the results in run." in output
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []
    assert list(Path("run").rglob("runs/*/*/*/model")) == []
