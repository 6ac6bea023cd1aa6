"""The tiny model: one token a word, imperfect demonstrations, a warm-up that learns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError
from gspo_env.recipes.embedded import build, demonstrate, to_samples
from gspo_env.recipes.tiny import Tiny
from gspo_env.types import Task


@given(st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text


def test_each_known_word_and_tool_call_frame_is_one_token(player):
    ids = player.chat.encode(
        '<tool_call>{"name": "lookup", "arguments": {"key": "amber"}}</tool_call>'
    )
    assert len(ids) == 3


IDS = ["Lookup", "Calculator", "GuessNumber", "MiniGrid", "SQL", "Wordle"]


@pytest.mark.parametrize("env_id", [f"gspo/{name}-v0" for name in IDS])
def test_demonstrations_of_every_built_in_environment_are_imperfect_and_repeatable(env_id):
    env = make_env(env_id)
    tasks = [Task(env_id=env_id, seed=n) for n in range(40)]
    slipping = [demonstrate(env, task, 0.5) for task in tasks]
    assert slipping == [demonstrate(env, task, 0.5) for task in tasks]
    assert slipping != [demonstrate(env, task, 0.0) for task in tasks]


def test_a_demonstration_is_the_transcript_that_a_rollout_would_make(player):
    env = make_env(player.env_id)
    demonstration = demonstrate(env, Task(env_id=player.env_id, seed=3), 0.0)
    sample = to_samples([demonstration], player.chat, env)[0]
    text = player.tokenizer.decode(sample.token_ids)
    for exchange in demonstration.exchanges:
        assert f"{exchange.observation}<|im_end|>" in text
        assert f"<|im_start|>assistant\n{exchange.action}<|im_end|>" in text
    said = player.tokenizer.decode(sample.token_ids[sample.mask])
    assert said == "".join(f"{x.action}<|im_end|>" for x in demonstration.exchanges)


def test_a_tool_without_parameters_has_a_model_too():
    env = make_env("gspo/SQL-v0")
    config = Tiny(hidden_size=32, demonstrations=5)
    _, tokenizer, demonstrations = build(env, "gspo/SQL-v0", config, 0)
    assert len(demonstrations) == 5
    call = '<tool_call>{"name": "tables", "arguments": {}}</tool_call>'
    assert len(tokenizer.encode(call, add_special_tokens=False)) == 1


def test_the_same_seed_builds_the_same_model(player):
    env = make_env(player.env_id)
    config = Tiny(hidden_size=32, demonstrations=20)
    first, again, other = (build(env, player.env_id, config, seed)[0] for seed in (0, 0, 1))
    one, two, three = (next(m.parameters()) for m in (first, again, other))
    assert one.equal(two)
    assert one.shape != three.shape or not one.equal(three)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 30}, "even size for each head"),
        ({"slips": 1.0}, "slips is 1.0"),
        ({"imitation_steps": -1}, "imitation_steps"),
    ],
)
def test_an_impossible_value_is_named(values, words):
    with pytest.raises(ConfigError, match=words):
        Tiny(**values)
