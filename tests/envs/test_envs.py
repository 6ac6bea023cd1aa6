"""The built-in environments."""

import os
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from gspo_env import format_tool_call, make_env
from gspo_env.env.info import ParsedStep, parse_reset, parse_step
from gspo_env.env.registration import _BUILTIN
from gspo_env.errors import ConfigError
from gspo_env.sandbox import find_missing
from stress import fuzz

TASKS = ("Calculator", "Dialogue", "GuessNumber", "Lookup", "SQL", "Story", "Wordle")
IDS = [f"gspo/{name}-v0" for name in TASKS]


def play(env, seed, noise=0.0):
    """Play one episode with the scripted player."""
    prompt, _ = parse_reset("x", env.reset(seed=seed))
    steps: list[ParsedStep] = []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        steps.append(parse_step("x", env.step(env.unwrapped.expert_action(noise))))
    return prompt, steps


def test_a_vector_of_environments_has_their_texts_or_is_refused():
    one = gymnasium.make("gspo/Wordle-v0").reset(seed=1)[0]
    for mode, options in (("sync", {}), ("async", {"shared_memory": False})):
        several = gymnasium.make_vec("gspo/Wordle-v0", 2, mode, vector_kwargs=options)
        assert several.reset(seed=[1, 2])[0] == (one, one)
        texts = several.step(("<guess>crane</guess>", "<guess>\N{SNOWMAN}</guess>"))[0]
        assert texts[0].startswith("crane ")
        several.close()
    with pytest.raises(ConfigError, match=r'vector_kwargs=."shared_memory": False.'):
        gymnasium.make_vec("gspo/Wordle-v0", 2, "async")


@pytest.fixture(params=IDS)
def env(request):
    return make_env(request.param)


def test_the_demonstrator_always_succeeds_without_noise(env):
    for seed in range(50):
        _, steps = play(env, seed)
        assert steps[-1][2]
        assert steps[-1][4].success is True
        assert steps[-1][4].episodic_reward == 1.0
        assert all(step[4].state_key is not None for step in steps)
        assert all(step[4].success is None for step in steps[:-1])


@pytest.mark.parametrize("env_id", [*IDS, "gspo/KeyDoor-v0", "gspo/GymText-v0"])
def test_gymnasium_makes_and_checks_an_environment_without_a_render_mode(env_id):
    env = gymnasium.make(env_id)
    assert env.render_mode is None
    check_env(env.unwrapped, skip_render_check=False)
    with pytest.raises((TypeError, ConfigError), match="render_mode"):
        gymnasium.make(env_id, render_mode="human")


def test_lookup_pays_each_right_hop_once_and_the_answer():
    env: Any = make_env("gspo/Lookup-v0")
    prompt, _ = env.reset(seed=5, options={"hops": 2})
    start = prompt.split('"')[1]
    assert prompt == f'Follow 2 links from "{start}".'

    def look(key):
        result: tuple[str, float] = env.step(format_tool_call("lookup", {"key": key}))[:2]
        return result

    assert look("zebra") == ("unknown key", 0.0)
    middle, reward = look(start)
    assert reward == 0.2
    assert look(start) == (middle, 0.0)
    end, reward = look(middle)
    assert reward == 0.2
    assert look(end)[1] == 0.0
    result = env.step(f"so <answer>{end}</answer>")
    assert result[:4] == ("correct", 1.0, True, False)
    assert result[4] == {"state_key": f"{end}:0", "success": True, "episodic_reward": 1.0}


@pytest.mark.parametrize("action", ["", "amber", "<answer>zebra</answer>", "<answer>"])
def test_a_wrong_or_missing_answer_ends_without_reward(action):
    for env_id in ("gspo/Lookup-v0", "gspo/Calculator-v0"):
        env = make_env(env_id)
        env.reset(seed=0)
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated) == (0.0, True)
        assert (info["success"], info["episodic_reward"]) == (False, 0.0)


def test_calculator_expressions_have_their_value_and_pay_each_step():
    env = make_env("gspo/Calculator-v0")
    for seed in range(50):
        prompt, steps = play(env, seed)
        value = eval(prompt.removeprefix("Compute ").removesuffix("."))
        assert steps[-2][0] == str(value)
        assert [step[1] for step in steps] == [0.2] * (len(steps) - 1) + [1.0]
        assert 2 <= len(steps) - 1 <= 4


