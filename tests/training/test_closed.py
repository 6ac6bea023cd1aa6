"""Every environment is closed after its last use, whatever ends the run."""

import itertools
import os
import signal
from pathlib import Path

import pytest
from support.runs import tiny

from gspo_agents.gspo import GSPOAgent
from gspo_agents.scripted import ScriptedAgent
from gspo_env.errors import EnvironmentContractError

COUNTED = """
import os
import signal
from gspo_env import TextEnv

class Counted(TextEnv):
    made = 0

    def __init__(self, blocking=True):
        Counted.made += 1
        self.name, self.blocking = f"{os.getpid()}-{Counted.made}", blocking
        self.note("made")

    def note(self, what):
        with open(os.environ["NOTES"], "a") as file:
            file.write(f"{self.name} {what}\\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.note("reset")
        return "say yes", {}

    def step(self, action):
        when = os.environ["WHEN"]
        if when == "raises" and self.np_random.random() < 0.3 or when == "fails":
            raise OSError("lost")
        if when == "stops":
            os.kill(int(os.environ["TRAINER"]), signal.SIGINT)
        return "", float("yes" in action), True, False, {}

    def expert_action(self, noise=0.0):
        return "yes"

    def close(self):
        self.note("closed")
"""


@pytest.fixture(autouse=True)
def _counted(in_folder, monkeypatch):
    Path("counted.py").write_text(COUNTED)
    for name, value in {
        "NOTES": str(Path("notes").absolute()),
        "TRAINER": str(os.getpid()),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WHEN", "")


def agent(isolation="thread", blocking=True):
    return GSPOAgent(
        config=tiny(
            env="counted.py:Counted",
            env_kwargs={"blocking": blocking},
            recipe={"hidden_size": 16, "demonstrations": 4, "imitation_steps": 2},
            **{"steps": 2, "tasks_per_step": 2, "eval_every": 1, "eval_tasks": 2},
            rollout={"group_size": 2, "isolation": isolation, "max_turn_tokens": 4},
        )
    )


def check_closed():
    """Each is closed at its end, and only once after its last use; returns their number."""
    histories = {}
    for line in Path("notes").read_text().splitlines():
        name, what = line.split()
        histories.setdefault(name, []).append(what)
    for history in histories.values():
        assert history[0] == "made"
        assert history[-1] == "closed"
        assert ("closed", "closed") not in itertools.pairwise(history)
    return len(histories)


WAYS = [
    *(("thread", blocking) for blocking in (True, False)),
    pytest.param("process", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("when", ["ends", "raises", "fails", "stops"])
@pytest.mark.parametrize(("isolation", "blocking"), WAYS)
def test_a_training_closes_every_environment(isolation, blocking, when, monkeypatch):
    trains = agent(isolation, blocking)
    before = check_closed()
    monkeypatch.setenv("WHEN", when)
    try:
        trains.train()
    except (EnvironmentContractError, KeyboardInterrupt):
        assert when in ("fails", "stops")
    assert check_closed() > before or when == "fails"


@pytest.mark.parametrize(("isolation", "blocking"), WAYS)
def test_an_evaluation_and_a_single_episode_close_every_environment(isolation, blocking):
    plays = agent(isolation, blocking)
    plays.evaluate(3, samples=2)
    after = check_closed()
    plays.play(5)
    assert check_closed() > after


@pytest.mark.parametrize(
    ("when", "error"), [("fails", EnvironmentContractError), ("stops", KeyboardInterrupt)]
)
@pytest.mark.parametrize(("isolation", "blocking"), WAYS)
def test_an_agent_that_cannot_begin_closes_every_environment(
    isolation, blocking, when, error, monkeypatch
):
    monkeypatch.setenv("WHEN", when)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest ignore it
    try:
        with pytest.raises(error):
            agent(isolation, blocking)
    finally:
        signal.signal(signal.SIGINT, before)
    check_closed()


def test_a_scripted_agent_closes_its_environment():
    ScriptedAgent("counted.py:Counted").evaluate(2)
    check_closed()
