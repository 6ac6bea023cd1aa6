"""One tree: Python, TOML and flags say the same, and what does not fit is named."""

from __future__ import annotations

import dataclasses

import pytest

from gspo_env.config import Config, from_dict, load_toml, to_toml
from gspo_env.errors import ConfigError
from gspo_env.tracking.base import flatten


def test_toml_gives_back_the_same_tree(tmp_path):
    config = Config(
        env="gspo/Calculator-v0", env_kwargs={"operations": [2, 3], "note": 'a "b"\n'}, steps=7
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    loaded = load_toml(path)
    assert flatten(loaded) == flatten(config)


def test_what_a_file_leaves_out_has_the_default_of_its_model(tmp_path):
    given = from_dict({"model": "some/model", "learner": {"minibatches": 2}})
    assert given.objective.clip_low == 3e-4
    assert given.learner.minibatches == 2
    assert given.learner.learning_rate == Config.for_model("x").learner.learning_rate < 1e-5
    assert from_dict({}) == Config() == Config.for_model("")
    assert Config().objective.clip_low == 0.03


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "unknown field 'stepz'; expected one of: steps"),
        ("[learner]\nlearning_rates = 1", "unknown field learner.'learning_rates'.*learning_rate"),
        ("steps = -1", "steps is -1; expected at least 0"),
        ("steps = 1.5", "steps is 1.5; expected int"),
        ("steps = true", "steps is True; expected int"),
        ("engine = 'magic'", "engine is 'magic'; expected one of 'transformers'"),
        ("learner = 3", "learner is 3; expected a table"),
        ("[rollout]\nmax_turn_tokens = 512", "max_turn_tokens is 512; expected less"),
        ("steps = ", "not valid TOML"),
        ("model = 3", "model is 3; expected str"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_toml(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config file .*none\.toml"):
        load_toml(tmp_path / "none.toml")


def test_parameters_are_flat_and_complete():
    flat = flatten(Config())
    assert flat["learner.learning_rate"] == 1e-3

    def leaves(tree, prefix=""):
        for name, value in tree.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    assert set(flat) == set(leaves(dataclasses.asdict(Config())))