def test_guesses_pay_by_what_they_rule_out_so_that_slow_ones_earn_no_more():
    env: Any = make_env("gspo/GuessNumber-v0", high=8)
    seeds = iter(range(100))
    while env.unwrapped.__dict__.get("_number") != 7:
        env.reset(seed=next(seeds))
    seed = next(seeds) - 1
    assert env.step("<guess>4</guess>")[:2] == ("higher", pytest.approx(0.05))
    assert env.step("<guess>4</guess>")[:2] == ("higher", 0.0)
    assert env.step("<guess>²</guess>")[1] == 0.0
    assert env.step("<guess>9</guess>")[:2] == ("lower", 0.0)
    assert env.step("<guess>7</guess>")[:3] == ("correct", pytest.approx(1.1), True)
    env.reset(seed=seed)
    slow = [env.step(f"<guess>{guess}</guess>")[1] for guess in range(1, 8)]
    assert sum(slow) == pytest.approx(1.15)  # as any that finds it


@pytest.mark.parametrize(
    ("env_id", "options"),
    [("gspo/Lookup-v0", {"hops": 99}), ("gspo/Calculator-v0", {"operations": "2"})],
)
def test_impossible_options_are_an_error(env_id, options):
    with pytest.raises(ConfigError, match="expected 1 to"):
        make_env(env_id).reset(seed=0, options=options)


KEYED = {
    "gspo/Calculator-v0": {"operations": 1},
    "gspo/Additive-v0": {"turns": 2},
    "gspo/GymText-v0": {"env": "FrozenLake-v1", "is_slippery": False},
}
NAMES = ("Dialogue", "GuessNumber", "KeyDoor", "Lookup", "SQL", "Story")
NAMES += ("VariableLength", "Wordle")


@pytest.mark.parametrize("env_id", [*KEYED, *(f"gspo/{name}-v0" for name in NAMES)])
def test_seeds_have_the_same_task_key_if_and_only_if_they_play_the_same_task(env_id):
    env: Any = make_env(env_id, **KEYED.get(env_id, {}))
    seeds: dict[str, list[int]] = {}
    for seed in range(80):
        seeds.setdefault(env.reset(seed=seed)[1]["task_key"], []).append(seed)
    episodes = [{repr(play(env, seed)) for seed in same[:5]} for same in list(seeds.values())[:20]]
    assert all(len(same) == 1 for same in episodes)
    assert len(set().union(*episodes)) == len(episodes)


@pytest.mark.parametrize(
    ("env_id", "arguments"),
    [
        ("gspo/GuessNumber-v0", {"high": 9}),
        ("gspo/VariableLength-v0", {}),
        ("gspo/Additive-v0", {"turns": 1}),
        ("gspo/Calculator-v0", {"operations": 1}),
        ("gspo/KeyDoor-v0", {}),
        ("gspo/GymText-v0", {"env": "CliffWalking-v1"}),
    ],
)
def test_a_declared_number_of_tasks_is_the_number_of_keys(env_id, arguments):
    env: Any = make_env(env_id, **arguments)
    number = env.get_wrapper_attr("num_tasks")
    keys = {env.reset(seed=seed)[1]["task_key"] for seed in range(16 * number + 20)}
    assert len(keys) == number


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 + 34", "46"),
        (" 2-9 ", "-7"),
        ("7 * 5", "expected two numbers with + or -"),
        ("1" * 99 + " + 1", "expected two numbers with + or -"),
    ],
)
def test_the_calculator_of_a_story_computes_sums_of_two_numbers_only(expression, result):
    env: Any = make_env("gspo/Story-v0", changes=(1, 8))
    env.reset(seed=1)
    observation, reward, *_ = env.step(format_tool_call("calculate", {"expression": expression}))
    assert (observation, reward) == (result, 0.0)


@pytest.mark.parametrize("env_id", sorted(_BUILTIN))
def test_any_actions_give_the_same_sound_episode_twice(env_id):
    if "Python" in env_id and find_missing() and os.environ.get("GSPO_ENV_NO_SANDBOX") == "1":
        pytest.skip("the Python tool is NOT tested, GSPO_ENV_NO_SANDBOX is set")
    if not fuzz.play(env_id, count=100, seed=0):
        pytest.skip(f"{env_id} cannot be made bare")
