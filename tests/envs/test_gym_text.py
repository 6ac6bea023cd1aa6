"""Gymnasium environments as text."""

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_env import make_env
from gspo_env.check.environment import check_env
from gspo_env.errors import ConfigError, EnvironmentContractError
from gspo_envs.adapters.gym_text import read_action, write_value

TOY_TEXT = ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"]

SPACES = [
    spaces.Discrete(4),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 5]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(3),
    spaces.Box(-2, 2, (2, 3), np.float64),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Text(5),
    spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float64))),
    spaces.Dict({"gear": spaces.Discrete(5), "hands": spaces.Tuple([spaces.MultiBinary(2)] * 2)}),
]


class Gears(gymnasium.Env[Any, Any]):
    """An environment with nested spaces that answers with its action."""

    observation_space = spaces.Dict({"last": SPACES[-1], "note": spaces.Text(9)})
    action_space = SPACES[-1]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"last": {"gear": 0, "hands": (np.zeros(2, np.int8),) * 2}, "note": "go"}, {}

    def step(self, action):
        return {"last": action, "note": "done"}, 1.0, True, False, {}


class Pixels(Gears):
    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)  # type: ignore[assignment]


class Graphs(Gears):
    action_space = spaces.Graph(spaces.Discrete(2), None)  # type: ignore[assignment]


for example in (Gears, Pixels, Graphs):
    gymnasium.register(id=f"tests/{example.__name__}-v0", entry_point=example)


@pytest.mark.parametrize("env_id", [*TOY_TEXT, "CartPole-v1", "Pendulum-v1", "tests/Gears-v0"])
def test_the_environment_keeps_the_contract(env_id):
    check_env(make_env("gspo/GymText-v0", env=env_id))
    check_env(make_env("gspo/GymText-v0", env=env_id, invalid_steps=True, invalid_reward=-1.0))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_a_space_writes_it_reads_back(space):
    space.seed(0)
    for _ in range(20):
        value = space.sample()
        text = write_value(space, value)
        again = read_action(space, text)
        assert space.contains(again)
        assert write_value(space, again) == text


@settings(max_examples=60)
@given(text=st.text() | st.builds(json.dumps, st.recursive(st.floats() | st.text(), st.lists)))
def test_reading_an_action_never_raises_and_gives_only_elements(text):
    for space in SPACES:
        value = read_action(space, text, ("left", "right"))
        assert value is None or space.contains(value)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        *((spaces.Discrete(4), text) for text in ("4", "true", "1.0", "[1]")),
        *((spaces.MultiDiscrete([2, 5]), text) for text in ("[1, 5]", "[0.5, 1]")),
        *((spaces.Box(-1, 1, (2,)), text) for text in ("[0, NaN]", "[0, 1.5]", "[" * 5000)),
        (spaces.MultiBinary(2), "[1, 2]"),
        (spaces.Box(0, 255, (1,), np.uint8), "[256]"),
        (spaces.Text(3), "long"),
        (spaces.Dict({"a": spaces.Discrete(2)}), '{"b": 1}'),
        (spaces.Tuple((spaces.Discrete(2),)), "[1, 1]"),
    ],
)
def test_what_is_not_an_element_is_not_an_action(space, text):
    assert read_action(space, text) is None


def test_frozen_lake_reads_as_a_map_and_names_its_actions():
    env: Any = make_env("gspo/GymText-v0", env="FrozenLake-v1", is_slippery=False)
    observation, info = env.reset(seed=0)
    assert observation == "@FFF\nFHFH\nFFFH\nHFFG\nYou are at row 0, column 0."
    assert info == {"state_key": "0", "task_key": "0"}
    assert "<action>left|down|right|up</action>" in env.get_wrapper_attr("system_prompt")
    for action in ("down", "DOWN", "2", "<action> 1 </action>", "so: <action>right</action>"):
        observation, reward, terminated, _, info = env.step(action)
        assert (reward, terminated) == (0.0, False)
    assert observation == "SFFF\nFHFH\nFFFH\nHF@G\nYou are at row 3, column 2."
    assert info == {"state_key": "14"}
    result = env.step("right")
    assert result[1:4] == (1.0, True, False)
    assert result[4]["success"] is True
    with pytest.raises(EnvironmentContractError, match="call reset"):
        env.unwrapped.step("right")


def test_taxi_and_blackjack_say_their_state_in_words():
    taxi, _ = make_env("gspo/GymText-v0", env="Taxi-v4").reset(seed=3)
    assert "The taxi is at row 3, column 0. The passenger is at G (row 0, column 4)." in taxi
    assert "@" in taxi.splitlines()[4]
    assert "\x1b" not in taxi
    env = make_env("gspo/GymText-v0", env="Blackjack-v1")
    hand, info = env.reset(seed=3)
    assert hand == "You have 16. The dealer shows 2."
    assert info["state_key"] == "[16, 2, 0]"


