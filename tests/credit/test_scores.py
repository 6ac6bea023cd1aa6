"""Which rewards the estimators learn from: those of the turns, the outcome, or their sum."""

import json
import re
import tomllib
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.credits import TASK, episode
from support.runs import tiny

from gspo_agents.gspo import GSPOAgent
from gspo_env.check.environment import check_env
from gspo_env.credit import Estimator, ScoreChoice, estimate, turn_rewards
from gspo_env.credit.scores import Scores, contents
from gspo_env.errors import ConfigError, EnvironmentCheckError, EnvironmentContractError
from gspo_env.registry import BUILTIN, find
from gspo_env.types import Group, Score, StepInfo, StopReason

RECIPE = {
    **{"hidden_size": 16, "layers": 1, "heads": 2},
    **{"imitation_steps": 80, "imitation_learning_rate": 2e-2},
}
ESTIMATORS = sorted({*BUILTIN["advantage"]} - {"by_agent", "distillation", "parts"})

LATER = {"returns_to_go": {"gamma": 0.5}, "normalize_then_accumulate": {}, "turn_plus_outcome": {}}
"""Estimators that learn from episodes whose equal rewards come at different turns."""


COIN = """
from gspo_env import TextEnv

class Coin(TextEnv):
    \"\"\"Two words; heads as the second one is rewarded by the outcome alone.\"\"\"
    blocking = False
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "flip", {}
    def step(self, action):
        self.turn += 1
        if self.turn < 2:
            return "again", 0.0, False, False, {}
        return "", 0.0, True, False, {"episodic_reward": float(action.strip() == "heads")}
    def expert_action(self, noise=0.0):
        return str(self.np_random.choice(["heads", "tails"]))

class Opposed(Coin):
    \"\"\"Tails is rewarded by its turn, heads by the outcome.\"\"\"
    def step(self, action):
        said, _, *flags, info = super().step(action)
        return said, 0.3 * (action.strip() == "tails"), *flags, info

class Declared(Opposed):
    \"\"\"Declares the outcome.\"\"\"
    credit_score = "outcome"

class Wrong(Coin):
    \"\"\"Declares what does not exist.\"\"\"
    credit_score = "episode"

"""


def played(rewards, outcome=None, stop=StopReason.TERMINATED):
    """An episode whose last step gives its own outcome, unless that is None."""
    bare = episode(*rewards, outcome=outcome, stop=stop)
    if not rewards:
        return bare
    last = replace(bare.turns[-1], info=StepInfo(episodic_reward=outcome))
    return replace(bare, turns=(*bare.turns[:-1], last))


def group(*episodes, **changes):
    return Group(task=TASK, episodes=episodes, **changes)


def train(tmp_path, source, name, **changes):
    (tmp_path / "mine.py").write_text(source)
    settings = {"steps": 1, "eval_tasks": 16, "rollout": {"max_turn_tokens": 4}, **changes}
    agent = GSPOAgent(config=tiny(env=f"{tmp_path}/mine.py:{name}", recipe=RECIPE, **settings))
    return agent, agent.train()


def last_turns(name, episodes, score):
    """The advantage of the last turn of each episode."""
    rows = find("advantage", name)().advantages(group(*episodes, score=score))
    return [row[-1] for row in rows]


OUTCOMES = st.lists(st.floats(-5, 5).map(lambda value: round(value, 2)), min_size=2, max_size=6)
LENGTHS = st.integers(1, 4)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(OUTCOMES, LENGTHS)
def test_the_episode_with_the_better_outcome_gets_the_higher_advantage(name, outcomes, turns):
    episodes = [played([0.0] * turns, outcome) for outcome in outcomes]
    values = last_turns(name, episodes, "outcome")
    for one, better in zip(outcomes, values, strict=True):
        for other, worse in zip(outcomes, values, strict=True):
            assert one <= other or better > worse + 1e-9


@pytest.mark.parametrize("name", ESTIMATORS)
@given(OUTCOMES, st.lists(LENGTHS, min_size=6, max_size=6))
def test_a_reward_at_the_end_is_the_same_as_a_reward_and_as_an_outcome(name, outcomes, lengths):
    by_turn = [played([0.0] * (k - 1) + [o]) for o, k in zip(outcomes, lengths, strict=False)]
    by_outcome = [played([0.0] * k, o) for o, k in zip(outcomes, lengths, strict=False)]
    estimator = find("advantage", name)()
    want = estimator.advantages(group(*by_turn, score="turns"))
    cases = [(by_turn, "outcome"), (by_turn, "sum"), (by_outcome, "outcome"), (by_outcome, "sum")]
    for episodes, score in cases:
        if name == "turn_plus_outcome" and episodes is by_outcome:
            continue  # it reads both channels
        rows = estimator.advantages(group(*episodes, score=score))
        for row, expected in zip(rows, want, strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-9)


