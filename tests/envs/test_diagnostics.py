"""Each diagnostic environment has the property of its name."""

from __future__ import annotations

import pytest
from gymnasium.utils.env_checker import check_env

from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentContractError

NAMES = ("Additive", "KeyDoor", "Recurring", "VariableLength", "Distractor", "Misleading")


def play(env, words, seed=0):
    env.reset(seed=seed)
    steps = []
    for word in words:
        steps.append(env.step(word))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


@pytest.fixture(params=NAMES)
def env(request):
    return make_env(f"gspo/{request.param}-v0")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_checker_accepts(env):
    check_env(env.unwrapped, skip_render_check=True)


def test_the_demonstrator_succeeds_without_noise_and_rewards_are_its_own(env):
    for seed in range(30):
        env.reset(seed=seed)
        ended = False
        while not ended:
            _, _, terminated, truncated, info = env.step(env.unwrapped.expert_action())
            ended = terminated or truncated
        assert info["success"]
    with pytest.raises(EnvironmentContractError, match="outside an episode"):
        env.step("x")


def test_the_same_seed_and_actions_give_the_same_episode(env):
    words = [env.unwrapped.words[n % len(env.unwrapped.words)] for n in range(8)]
    assert play(env, words, seed=4) == play(env, words, seed=4)


def test_additive_turns_pay_on_their_own_and_have_any_number():
    for turns in (1, 2, 4, 8, 16):
        env = make_env("gspo/Additive-v0", turns=turns)
        env.reset(seed=0)
        rewards = []
        for turn in range(turns):
            word = env.unwrapped.expert_action() if turn % 2 == 0 else "none"
            rewards.append(env.step(word)[1])
        assert rewards == [0.0 if k % 2 else 1 / turns for k in range(turns)]


def test_only_the_key_opens_the_door_and_leaving_it_pays_at_once():
    env = make_env("gspo/KeyDoor-v0")
    assert [s[1] for s in play(env, ["take", "open", "open", "open"])] == [0, 0, 0, 1]
    assert [s[1] for s in play(env, ["leave", "open", "open", "open"])] == [0.1, 0, 0, 0]


def test_recurring_rooms_have_the_same_key_at_other_turns():
    env = make_env("gspo/Recurring-v0")
    keys = [s[4]["state_key"] for s in play(env, ["left", "right"] * 4, seed=1)]
    assert len(set(keys)) < len(keys)


def test_the_policy_decides_how_long_an_episode_is():
    env = make_env("gspo/VariableLength-v0")
    assert [len(play(env, ["go"] * n + ["stop"])) for n in (0, 2, 4)] == [1, 3, 5]
    assert play(env, ["go"] * 6)[-1][3]


def test_distractors_are_noise_of_mean_zero():
    env = make_env("gspo/Distractor-v0")
    noise = [step[1] for seed in range(100) for step in play(env, ["red"] * 8, seed)[1::2]]
    assert set(noise) == {0.5, -0.5}
    assert abs(sum(noise)) / len(noise) < 0.1


def test_the_bait_pays_more_at_once_and_less_in_the_end():
    env = make_env("gspo/Misleading-v0")
    baited = play(env, ["bait"] * 3)
    worked = play(env, ["work"] * 3)
    assert baited[0][1] > worked[0][1]
    assert sum(s[1] for s in baited) < sum(s[1] for s in worked)
    assert not baited[-1][4]["success"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("Additive", {"turns": 0}), ("KeyDoor", {"turns": 1}), ("Recurring", {"rooms": 2})],
)
def test_impossible_sizes_are_refused(name, arguments):
    with pytest.raises(ConfigError, match="expected"):
        make_env(f"gspo/{name}-v0", **arguments)