def test_falling_off_the_cliff_is_no_success_and_the_goal_is():
    env = make_env("gspo/GymText-v0", env="CliffWalking-v1")
    observation, _ = env.reset(seed=0)
    assert observation.endswith("\nx  C  C  C  C  C  C  C  C  C  C  T\nYou are at row 3, column 0.")
    assert env.step("right")[1:3] == (-100.0, False)
    for action in ["up", *["right"] * 11, "down"]:
        result = env.step(action)
    assert result[1:3] == (-1.0, True)
    assert result[4]["success"] is True


def test_an_unreadable_action_has_its_reward_and_the_environment_waits():
    env = make_env("gspo/GymText-v0", env="FrozenLake-v1", invalid_reward=-0.25, max_turns=3)
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("fly")
    assert observation == "Write one action as <action>left|down|right|up</action>."
    assert (reward, terminated, truncated) == (-0.25, False, False)
    assert info == {"invalid_action": True, "state_key": "0"}
    env.step("fly")
    *_, truncated, info = env.step("fly")
    assert truncated
    assert info["success"] is False


def test_an_unreadable_action_may_be_a_random_step_instead():
    env = make_env("gspo/GymText-v0", env="CliffWalking-v1", invalid_steps=True, invalid_reward=-5)
    rewards, maps = [], set()
    env.reset(seed=0)
    for _ in range(20):
        observation, reward, *_ = env.step("fly")
        rewards.append(reward)
        maps.add(observation)
    assert set(rewards) <= {-6.0, -105.0}
    assert len(maps) > 1


@pytest.mark.parametrize(
    ("name", "arguments", "best"),
    [
        ("FrozenLake-v1", {"is_slippery": False}, 1.0),
        ("CliffWalking-v1", {}, -13.0),
        ("Taxi-v4", {}, None),
    ],
)
def test_the_demonstrator_solves_what_has_a_table_of_transitions(name, arguments, best):
    env: Any = make_env("gspo/GymText-v0", env=name, **arguments)
    for seed in range(10):
        env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            _, reward, *ends, info = env.step(env.get_wrapper_attr("expert_action")())
            total += reward
            ended = any(ends)
        assert info["success"] is True
        assert best is None or total == best


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "NoSuchLake-v1"}, "cannot be made"),
        ({"env": "FrozenLake-v1", "colour": 3}, "cannot be made with"),
        ({"env": "FrozenLake-v1", "max_turns": 0}, "max_turns is 0"),
        ({"env": "CartPole-v1", "action_names": ("left",)}, "expected 2 for Discrete"),
        ({"env": "Pendulum-v1", "action_names": ("left",)}, "expected 0 for Box"),
        ({"env": "tests/Pixels-v0"}, "21168 numbers, at most 1024"),
        ({"env": "tests/Graphs-v0"}, "expected Box, Discrete"),
    ],
)
def test_what_cannot_be_text_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_env("gspo/GymText-v0", **arguments)


class Foreign(gymnasium.Env):
    """Gives a second reward, and observations, of any kind."""

    observation_space = action_space = spaces.Discrete(2)
    reward: Any = 1.0
    first = second = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return self.first, {}

    def step(self, action):
        self.turn += 1
        return self.second, (self.reward if self.turn == 2 else 0.0), self.turn == 2, False, {}


def play_foreign(**fields):
    """The result of the second step."""
    gymnasium.register("test/Foreign-v0", type("Fresh", (Foreign,), fields))
    try:
        env = make_env("gspo/GymText-v0", env="test/Foreign-v0")
        env.reset(seed=0)
        env.step("<action>1</action>")
        return env.step("<action>1</action>")
    finally:
        gymnasium.registry.pop("test/Foreign-v0")


@pytest.mark.parametrize(
    "reward", [1, np.array(1.0), np.array([1.0]), np.array([[1]]), [1.0], np.float32(1.0)]
)
def test_a_reward_may_be_an_array_of_one_number(reward):
    result = play_foreign(reward=reward)
    assert (result[1], type(result[1])) == (1.0, float)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward": None}, "reward of test/Foreign-v0 in step 2 is None, expected a finite number"),
        ({"reward": np.array([1.0, 2.0])}, r"reward .* in step 2 is array\(\[1., 2.\]\)"),
        ({"reward": np.array([None])}, r"reward .* in step 2 is array\(\[None\]"),
        ({"reward": []}, r"reward .* in step 2 is \[\]"),
        ({"reward": float("nan")}, "reward .* in step 2 is nan"),
        ({"reward": "much"}, "reward .* in step 2 is 'much'"),
        ({"reward": {"a": 1}}, r"reward .* in step 2 is \{'a': 1\}"),
        ({"second": None}, r"observation .* in step 1 is None, expected an element of Discrete\(2"),
        ({"first": "x"}, r"observation of test/Foreign-v0 in reset is 'x', expected an element"),
    ],
)
def test_a_result_that_cannot_be_read_is_named_with_its_environment_and_step(fields, words):
    with pytest.raises(EnvironmentContractError, match=words):
        play_foreign(**fields)
