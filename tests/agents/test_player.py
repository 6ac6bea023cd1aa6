"""Two policies in one game: `act` inside `step`, and frozen opponents from a folder."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import tiny

from gspo_agents.engine_loop import EngineLoop
from gspo_agents.frozen import FrozenAgent
from gspo_agents.gspo import GSPOAgent
from gspo_env import TextEnv
from gspo_env.errors import ConfigError, EngineError, RolloutError
from gspo_env.types import Prompt

GAME = '''
import threading
from gspo_env import TextEnv

class Duel(TextEnv):
    """Says a word that a second policy answers."""
    num_tasks = 1
    partner = None
    answers, threads = [], set()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "Say yes.", {}

    def step(self, action):
        self.turn += 1
        answer = ""
        if self.partner is not None:
            from gspo_env.types import Prompt
            start = Prompt(system="Answer.") if self.turn == 1 else None
            answer = self.partner.act("Say no.", prompt=start)
            self.answers.append(answer)
            self.threads.add(threading.current_thread().name)
        right = float(action.strip() == "yes")
        return "Again.", right, self.turn == 2, False, {}

    def expert_action(self, noise=0.0):
        return "yes" if self.np_random.random() < 0.5 else "no"

class Declared(Duel):
    """The same on the event loop."""
    blocking = False

class Asynchronous(Declared):
    """The same with an asynchronous step, which needs a thread whatever it declares."""
    async def step(self, action):
        return super().step(action)
'''


def config():
    return tiny(
        recipe={"imitation_steps": 60, "imitation_learning_rate": 1e-2},
        tasks_per_step=2,
        eval_tasks=2,
        rollout={"max_turn_tokens": 8, "max_context": 128},
    )


@pytest.fixture(autouse=True)
def _folder(tmp_path, in_folder):
    (tmp_path / "duel.py").write_text(GAME)


def game(agent):
    """The class of the agent's environment."""
    return type(next(iter(agent.environments.envs.values())).unwrapped)


@pytest.mark.parametrize("name", ["Duel", pytest.param("Asynchronous", marks=pytest.mark.slow)])
def test_act_inside_step_samples_from_the_policy_that_is_being_trained(name):
    agent = GSPOAgent(env=f"duel.py:{name}", config=config())
    game(agent).partner = agent
    history = agent.train()
    assert [step for step, _ in history][-1] == 2
    assert all(m.get("rollout/env_errors", 0.0) == 0.0 for _, m in history)
    assert len(game(agent).answers) >= 8
    assert "MainThread" not in game(agent).threads


def test_each_thread_has_a_conversation_of_its_own():
    agent = GSPOAgent(env="duel.py:Duel", config=config())
    alone = agent.act("Say yes.", prompt=Prompt(system="3")), agent.act("Say no.")
    barrier = threading.Barrier(4)

    def talk(n):
        first = agent.act("Say yes.", prompt=Prompt(system="3" if n % 2 else str(n)))
        barrier.wait(30)
        return first, agent.act("Say no.")

    with ThreadPoolExecutor(4) as threads:
        talks = list(threads.map(talk, range(4)))
    assert talks[1] == talks[3] == alone
    assert talks[0] != alone
    agent.close()


def test_act_on_the_event_loop_says_to_declare_blocking():
    agent = GSPOAgent(env="duel.py:Declared", config=config())
    agent.warm_up()
    game(agent).partner = agent
    with pytest.raises(RolloutError, match="declare `blocking = True` in the environment"):
        agent.evaluate(2)
    agent.close()


def test_a_request_that_is_not_answered_ends_and_a_second_run_is_refused():
    calls = EngineLoop()

    async def never():
        await asyncio.sleep(60)

    with pytest.raises(EngineError, match=r"not sampled within 0.05 s"):
        calls.wait(never(), 0.05)

    async def outer():
        await asyncio.to_thread(calls.run, never())

    with pytest.raises(ConfigError, match="expected calls of act alone"):
        calls.run(outer())


@pytest.fixture
def saved(tmp_path):
    agent = GSPOAgent(env="duel.py:Duel", config=config())
    agent.save(tmp_path / "saved")
    agent.close()
    return agent


def test_a_frozen_agent_says_what_the_agent_that_was_saved_says(saved):
    frozen = FrozenAgent.load("saved")
    told = Prompt(system="Answer.")
    player = frozen.player(told, temperature=0.0)
    expected = [saved.act("Say yes.", prompt=told), saved.act("Say no.")]
    assert [player.act("Say yes."), player.act("Say no.")] == expected
    saved.close()


def test_many_threads_share_one_frozen_agent_and_its_draws_follow_from_the_seed(saved):
    def talk(seed):
        player, rng = FrozenAgent.load("saved").player(), random.Random(seed)
        return [player(rng, "Say yes."), player(rng, "Say no.")]

    alone = [talk(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(talk, range(6))) == alone
    assert len({str(said) for said in alone}) > 1
    assert FrozenAgent.load("saved") is FrozenAgent.load(Path.cwd() / "saved")


@pytest.mark.parametrize("history", ["keep", "template"])
def test_a_frozen_agent_writes_history_as_its_folder_says(history):
    settings = replace(config(), rewritten_history=history)
    agent = GSPOAgent(env="duel.py:Duel", config=settings)
    agent.save("other")
    agent.close()
    assert FrozenAgent("other").chat.history == history


def test_a_frozen_agent_runs_no_environment_of_its_folder(saved, monkeypatch):
    monkeypatch.setattr(TextEnv, "__init__", lambda *_: pytest.fail("an environment was made"))
    FrozenAgent("saved")
