"""Two processes of torchrun: they learn, resume bit for bit, and end when they are asked to.

Each test starts real processes, whose imports take many seconds: `pytest -m ranks -n 0`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.ranks

RUN = """
env = "talk.py:Declared"
env_kwargs = { turns = 2 }
output = "run"
steps = 6
tasks_per_step = 3
eval_every = 3
eval_tasks = 2
rollout = { group_size = 3, max_turn_tokens = 8 }
checkpoints = { save_every = 1, keep = 3 }
tracker = { name = "none" }
learner = { minibatches = 2, learning_rate = 1e-3 }

[recipe]
name = "tiny"
hidden_size = 16
heads = 2
layers = 1
demonstrations = 64
imitation_steps = 40
imitation_learning_rate = 1e-2
"""

TIMED = ("time/", "tokens_per_second")


def folder(tmp_path, name):
    made = tmp_path / name
    made.mkdir()
    (made / "run.toml").write_text(RUN)
    shutil.copy(Path(__file__).parents[1] / "support" / "talk.py", made)
    return made


def start(where, *flags, restarts=0, **variables):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = ["--local-addr", "127.0.0.1", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command = [*torchrun, *ranks, "-m", "gspo_env", "train", *flags]
    with (where / "output.txt").open("a") as output:
        given = {**os.environ, **variables}
        return subprocess.Popen(command, cwd=where, stdout=output, stderr=output, env=given)


def finish(process, where, code=0):
    assert process.wait(240) == code, (where / "output.txt").read_text()
    return (where / "output.txt").read_text()


def wait_for_step(where, step, process):
    until = time.monotonic() + 200
    while not list(where.glob(f"run/checkpoints/step-{step:06d}/state.json")):
        assert process.poll() is None, (where / "output.txt").read_text()
        assert time.monotonic() < until, (where / "output.txt").read_text()
        time.sleep(0.05)


def ranks_of(process):
    """The processes of the ranks, the first rank first."""
    found = psutil.Process(process.pid).children()
    return sorted(found, key=lambda child: int(child.environ()["RANK"]))


def gone(children):
    return not psutil.wait_procs(children, 30)[1]


def state(where, step=6):
    found = where / f"run/checkpoints/step-{step:06d}"
    numbers = json.loads((found / "state.json").read_text())
    history = [
        [step, {k: v for k, v in metrics.items() if not any(t in k for t in TIMED)}]
        for step, metrics in numbers["history"]
    ]
    tensors = load_file(found / "state-00001.safetensors")
    # torch draws the seed of the global generator, which nothing here uses
    return history, {k: v for k, v in tensors.items() if not k.startswith("generators.")}


def same(one, two):
    (history, tensors), (other_history, other_tensors) = one, two
    assert history == other_history
    assert tensors.keys() == other_tensors.keys()
    different = [name for name, values in tensors.items() if not values.equal(other_tensors[name])]
    assert not different


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two ranks that nothing interrupts."""
    where = folder(tmp_path_factory.mktemp("whole"), "whole")
    finish(start(where, "--config", "run.toml"), where)
    return where


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    """A run of two ranks that SIGTERM stopped after a step."""
    where = folder(tmp_path_factory.mktemp("stopped"), "stopped")
    (where / "slow").touch()
    process = start(where, "--config", "run.toml")
    wait_for_step(where, 2, process)
    children = ranks_of(process)
    process.send_signal(signal.SIGTERM)
    process.wait(240)  # torchrun has a code of its own for a signal
    assert "stops after this step" in (where / "output.txt").read_text()
    assert gone(children)
    assert not (where / "run/checkpoints/step-000006").exists()
    (where / "slow").unlink()
    shutil.copytree(where / "run", where / "as stopped", symlinks=True)
    return where


@pytest.fixture
def stopped(stopped_once):
    """The run as it was stopped, where the user's record says that it was trained."""
    shutil.rmtree(stopped_once / "run")
    shutil.copytree(stopped_once / "as stopped", stopped_once / "run", symlinks=True)
    return stopped_once


def test_two_ranks_learn_what_one_process_learns(tmp_path, whole):
    where = folder(tmp_path, "one")
    command = [sys.executable, "-m", "gspo_env", "train", "--config", "run.toml"]
    subprocess.run(command, cwd=where, check=True, timeout=240)
    (one, tensors), (two, other) = state(where), state(whole)
    for (step, metrics), (other_step, others) in zip(one, two, strict=True):
        assert step == other_step
        shown = {name: others[name] for name in metrics if name.startswith(("rollout/", "eval/"))}
        assert shown == pytest.approx({name: metrics[name] for name in shown}, rel=1e-4)
    assert tensors.keys() == other.keys()


def test_a_run_that_sigterm_stops_goes_on_bit_for_bit(stopped, whole):
    finish(start(stopped, "--resume", "run"), stopped)
    same(state(stopped), state(whole))


def test_all_ranks_go_on_from_the_checkpoint_after_one_was_killed(tmp_path, whole):
    where = folder(tmp_path, "killed")
    (where / "slow").touch()
    process = start(where, "--config", "run.toml", restarts=1)
    wait_for_step(where, 2, process)
    children = ranks_of(process)
    children[1].kill()
    (where / "slow").unlink()
    finish(process, where)
    assert gone(children)
    same(state(where), state(whole))


def test_no_rank_that_plays_ahead_outlives_its_launcher_and_each_group_is_trained_on_once(tmp_path):
    where, temporary = folder(tmp_path, "ahead"), tmp_path / "temporary"
    temporary.mkdir()
    (where / "slow").touch()
    flags = ("--config", "run.toml", "--max-staleness", "2", "--steps", "4")
    process = start(where, *flags)
    wait_for_step(where, 1, process)
    children = ranks_of(process)
    process.kill()
    process.wait()
    assert gone(children)
    (where / "slow").unlink()
    finish(start(where, "--resume", "run", TMPDIR=str(temporary)), where)
    saved = json.loads((where / "run/checkpoints/step-000004/state.json").read_text())
    assert saved["buffer"] == {"next": 12, "open": []}
    log = [m for _, m in saved["history"] if "rollout/return" in m]
    assert [m["rollout/episodes_before"] for m in log] == [0, 9, 18, 27]
    assert 0 < max(m["rollout/staleness_max"] for m in log) <= 2
    assert max(m["train/sync_logprob_diff"] for m in log) < 1e-4
    # torchrun itself leaves an empty folder for its logs
    assert not [path for path in temporary.rglob("*") if path.is_file()]


def test_a_run_of_two_ranks_goes_on_in_one_process(stopped, whole):
    command = [sys.executable, "-m", "gspo_env", "train", "--resume", "run"]
    subprocess.run(command, cwd=stopped, check=True, timeout=240)
    assert Path(stopped, "run/model/config.json").exists()
    (history, _), (expected, _) = state(stopped), state(whole)
    assert [step for step, _ in history] == [step for step, _ in expected]
