"""What the tests of workers share: a pretend server, settings and groups without their times."""

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from gspo_env.config import Config
from gspo_env.engines.vllm.requests import ServerAddress, ServerClient, ServerList
from gspo_env.rollout.settings import RolloutConfig
from gspo_env.types import Task

HERE = Path(__file__).parent
TASKS = [Task(env_id="custom/Turns-v0", seed=n) for n in range(6)]


class Engine(ServerClient):
    """The trainer's engine: it knows the servers and hears of those that fail."""

    def __init__(self, fleet):
        super().__init__(fleet, 64)
        self.told = []

    @property
    def server_list(self):
        return self._server_list

    def failed(self, address, reason):
        self.told.append((address, reason))


@contextmanager
def pretend_server(folder, seconds=0.0):
    """Yields the address of a server that answers with actions."""
    path = Path(folder, f"{len(list(Path(folder).iterdir()))}.sock")
    command = [sys.executable, "-S", str(HERE / "pretend_policy.py"), str(path), str(seconds)]
    process = subprocess.Popen(command)
    try:
        while not path.exists():
            time.sleep(0.01)
        yield ServerAddress(address="http://vllm", socket=str(path), pid=process.pid)
    finally:
        process.kill()
        process.wait()


def fleet(*servers, **fields):
    return ServerList(servers=servers, max_context=512, **fields)


def settings(workers="asyncio", *, env=None, **limits):
    """Returns a config whose environment is that of `worker_envs.py`."""
    rollout = {"max_turn_tokens": 16, "max_context": 512, "concurrency": 8} | limits
    return Config(
        env=f"{HERE / 'worker_envs.py'}:Turns",
        env_kwargs=env or {},
        model="given",
        rollout=RolloutConfig(workers=workers, **rollout),
    )


def essence(groups):
    """Returns all of groups that does not depend on time and place."""
    return [(group.task, group.redrawn, [episode(e) for e in group.episodes]) for group in groups]


def episode(e):
    turns = [
        (t.prompt_ids, t.action_ids, t.logprobs, t.text, t.observation, t.reward, t.weights_version)
        for t in e.turns
    ]
    faults = [(fault.reason, fault.message) for fault in e.faults]
    return e.task, e.outcome, e.success, e.stop_reason, e.error, faults, turns, e.final_observation


def pids(groups):
    """Returns the processes in which the episodes were played."""
    ended = [e.turns[-1] for group in groups for e in group.episodes if e.turns]
    return {turn.info.extra["pid"] for turn in ended}