@given(st.lists(st.lists(st.floats(-1, 1), max_size=3), max_size=5), st.booleans())
def test_the_rewards_add_up_to_the_return_the_outcome_or_both(rows, own):
    for number, rewards in enumerate(rows):
        one = played(rewards, float(number) if own and rewards else None)
        totals = {score: turn_rewards(one, score).sum() for score in get_args(Score)}
        assert turn_rewards(one, "turns").tolist() == rewards
        assert totals["outcome"] == pytest.approx(one.outcome if rewards else 0.0)
        both = sum(rewards) + (one.outcome if own and rewards else 0.0)
        assert totals["sum"] == pytest.approx(both)


def test_a_cut_episode_counts_with_the_outcome_that_the_environment_declares():
    cut = episode(0.2, 0.2, stop=StopReason.MAX_TURNS, outcome=-1.0)
    assert turn_rewards(cut, "turns").tolist() == [0.2, 0.2]
    assert turn_rewards(cut, "outcome").tolist() == [0.0, -1.0]
    assert turn_rewards(cut, "sum").tolist() == [0.2, -0.8]
    empty = episode(stop=StopReason.MAX_CONTEXT, outcome=-1.0)
    assert all(turn_rewards(empty, score).shape == (0,) for score in get_args(Score))


def test_a_cut_episode_without_an_outcome_of_its_own_is_paid_once():
    for stop in (StopReason.MAX_TURNS, StopReason.TRUNCATED, StopReason.TERMINATED):
        assert turn_rewards(episode(0.2, 0.4, stop=stop), "sum").tolist() == [0.2, 0.4]
        declared = episode(0.2, 0.4, stop=stop, outcome=0.6)
        assert turn_rewards(declared, "sum").tolist() == pytest.approx([0.2, 1.0])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_to_be_cut_never_pays_where_the_outcome_is_trained_on(name):
    """The value after a truncation must not be added to the outcome of a cut episode."""
    cut = episode(0.0, stop=StopReason.TRUNCATED, outcome=0.0)
    finished = [played([0.0, 0.0], 1.0) for _ in range(3)]
    rows = find("advantage", name)(scale="none").advantages(group(cut, *finished, score="outcome"))
    assert rows[0][-1] < 0


def test_an_error_enters_no_statistic_and_decides_nothing():
    failed = played([0.5], 9.0, stop=StopReason.ERROR)
    assert contents([failed]) == (False, False)
    good = [played([0.0], 1.0), played([0.0], 0.0)]
    credit = estimate([group(*good, failed)], find("advantage", "returns_to_go")(scale="none"))
    assert [row.tolist() for row in credit.advantages[0]] == [[1.0], [-1.0], [0.0]]


def seen(*episodes, score=None):
    choice = ScoreChoice("a/B-v0", score)
    choice.see(episodes)
    return choice


@pytest.mark.parametrize(
    ("episodes", "score", "reason"),
    [
        ([played([0.0, 0.0], 0.0)], "outcome", "no turn has a reward"),
        ([played([0.0, 0.1])], "turns", "no episode has an outcome of its own"),
        ([played([0.0, 0.1], 0.0)], "turns", "mean sum of an episode 0.1.*mean 0"),
        ([played([0.0]), played([0.0], 0.0)], "outcome", "no turn has a reward"),
        ([played([0.0])], None, "no turn has had a reward"),
        ([], None, "no turn has had a reward"),
    ],
)
def test_the_first_episodes_decide_by_what_they_contain_and_not_by_its_value(
    episodes, score, reason
):
    choice = seen(*episodes)
    assert choice.score == score
    assert re.search(reason, choice.reason)


def test_nothing_is_decided_until_there_is_something_and_then_it_is_kept(caplog):
    choice = ScoreChoice("a/B-v0")
    assert not choice.see([played([0.0])])
    assert choice.see([played([0.0], 1.0)])
    assert choice.score == "outcome"
    assert not caplog.records
    for _ in range(2):
        assert not choice.see([played([0.2], 1.0)])
    assert choice.score == "outcome"
    (warning,) = caplog.messages
    assert "a/B-v0 now has rewards of turns" in warning
    assert "keeps the score 'outcome'" in warning


def test_both_channels_are_warned_of_once_with_both_means(caplog):
    choice = seen(played([0.5, 0.5], 0.0), played([0.0, 0.0], 1.0))
    choice.see([played([0.5, 0.5], 0.0)])
    (warning,) = caplog.messages
    assert choice.score == "turns"
    assert "mean sum of an episode 0.5)" in warning
    assert "(mean 0.5)" in warning
    assert "credit_score" in warning


@pytest.mark.parametrize("score", get_args(Score))
def test_a_given_score_is_kept_without_a_word(score, caplog):
    assert seen(played([0.5], 0.0), score=score).score == score
    assert not caplog.records


