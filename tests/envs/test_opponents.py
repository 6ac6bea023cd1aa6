"""Games for several players: against a function, a trained model, or the policy itself."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gspo_env import make_env
from gspo_env.check import check_env
from gspo_env.config import Config
from gspo_env.env.registration import load_agent
from gspo_env.errors import ConfigError
from gspo_env.recipes.tiny import Tiny
from gspo_env.registry import find
from gspo_env.seeding import HELD_OUT
from gspo_envs.adapters.textarena import load_opponent, random_opponent

ROOT = Path(__file__).parents[2]
adapters = pytest.mark.adapters
NIM = {"game": "Nim-v0", "players": 2, "piles": [1, 2]}


def first_legal(rng, observation):
    """Takes one object of the first pile that is left."""
    piles = observation.rpartition("Current Pile:")[2].split("pile ")[1:]
    return next(f"[{text[0]} 1]" for text in piles if text[3] != "0")


def play(env, seed, *actions):
    """What reset and the steps return."""
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


def test_what_is_no_opponent_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"opponent is 'runs/X'; expected 'random', the folder"):
        load_opponent("runs/X")
    assert load_opponent("random")[0]() is random_opponent
    assert load_opponent(f"{__name__}:first_legal")[1] is False


@adapters
def test_with_self_the_policy_plays_every_player_in_turn():
    env = make_env("gspo/TextArena-v0", opponent="self", **NIM)
    (first, info), *steps = play(env, 0, "[0 1]", "[1 1]", "[1 1]")
    assert info["agent"] == "player_0"
    assert "Welcome to Nim, Player 0!" in first
    assert "Welcome to Nim, Player 1!" in steps[0][0]
    assert [step[4].get("agent") for step in steps] == ["player_1", "player_0", None]
    assert [step[1] for step in steps] == [0.0, 0.0, 1.0]
    assert steps[-1][4]["reward_parts"] == {"player_0": 1.0, "player_1": -1.0}
    assert env.get_wrapper_attr("blocking") is False
    assert env.get_wrapper_attr("rewards_by_agent") is True
    assert make_env("gspo/TextArena-v0", **NIM).get_wrapper_attr("rewards_by_agent") is False
    with pytest.raises(ConfigError, match="opponent is 'self' and players 1"):
        make_env("gspo/TextArena-v0", opponent="self")


@adapters
def test_evaluations_may_have_another_opponent():
    env = make_env("gspo/TextArena-v0", opponent="self", eval_opponent=first_legal, **NIM)
    assert "agent" in env.reset(seed=HELD_OUT - 1)[1]
    assert "agent" not in env.reset(seed=HELD_OUT)[1]
    observation, reward, terminated, *_ = env.step("[1 1]")
    assert "[Player 1] [0 1]" in observation
    assert not terminated
    observation, reward, terminated, _, info = env.step("[1 1]")
    assert (reward, terminated, "reward_parts" in info) == (1.0, True, False)


@adapters
def test_the_example_keeps_the_contract(monkeypatch):
    monkeypatch.chdir(ROOT)
    check_env("examples/self_play.py:Nim")
    for seed in range(HELD_OUT, HELD_OUT + 3):
        env = make_env("examples/self_play.py:Nim")
        env.reset(seed=seed)
        done = False
        while not done:
            *_, done, _, info = env.step(env.get_wrapper_attr("expert_action")())
        assert not info["invalid_move"]


@adapters
def test_environments_wait_for_their_opponents_at_the_same_time():
    both = threading.Barrier(2)

    def slow(rng, observation):
        both.wait(20)
        return first_legal(rng, observation)

    envs = [make_env("gspo/TextArena-v0", opponent=slow, **NIM) for _ in range(2)]
    before = random.getstate()
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda env: play(env, 3, "[1 1]", "[1 1]"), envs)
    assert one == two
    assert one[-1][1] == 1.0
    assert random.getstate() == before


@adapters
def test_a_folder_is_an_opponent_that_repeats_with_the_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shape = Tiny(
        hidden_size=32, demonstrations=60, imitation_steps=30, imitation_learning_rate=1e-2
    )
    limits = {"max_turn_tokens": 8, "max_context": 1024}
    by_player = find("advantage", "by_agent")(missing=-1.0)
    config = Config.from_recipe(shape, rollout=limits, advantage=by_player)
    agent = load_agent("gspo")(env="examples/self_play.py:Nim", config=config)
    agent.warm_up()
    agent.save(tmp_path / "rival")

    def game(seed):
        env = make_env("gspo/TextArena-v0", opponent=str(tmp_path / "rival"), **NIM)
        assert env.get_wrapper_attr("blocking") is True
        return play(env, seed, "[1 1]")

    alone = [game(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(game, range(6))) == alone
    assert len({str(steps) for steps in alone}) > 1
    assert any("Player 1 removes" in steps[1][0] for steps in alone)
