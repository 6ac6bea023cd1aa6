"""Each diagnostic environment has the property of its name."""

from pathlib import Path

import pytest

from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentContractError

STUDY = Path(__file__).parents[2] / "studies" / "diagnostics.py"
RECURRING, DISTRACTOR, MISLEADING, DENSITY = (
    f"{STUDY}:{name}Env" for name in ("Recurring", "Distractor", "Misleading", "Density")
)
OURS = ("gspo/Additive-v0", "gspo/KeyDoor-v0", "gspo/VariableLength-v0")


def play(env, words, seed=0):
    env.reset(seed=seed)
    steps = []
    for word in words:
        steps.append(env.step(word))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


@pytest.fixture(params=[*OURS, RECURRING, DISTRACTOR, MISLEADING, DENSITY])
def env(request):
    return make_env(request.param)


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
    env = make_env(RECURRING)
    keys = [s[4]["state_key"] for s in play(env, ["left", "right"] * 4, seed=1)]
    assert len(set(keys)) < len(keys)


def test_the_policy_decides_how_long_an_episode_is():
    env = make_env("gspo/VariableLength-v0")
    assert [len(play(env, ["go"] * n + ["stop"])) for n in (0, 2, 4)] == [1, 3, 5]
    assert play(env, ["go"] * 6)[-1][3]


def test_distractors_are_noise_of_mean_zero():
    env = make_env(DISTRACTOR)
    noise = [step[1] for seed in range(100) for step in play(env, ["red"] * 8, seed)[1::2]]
    assert set(noise) == {0.5, -0.5}
    assert abs(sum(noise)) / len(noise) < 0.1


def test_the_bait_pays_more_at_once_and_less_in_the_end():
    env = make_env(MISLEADING)
    baited = play(env, ["bait"] * 3)
    worked = play(env, ["work"] * 3)
    assert baited[0][1] > worked[0][1]
    assert sum(s[1] for s in baited) < sum(s[1] for s in worked)
    assert not baited[-1][4]["success"]


@pytest.mark.parametrize(
    ("env_id", "arguments"),
    [
        (OURS[0], {"turns": 0}),
        (OURS[1], {"turns": 1}),
        (RECURRING, {"rooms": 2}),
        (DENSITY, {"turns": 0}),
        (DENSITY, {"density": 0.0}),
        (DENSITY, {"noise": -1.0}),
        (DENSITY, {"delay": 16}),
    ],
)
def test_impossible_sizes_are_refused(env_id, arguments):
    with pytest.raises(ConfigError, match="expected"):
        make_env(env_id, **arguments)


@pytest.mark.parametrize("density", [1 / 16, 1 / 4, 1 / 2, 1.0])
def test_the_density_is_the_share_of_turns_whose_word_changes_the_expected_reward(density):
    env = make_env(DENSITY, turns=16, density=density, noise=0.0)
    for seed in range(3):
        env.reset(seed=seed)
        decisions = env.unwrapped.decisions
        assert len(decisions) == 16 * density
        right = [env.unwrapped.expert_action()]
        for _ in range(15):
            env.step(right[-1])
            right.append(env.unwrapped.expert_action())
        steps = play(env, right, seed)
        assert [k for k, step in enumerate(steps) if step[1]] == list(decisions)
        assert sum(step[1] for step in steps) == pytest.approx(1.0)
        wrong = [{"red": "green"}.get(word, "red") for word in right]
        assert not any(step[1] for step in play(env, wrong, seed))


def test_routine_turns_pay_noise_of_mean_zero_that_no_word_escapes():
    env = make_env(DENSITY, turns=8, density=0.25, noise=0.5)
    assert play(env, ["red"] * 8, 7) != play(env, ["gold"] * 8, 7)
    routine = [k for k in range(8) if k not in env.unwrapped.decisions]
    for words in (["red"] * 8, ["blue"] * 8, ["none of them"] * 8):
        noise = [play(env, words, seed)[k][1] for seed in range(100) for k in routine]
        assert set(noise) == {0.25, -0.25}
        assert abs(sum(noise)) / len(noise) < 0.04


def test_a_delay_moves_rewards_and_keeps_their_sum():
    for delay in (0, 1, 5, 15):
        env = make_env(DENSITY, turns=16, density=0.25, noise=0.0, delay=delay)
        env.reset(seed=3)
        rewards, ended = [], False
        while not ended:
            step = env.step(env.unwrapped.expert_action())
            rewards.append(step[1])
            ended = step[2]
        assert step[4]["success"]
        paid = [min(k + delay, 15) for k in env.unwrapped.decisions]
        wanted = [0.25 * paid.count(k) for k in range(16)]
        assert rewards == pytest.approx(wanted)


def test_demonstrations_with_slips_teach_no_decision():
    env = make_env(DENSITY, turns=4, density=1.0)
    right = 0
    for seed in range(200):
        env.reset(seed=seed)
        for _ in range(4):
            wanted = env.unwrapped.expert_action()
            right += env.unwrapped.expert_action(0.1) == wanted
            env.step("red")
    assert abs(right / 800 - 0.25) < 0.05
