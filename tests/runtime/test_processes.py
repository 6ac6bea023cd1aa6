"""Child processes and temporary folders end with the process that made them, however it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from support.jails import eventually, is_alive, run_python

from gspo_env.runtime.processes import PrivateFolder, spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

TREE = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
stubborn = [sys.executable, "-c", code]
subprocess.Popen(stubborn)
subprocess.Popen(stubborn, start_new_session=True)
middle = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
subprocess.run([sys.executable, "-c", middle, *stubborn])  # its parent ends at once
time.sleep(0.2)
print("ready", flush=True)
if "ends" not in sys.argv:
    time.sleep(600)
"""
"""A command with a child in its group, one in another session, and one without its parent."""

TRAINER = """
import subprocess, sys, time
from gspo_env.runtime.processes import PrivateFolder, spawn
folder = PrivateFolder("gspo-env-test-")
open(folder.path / "weights", "w").write("x" * 1000)
log = open(folder.path / "log", "wb")
guard = spawn([sys.executable, "-c", sys.argv[1]], log=log, grace=0.5)
while b"ready" not in open(folder.path / "log", "rb").read():
    time.sleep(0.02)
print(folder.path, flush=True)
time.sleep(600)
"""


def descendants(pid):
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_neither_a_process_nor_a_folder_outlives_a_killed_trainer(number):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, TREE],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # maybe ignored here
    )
    with trainer, trainer.stdout:
        folder = Path(trainer.stdout.readline().decode().strip())
        family = descendants(trainer.pid)
        assert len(family) == 6  # two guards, the command, and its three
        assert folder.stat().st_mode & 0o777 == 0o700
        os.kill(trainer.pid, number)
    assert eventually(lambda: not any(map(is_alive, family)))
    assert eventually(lambda: not folder.exists())


def test_a_command_that_ends_leaves_no_descendant_and_its_exit_code(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        guard = spawn([sys.executable, "-c", TREE, "ends"], log=log, grace=0.3)
        eventually(lambda: len(descendants(guard.process.pid)) == 4)
        family = descendants(guard.process.pid)
        assert guard.process.wait(20) == 0
    assert len(family) >= 3
    assert not any(map(is_alive, family))
    for code, expected in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        ended = spawn([sys.executable, "-c", code], log=subprocess.DEVNULL)
        assert ended.process.wait(20) == expected


def test_a_command_whose_guard_is_killed_ends_as_well():
    code = "import time; time.sleep(600)"
    guard = spawn([sys.executable, "-c", code], log=subprocess.DEVNULL)
    assert eventually(lambda: descendants(guard.process.pid))
    (command,) = descendants(guard.process.pid)
    guard.process.kill()
    guard.process.wait(20)
    assert eventually(lambda: not is_alive(command))


def test_shared_memory_of_a_command_does_not_outlive_it():
    name = f"/dev/shm/gspo-env-test-{os.getpid()}"
    code = f"""
    import mmap, os, time
    file = os.open({name!r}, os.O_CREAT | os.O_RDWR)
    os.truncate({name!r}, 4096)
    kept = mmap.mmap(file, 4096)
    time.sleep(600)
    """
    guard = spawn([sys.executable, "-c", textwrap.dedent(code)], log=subprocess.DEVNULL)
    assert eventually(lambda: os.path.exists(name))
    time.sleep(0.2)
    assert guard.end() == 0
    assert not os.path.exists(name)


def test_signals_that_reach_a_guard_do_not_end_it_and_a_command_gets_the_defaults(tmp_path):
    folder = PrivateFolder("gspo-env-test-")
    code = "import signal, time; print(signal.getsignal(2), flush=True); time.sleep(600)"
    with (tmp_path / "log").open("wb") as log:
        guard = spawn([sys.executable, "-c", code], log=log)
    assert eventually(lambda: (tmp_path / "log").read_text())
    assert "default_int_handler" in (tmp_path / "log").read_text()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guard.process.pid, number)
        os.kill(folder._guard.process.pid, number)
    time.sleep(0.3)
    assert guard.process.poll() is None
    assert folder.path.exists()
    family = descendants(guard.process.pid)
    assert guard.end() == 0
    assert guard.end() == 0
    folder.close()
    folder.close()
    assert not any(map(is_alive, family))
    assert not folder.path.exists()


def test_a_process_that_was_forked_does_not_keep_a_folder(tmp_path):
    code = """
    import os, time
    from gspo_env.runtime.processes import PrivateFolder
    folder = PrivateFolder("gspo-env-test-")
    pid = os.fork()
    if not pid:
        time.sleep(600)  # holds the pipe to the guard
    folder.close()
    print(folder.path.exists())
    os.kill(pid, 9)
    """
    assert run_python("-c", textwrap.dedent(code), timeout=50).stdout.split() == ["False"]


TOOLS = """
import threading, time
from pathlib import Path
from gspo_env import sandbox
from gspo_envs.tools.sqlite import Database

database = Database("CREATE TABLE a (b)")
database.query("SELECT 1")
box = sandbox.Sandbox(seconds=600.0, cpu_seconds=600)
loop = "while True: pass"
for isolated in [False, True] if sandbox.find_missing() is None else [False]:
    run = lambda isolated=isolated: sandbox._run(box, loop, "", False, isolated)
    threading.Thread(target=run, daemon=True).start()
time.sleep(2.0)
print(sandbox._folders().path, flush=True)
time.sleep(600)
"""


def test_tools_that_run_for_a_policy_end_with_the_trainer():
    with subprocess.Popen([sys.executable, "-c", TOOLS], stdout=subprocess.PIPE) as trainer:
        folder = Path(trainer.stdout.readline().decode().strip())
        family = descendants(trainer.pid)
        assert len(family) >= 3  # a query's, a program's, the guard of its folder
        assert list(folder.iterdir())
        trainer.kill()
    assert eventually(lambda: not any(map(is_alive, family)))
    assert eventually(lambda: not folder.exists())


COMPARE = """
import sys, time
from pathlib import Path
from gspo_env.compare.processes import in_processes

def work(run):
    Path(sys.argv[1], run).touch()
    time.sleep(600)

if __name__ == "__main__":
    list(in_processes(work, ["one", "two"], 2))
"""


@pytest.mark.slow
def test_processes_of_a_comparison_end_with_it(tmp_path):
    (tmp_path / "main.py").write_text(COMPARE)
    command = [sys.executable, str(tmp_path / "main.py"), str(tmp_path)]
    with subprocess.Popen(command) as trainer:
        assert eventually(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists())
        family = descendants(trainer.pid)
        assert len(family) == 3  # two runs and Python's resource tracker
        trainer.kill()
    assert eventually(lambda: not any(map(is_alive, family)))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process to cores")
def test_only_the_cores_that_the_process_may_use_are_counted():
    program = (
        "import os; from gspo_env.runtime.processes import usable_cores\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
