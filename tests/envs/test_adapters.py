"""The adapters against the real packages: `pytest -m adapters` where they are installed."""

import logging
import random
import sys
from typing import Any

import numpy as np
import pytest

from gspo_env import make_env
from gspo_env.check.environment import check_env
from gspo_env.errors import ConfigError, EnvironmentContractError, MissingExtraError
from gspo_envs.adapters.foreign import ForeignEnv, load

adapters = pytest.mark.adapters


def play(env, seed, *actions):
    env.reset(seed=seed)
    return [env.step(action)[:4] for action in actions]


class Dice(ForeignEnv):
    """A careless environment: it draws from both global generators and may raise."""

    def begin(self, seed, options):
        random.seed(seed)
        return str(random.random()), {}

    def act(self, action):
        if action == "crash":
            raise IndexError("no such die")
        return f"{random.random()} {np.random.random()}", 1.0, False, False, {}


def test_private_streams_make_a_careless_package_repeat_and_leave_ours_alone():
    one, two = Dice(), Dice()
    before = random.getstate(), repr(np.random.get_state())
    alone = play(one, 7, "throw", "throw")
    one.reset(seed=7)
    two.reset(seed=8)
    beside = []
    for _ in range(2):
        beside.append(one.step("throw")[:4])
        two.step("throw")
    assert beside == alone
    assert (random.getstate(), repr(np.random.get_state())) == before


def test_a_package_that_raises_on_an_action_ends_the_episode_and_says_so(caplog):
    env = Dice()
    for _ in range(2):
        env.reset(seed=0)
        observation, reward, terminated, truncated, info = env.step("crash")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert "cannot be taken" in observation
    assert info == {"env_error": "IndexError: no such die", "success": False}
    (shown,) = [record for record in caplog.records if "no such die" in record.message]
    assert shown.exc_info is not None
    with pytest.raises(EnvironmentContractError, match="call reset"):
        env.step("again")
    assert env.reset(seed=0)


def test_an_adapter_has_a_limit_of_turns():
    env = Dice(max_turns=2)
    assert [step[3] for step in play(env, 0, "a", "b")] == [False, True]
    with pytest.raises(ConfigError, match="max_turns is 0"):
        Dice(max_turns=0)


def test_a_missing_package_names_its_extra(monkeypatch):
    for name in ("TextArena", "ReasoningGym"):
        extra = "reasoning-gym" if name == "ReasoningGym" else name.lower()
        monkeypatch.setitem(sys.modules, extra.replace("-", "_"), None)
        with pytest.raises(MissingExtraError, match=rf"pip install 'gspo-env\[{extra}\]'"):
            make_env(f"gspo/{name}-v0")


def test_loading_a_package_keeps_our_logging(monkeypatch, tmp_path):
    (tmp_path / "noisy_package.py").write_text(
        "import logging\nlogging.basicConfig(level=1, force=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = logging.root.handlers[:], logging.root.level
    load("noisy_package", "Noisy", "noisy")
    assert (logging.root.handlers, logging.root.level) == before


@adapters
@pytest.mark.parametrize(
    ("env_id", "arguments"),
    [
        ("gspo/TextArena-v0", {}),
        ("gspo/TextArena-v0", {"game": "Minesweeper-v0-small"}),
        ("gspo/TextArena-v0", {"game": "ConnectFour-v0", "players": 2}),
        ("gspo/ReasoningGym-v0", {}),
        ("gspo/ReasoningGym-v0", {"task": "mini_sudoku", "attempts": 4}),
    ],
)
def test_the_adapter_keeps_the_contract(env_id, arguments):
    check_env(env_id) if not arguments else check_env(make_env(env_id, **arguments))


@adapters
def test_a_tower_of_hanoi_is_won_and_paid_at_the_end():
    env = make_env("gspo/TextArena-v0", game="TowerOfHanoi-v0")
    prompt, _ = env.reset(seed=0)
    assert "Tower of Hanoi with 3 disks" in prompt
    moves = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]
    steps = [env.step(f"[{move}]") for move in moves]
    assert [step[1] for step in steps] == [0.0] * 6 + [1.0]
    assert steps[-1][2] is True
    assert steps[-1][4]["success"] is True
    assert "Congratulations" in steps[-1][0]
    assert steps[0][0].startswith("You moved disk 1 from A to C.")
    assert all(prompt not in step[0] for step in steps)