def test_the_sum_is_refused_without_an_outcome_of_its_own():
    with pytest.raises(ConfigError, match="'sum', but the episodes of a/B-v0 have no outcome"):
        seen(played([0.5]), score="sum")
    assert seen(played([0.5], stop=StopReason.MAX_TURNS), score="sum").score == "sum"


def test_all_groups_together_decide_where_nobody_else_has():
    sparse = group(played([0.0], 1.0), played([0.0], 0.0))
    dense = group(played([0.1], 1.0), played([0.3], 0.0))
    estimator = find("advantage", "returns_to_go")(scale="none")
    alone = estimate([sparse], estimator).advantages
    assert [row.tolist() for row in alone[0]] == [[1.0], [-1.0]]
    both = estimate([sparse, dense], estimator).advantages
    assert [row.tolist() for row in both[0]] == [[0.0], [0.0]]


def saved(agent):
    """The score that a run and its model were saved with."""
    note = json.loads((agent.folder / "model" / "gspo_env.json").read_text())
    both = (agent.folder / "config.toml").read_text(), note["config"]
    return [tomllib.loads(text)["credit"]["score"] for text in both]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "score"),
    [
        ("Opposed", {}, "turns"),
        ("Declared", {"credit": {"score": "sum"}}, "sum"),
        ("Opposed", {"advantage": "turn_plus_outcome"}, "auto"),
    ],
)
def test_the_score_of_a_run_is_saved_with_it(name, changes, score, tmp_path, in_folder, caplog):
    agent, _ = train(tmp_path, COIN, name, **changes)
    assert saved(agent) == [score, score]
    assert GSPOAgent.load(agent.folder).config.credit.score == score
    warned = [text for text in caplog.messages if "rewards of its turns" in text]
    assert len(warned) == (name == "Opposed" and "advantage" not in changes)


def test_a_score_is_not_taken_over_to_another_environment(tmp_path, in_folder):
    agent, _ = train(tmp_path, COIN, "Coin")
    other = GSPOAgent.load(agent.folder, f"{tmp_path}/mine.py:Opposed")
    assert other.config.credit.score == "auto"
    assert GSPOAgent.load(agent.folder, agent.config.env).config.credit.score == "outcome"


def test_an_impossible_declaration_is_refused_before_anything_is_made(tmp_path, in_folder):
    message = "credit_score is 'episode' of type str, expected one of"
    with pytest.raises(EnvironmentContractError, match=message):
        train(tmp_path, COIN, "Wrong")
    with pytest.raises(EnvironmentCheckError, match=message):
        check_env(f"{tmp_path}/mine.py:Wrong")


def test_advantages_that_are_all_zero_although_outcomes_differ_are_warned_of(
    tmp_path, in_folder, caplog
):
    train(tmp_path, COIN, "Coin", credit={"score": "turns"}, steps=2)
    (warning,) = (text for text in caplog.messages if "every advantage" in text)
    assert "returns_to_go reads (score 'turns')" in warning


def test_check_env_says_which_score_is_used_and_why(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(COIN)

    def flip(rng, observation):
        return rng.choice(["heads", "tails"])

    names = ("Coin", "Opposed", "Declared")
    found = {name: check_env(f"{tmp_path}/mine.py:{name}", actions=flip) for name in names}
    assert {name: choice.score for name, choice in found.items()} == {
        "Coin": "outcome",
        "Opposed": "turns",
        "Declared": "outcome",
    }
    assert "no turn has a reward" in found["Coin"].reason
    assert found["Declared"].reason == "the environment declares it"


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_estimator_decides_whether_a_group_teaches(name):
    choices = {TASK.env_id: ScoreChoice(TASK.env_id, "turns")}

    def teaches(*episodes, **settings):
        scores = Scores(choices, find("advantage", name)(**settings))
        return scores.teaches(Group(task=TASK, episodes=episodes))

    assert teaches(episode(0.0, 1.0), episode(1.0), **LATER.get(name, {})) == (name in LATER)
    assert teaches(episode(0.0, 1.0), episode(0.0))
    assert not teaches(episode(0.5, 0.5), episode(0.5, 0.5))
    assert not teaches(episode(0.0, 1.0), episode(1.0, stop=StopReason.ERROR))


def test_an_estimator_of_ones_own_may_learn_from_any_difference():
    class Own(Estimator):
        """It could learn from anything."""

    def teaches(*episodes):
        return Scores({}, Own()).teaches(Group(task=TASK, episodes=episodes))

    assert teaches(episode(0.0, 1.0), episode(1.0))
    assert not teaches(episode(0.0, 1.0), episode(0.0, 1.0, 0.0))
    assert not teaches(episode(0.0, 1.0))
