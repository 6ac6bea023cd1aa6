"""Workers in real Ray actors: killed, stopped and hung ones, and what is left of all."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.worker_parts import TASKS, Engine, essence, fleet, pids, pretend_server, settings

from gspo_agents.environments import make_pool
from gspo_agents.setup import open_collector
from gspo_env.distributed import pool as workers
from gspo_env.errors import RolloutError
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.failures import FaultLog

pytestmark = pytest.mark.ray
MARK = "GSPO_ENV_RAY_TEST"


def marked(value):
    """Returns the processes that a test has started, however far away; not its pretend server."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) != os.getpid():
            try:
                if f"{MARK}={value}".encode() in (place / "environ").read_bytes().split(b"\0"):
                    found[int(place.name)] = (place / "cmdline").read_bytes()
            except OSError:
                continue
    return {pid: command for pid, command in found.items() if b"pretend_policy" not in command}


def all_gone(value, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and marked(value):
        time.sleep(0.1)
    return not marked(value)


@pytest.fixture
def mark(monkeypatch, tmp_path):
    """Marks all processes of a test, which have a folder of their own for temporary files."""
    short = Path(f"/tmp/gr{os.getpid()}")  # the path of a Unix socket is short
    short.mkdir()
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield str(tmp_path)
    left = list(short.iterdir())
    subprocess.run(["rm", "-rf", str(short)], check=True)
    assert left == []


@contextmanager
def opened(config, chat, engine):
    with (
        closing(make_pool(settings(), FaultLog())) as pool,
        open_collector(config, lambda: engine, chat, pool, len(chat.tokenizer)) as collector,
    ):
        yield collector


def collect(collector):
    return asyncio.run(collector.collect(TASKS, seed=5, group_size=3))


@pytest.fixture
def alone(chat, tmp_path):
    """The groups that one process plays, and the server of both."""
    config = settings()
    with pretend_server(tmp_path) as server, closing(make_pool(config, FaultLog())) as pool:
        engine = Engine(fleet(server))
        groups = collect(Collector(engine, chat, pool, config.rollout))
        yield server, essence(groups)


def test_actors_play_what_one_process_plays_and_leave_nothing(mark, chat, alone):
    server, expected = alone
    before = signal.getsignal(signal.SIGTERM), os.environ.get("RAY_AUTH_TOKEN_PATH")
    with opened(settings("ray:2"), chat, Engine(fleet(server))) as collector:
        while collector.metrics()["rollout/workers"] < 2:
            time.sleep(0.1)
        groups = collect(collector)
        assert len(marked(mark)) > 5
    assert essence(groups) == expected
    assert len(pids(groups)) == 2
    assert os.getpid() not in pids(groups)
    assert all_gone(mark)
    assert (signal.getsignal(signal.SIGTERM), os.environ.get("RAY_AUTH_TOKEN_PATH")) == before


@pytest.mark.parametrize("how", ["dies", "stops", "hangs"])
def test_no_episode_is_lost_or_counted_twice_when_an_actor_ends(
    mark, chat, alone, how, tmp_path, monkeypatch
):
    server, expected = alone
    env = {"fails": how, "once": str(tmp_path)}
    config = settings("ray:2", env=env, episode_timeout=3.0 if how == "hangs" else 60.0)
    start = workers.WorkerPool.__init__
    monkeypatch.setattr(
        workers.WorkerPool, "__init__", lambda *a, **k: start(*a, **k, answer_timeout=8.0)
    )
    with opened(config, chat, Engine(fleet(server))) as collector:
        groups = collect(collector)
        counts = collector.metrics()
        assert essence(groups) == expected
        assert counts["rollout/workers_lost"] == counts["rollout/worker_restarts"] == 1
        assert counts["rollout/reissued_groups"] >= 1
        assert essence(collect(collector)) == expected
    assert all_gone(mark)


def test_an_actor_that_cannot_be_made_is_one_sentence(mark, chat, alone):
    config = replace(settings("ray:2"), env="gone.py:Env")
    with (
        opened(config, chat, Engine(fleet(alone[0]))) as collector,
        pytest.raises(RolloutError, match=r"none of the 2 workers is left; .*gone\.py"),
    ):
        collect(collector)


PROGRAM = """
import sys
sys.path[:0] = {path!r}
from test_ray import *
from conftest import WORDS
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines.vllm.requests import ServerAddress
from gspo_env.recipes.build import build_tokenizer
chat = ChatTokenizer(build_tokenizer(WORDS, ["<tool_call>"]))
server = ServerAddress(address="http://vllm", socket={socket!r})
with opened(settings("ray:2"), chat, Engine(fleet(server))) as collector:
    while True:
        collect(collector)
        print("played", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_trainer_that_is_killed(mark, tmp_path, number):
    here = Path(__file__).parent
    path = [str(here), str(here.parent)]
    program = tmp_path / "program.py"
    with pretend_server(tmp_path, 0.1) as server:
        program.write_text(PROGRAM.format(path=path, socket=server.socket))
        command = [sys.executable, str(program)]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert trainer.stdout.readline() == "played\n"
        assert len(marked(mark)) > 5
        trainer.send_signal(number)
        trainer.wait(30)
        assert all_gone(mark)