@adapters
def test_textarena_counts_invalid_moves_and_pays_what_is_done():
    env = make_env("gspo/TextArena-v0", game="TowerOfHanoi-v0", num_disks=2)
    steps = play(env, 0, "[B C]", "[B C]")
    assert "invalid move" in steps[0][0]
    assert steps[1][2] is True
    env = make_env("gspo/TextArena-v0", game="GuessTheNumber-v0")
    env.reset(seed=0)
    env.step("nothing")
    info = env.step("nothing")[4]
    assert info == {"success": False, "invalid_move": True, "scored": True}


@adapters
def test_a_game_that_confuses_reward_and_reason_is_still_paid():
    env = make_env("gspo/TextArena-v0", game="ThreeCardMonte-v0")
    env.reset(seed=0)
    env.step("nothing")
    observation, reward, terminated, _, info = env.step("nothing")
    assert (reward, terminated, info["invalid_move"]) == (0.0, True, True)
    assert observation.endswith("Bad action. Use `[k]`.")


def win(rng, observation):
    return "[col 3]"


@adapters
def test_other_players_are_played_by_the_opponent():
    arguments = {"game": "ConnectFour-v0", "players": 2, "opponent": f"{__name__}:win"}
    env = make_env("gspo/TextArena-v0", **arguments)
    steps = play(env, 0, *(f"[col {n}]" for n in (0, 1, 0, 1)))
    assert "[Player 1] [col 3]" in steps[0][0]
    assert steps[-1][1:3] == (-1.0, True)
    with pytest.raises(ConfigError, match="opponent is 'no_module:play'"):
        make_env("gspo/TextArena-v0", game="Nim-v0", players=2, opponent="no_module:play")


@adapters
@pytest.mark.parametrize(
    ("env_id", "arguments", "message"),
    [
        ("gspo/TextArena-v0", {"game": "TowerOfHanoy-v0"}, "did you mean TowerOfHanoi"),
        ("gspo/TextArena-v0", {"game": "Nim-v0"}, "cannot be played by 1"),
        ("gspo/TextArena-v0", {"game": "Nim-v0", "x": 1}, "arguments {'x': 1}"),
        ("gspo/ReasoningGym-v0", {"task": "chain_sums"}, "did you mean chain_sum"),
        ("gspo/ReasoningGym-v0", {"min_terms": -1}, "cannot be made with"),
        ("gspo/ReasoningGym-v0", {"attempts": 0}, "attempts is 0"),
    ],
)
def test_what_cannot_be_made_is_refused(env_id, arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_env(env_id, **arguments)


@adapters
def test_word_games_name_the_word_lists_they_need(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: False)
    with pytest.raises(MissingExtraError, match=r"python -m nltk.downloader words"):
        make_env("gspo/TextArena-v0", game="Wordle-v0")


@adapters
def test_reasoning_gym_pays_what_an_attempt_adds():
    env: Any = make_env("gspo/ReasoningGym-v0", task="chain_sum", attempts=4)
    env.reset(seed=0)
    right = env.get_wrapper_attr("expert_action")()
    answer = right.removeprefix("<answer>").removesuffix("</answer>")
    partial = f"<answer>it is {answer}, surely</answer>"
    observation, reward, terminated, *_ = env.step("no idea")
    assert observation == "Write your answer as <answer>answer</answer>. 3 attempts left."
    assert (reward, terminated) == (0.0, False)
    observation, part, *_ = env.step(partial)
    assert 0 < part < 1
    assert observation == f"That is not right (score {part:.2f}). 2 attempts left."
    assert env.step(partial)[1] == 0.0
    observation, rest, terminated, _, info = env.step(right)
    assert (observation, terminated, info["success"]) == ("correct", True, True)
    assert part + rest == pytest.approx(1.0)


@adapters
def test_an_answer_that_breaks_a_scorer_scores_nothing(monkeypatch):
    env: Any = make_env("gspo/ReasoningGym-v0", task="countdown")
    env.reset(seed=0)

    def explode(answer, entry):
        raise SyntaxError(answer)

    monkeypatch.setattr(env.unwrapped._data, "score_answer", explode)
    _, reward, terminated, _, info = env.step("<answer>((</answer>")
    assert (reward, terminated) == (0.0, True)
    assert info == {"scorer_error": "SyntaxError: ((", "success": False}
