"""The OpenEnv client against a real server: sessions are freed, and no failure ends a run.

Needs a separate Python environment: `pip install -e '.[test,openenv]'`, `pytest -m openenv`.
"""

import contextlib
import gc
import time

import pytest
from support.jails import serving

from gspo_env.check.environment import check_env
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, ToolServerError
from gspo_env.rollout.failures import is_unscored
from gspo_env.rollout.play import PolicyOutput, play_now
from gspo_env.types import Task

pytestmark = pytest.mark.openenv


@contextlib.contextmanager
def serve(sessions, port=0):
    with serving("openenv_server.py", str(sessions), port=port) as (free_port, _):
        yield f"http://127.0.0.1:{free_port}"


@pytest.fixture(scope="module")
def two():
    """A server with two sessions."""
    with serve(2) as url:
        yield url


def make(url, **kwargs):
    return make_env("gspo/OpenEnv-v0", **({"url": url, "observation": "text"} | kwargs))


def guess(env, seed):
    """Play all digits; return the correct one and the turns."""
    observation, _ = env.reset(seed=seed)
    assert observation == "Guess from 0 to 9."
    for digit in range(10):
        said, reward, terminated, truncated, _ = env.step(str(digit))
        if terminated:
            assert (said, reward, truncated) == ("yes", 1.0, False)
            return digit
        assert (said, reward) == (f"no, after {digit + 1}", 0.0)
    raise AssertionError("no digit was right")


def until_free(env):
    """Reset as soon as the server has a free session; it may notice a closed one late."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return env.reset(seed=0)
        except ToolServerError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_seed_decides_the_game_in_every_session(two):
    one, other = make(two), make(two)
    numbers = [guess(one, seed) for seed in range(6)]
    assert [guess(other, seed) for seed in range(6)] == numbers
    assert len(set(numbers)) > 1
    one.close()
    other.close()


def test_actions_and_observations_in_other_shapes(two):
    env = make(two, action="json", observation="", reset={"highest": 0})
    assert '"text": "Guess from 0 to 0."' in env.reset(seed=0)[0]
    for wrong in ("0", "{", '["message"]', "[" * 10**5):
        assert env.step(wrong)[0].startswith("Error: the action is not valid")
    assert env.step('{"message": "0"}')[1:3] == (1.0, True)
    env.reset(seed=0)
    assert env.step('{"word": "0"}')[2:4] == (False, True)
    env.close()
    loud = make(two, action=lambda t: {"message": t[::-1]}, observation=lambda o: o["text"].upper())
    assert loud.reset(seed=0)[0] == "GUESS FROM 0 TO 9."
    assert loud.step("x")[0] == "NO, AFTER 1"
    loud.close()
    with pytest.raises(ConfigError, match=r"no field 'words', it has .*text"):
        make(two, observation="words").reset(seed=0)
    with pytest.raises(ConfigError, match="url is 'localhost'"):
        make("localhost")


def test_closing_frees_a_session_and_a_reset_takes_one_again(two):
    first, second, third = (make(two) for _ in range(3))
    until_free(first)
    until_free(second)
    with pytest.raises(ToolServerError, match=r"lower rollout\.concurrency"):
        third.reset(seed=0)
    second.close()
    until_free(third)
    with pytest.raises(ToolServerError):
        second.reset(seed=0)
    first.close()
    third.close()
    until_free(second)
    second.close()


def test_a_copy_that_is_forgotten_frees_its_session(two):
    one, two_, third = (make(two) for _ in range(3))
    until_free(one)
    until_free(two_)
    del two_
    gc.collect()
    until_free(third)
    one.close()
    third.close()


def test_what_the_server_fails_to_do_truncates_the_episode_and_the_next_goes_on(two):
    env = make(two, timeout=2.0)
    for action, words in (("crash", "the dice fell off"), ("hang", "Timeout")):
        until_free(env)
        observation, reward, terminated, truncated, info = env.step(action)
        assert observation.startswith("Error")
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert words in info["env_error"]
    assert until_free(env)[0] == "Guess from 0 to 9."
    env.close()


def test_an_end_without_any_reward_is_not_scored_and_one_with_a_reward_is(two):
    env = make(two)

    def play(*actions):
        until_free(env)
        turns = iter(actions)
        return play_now(env, Task(env_id="", seed=0), lambda now: PolicyOutput(text=next(turns)))

    assert is_unscored(play("wait", "quit"))
    assert not is_unscored(play("no digit", "quit"))
    env.close()


def test_a_server_that_dies_and_comes_back_costs_the_episode_alone():
    with serve(2) as url:
        env = make(url, timeout=5.0)
        env.reset(seed=0)
        assert env.step("die")[2:4] == (False, True)
        with pytest.raises(ToolServerError, match="began no episode"):
            env.reset(seed=0)
        with serve(2, int(url.rpartition(":")[2])):
            assert guess(env, 1) == guess(env, 1)
            env.close()


def test_it_keeps_the_contract():
    with serve(4) as url:  # check_env plays two copies at the same time
        check_env(make(url, max_turns=5))
