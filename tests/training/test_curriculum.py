"""Curricula: options follow from the results alone, and what is not an option is named."""

import json
from dataclasses import dataclass

import pytest
from support import runs

from gspo_agents.gspo import GSPOAgent
from gspo_env.errors import ConfigError
from gspo_env.training import Curriculum, Ladder, StepResult
from gspo_env.training.curriculum import next_options


def climb(ladder, successes):
    """The values that are played, one for each success and one more, and the state at the end."""
    state, played = {}, []
    for success in [*successes, 0.0]:
        options = ladder.options(state)
        played.append(options[ladder.option])
        state = json.loads(
            json.dumps(ladder.record(state, [StepResult(options, success, 0.0)], []))
        )
    return played, state


def after(ladder, *results):
    """The options after results of one step each."""
    state = {}
    for result in results:
        state = ladder.record(state, [result], [])
    return ladder.options(state)


def test_a_ladder_goes_up_when_the_mean_of_its_window_at_this_value_is_high_enough():
    ladder = Ladder(option="hops", values=(1, 2, 3), success=0.8, window=2)
    assert climb(ladder, [0.9, 0.6, 1.0, 0.9, 0.9, 0.9])[0] == [1, 1, 1, 2, 2, 3, 3]
    assert climb(ladder, [0.5] * 4)[0] == [1] * 5
    words = Ladder(option="word", values=("a", "b"), window=1)
    assert climb(words, [0.8, 0.0])[0] == ["a", "b", "b"]


def test_the_state_of_a_ladder_does_not_grow_with_the_steps():
    _, state = climb(Ladder(values=(1, 2), window=2), [0.25, 0.5] * 50)
    assert state == {"level": 0, "recent": [0.5, 0.0]}


@pytest.mark.parametrize("wrong", [{"option": ""}, {"values": ()}])
def test_an_invalid_ladder_is_named(wrong):
    with pytest.raises(ConfigError, match="expected"):
        Ladder(**wrong)


@dataclass(frozen=True)
class Fixed(Curriculum):
    value: object

    def options(self, state):
        return self.value


@pytest.mark.parametrize("value", [None, [1], {"a": {1, 2}}, {"a": object()}])
def test_options_that_are_no_mapping_of_json_values_are_named(value):
    with pytest.raises(
        ConfigError, match=r"of curriculum '.*:Fixed' failed: .*; expected names and"
    ):
        next_options(Fixed(value), {})


def test_a_ladder_ignores_results_of_groups_that_were_drawn_with_an_earlier_value():
    """Groups that are played ahead of the learner may still have the options of a step before."""
    ladder = Ladder(option="hops", values=(1, 2, 3), success=0.8, window=1)
    old, new = StepResult({"hops": 1}, 0.9, 0.0), StepResult({"hops": 2}, 0.9, 0.0)
    assert after(ladder, old) == {"hops": 2}
    assert after(ladder, old, old) == {"hops": 2}
    assert after(ladder, old, old, new) == {"hops": 3}
    assert ladder.options(ladder.record({}, [old, new], [])) == {"hops": 3}


GRADED = """
from support.small_env import Shown


class Graded(Shown):
    def reset(self, *, seed=None, options=None):
        self.level = (options or {}).get("level", 100)
        return super().reset(seed=seed)

    def reward(self, action):
        return float(self.level)
"""


def test_the_options_of_a_step_follow_from_the_results_before_it(tmp_path, in_folder):
    (tmp_path / "graded.py").write_text(GRADED)
    config = runs.tiny(
        env="graded.py:Graded",
        recipe={"imitation_learning_rate": 1e-2},
        steps=5,
        rollout={"max_turn_tokens": 8},
        curriculum={"name": "ladder", "option": "level", "values": [1, 2, 3], "success": 0.1},
    )
    history = GSPOAgent(config=config).train()
    training = [metrics for _, metrics in history if "rollout/return" in metrics]
    levels = [metrics["rollout/option/level"] for metrics in training]
    assert levels == [1, 1, 2, 2, 3]
    # an action that does not end within its limit is not seen by the environment
    assert all(0 < m["rollout/return"] <= level for m, level in zip(training, levels, strict=True))
    assert history[-1][1]["eval/return"] > 3
